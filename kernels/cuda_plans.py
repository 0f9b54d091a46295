"""The plans of implementation "cuda": csrc/cuda over a fixed layout.

Up to 4,000 addresses travel as a kernel's argument (480 within the classic 4 KB, the rest within the 32 KB that CUDA 12.1 and Volta
brought); more lie in a table on the device, as for Triton.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from .addresses import Groups
from .cuda_launch import Argument, CudaLauncher, Launcher
from .tiles import AddressTable, tile_table

ARGUMENT_SIZES = (480, 4000)
"""How many addresses a kernel can take by value, in two sizes."""

_TYPES: dict[torch.dtype, str] = {
    torch.float32: "Float32",
    torch.float64: "Float64",
    torch.bfloat16: "BFloat16",
    torch.float16: "Float16",
    torch.float8_e4m3fn: "Float8E4M3",
    torch.float8_e5m2: "Float8E5M2",
}
_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}
_CODES = {"int8": "Int8", "float8_e4m3": "Float8E4M3", "float8_e5m2": "Float8E5M2"}

Macros = Mapping[str, str | int]


def _real(dtype: torch.dtype) -> torch.dtype:
    return _PARTS.get(dtype, dtype)


def _conversion(source: torch.dtype, result: torch.dtype, scale: float, accumulate: bool) -> dict[str, str | int]:
    """The macros of a conversion. What needs none is moved as bits."""
    source, result = _real(source), _real(result)
    copied = source == result and scale == 1 and not accumulate
    names = (f"Bits{8 * source.itemsize}",) * 2 if copied else (_TYPES[source], _TYPES[result])
    return {"SOURCE": names[0], "RESULT": names[1], "COPY": int(copied), "ACCUMULATE": int(accumulate)}


class _Tiles:
    """A layout's tile tables, and the launch of a kernel that takes addresses."""

    def __init__(self, numels: Sequence[int], offsets: Sequence[int], total_numel: int, device: torch.device, launcher: Launcher) -> None:
        self._layout = (numels, offsets, total_numel)
        self._count = len(numels)
        self._device = device
        self._launcher = launcher
        self._tables: dict[torch.dtype, AddressTable] = {}
        count = self._count + 1  # the last is the absent tensor of `tile_table`
        self._size = next((size for size in ARGUMENT_SIZES if count <= size), 0)
        self._by_value = np.zeros(1, dtype=[("address", np.int64, (max(self._size, 1),))])

    @cached_property
    def with_gaps(self) -> Tensor:
        return torch.from_numpy(tile_table(*self._layout, gaps=True)).to(self._device)

    @cached_property
    def without_gaps(self) -> Tensor:
        return torch.from_numpy(tile_table(*self._layout, gaps=False)).to(self._device)

    def launch(self, kernel: str, macros: Macros, tiles: Tensor, addresses: list[int], dtype: torch.dtype, *arguments: Argument) -> None:
        where: Argument
        if self._size:
            self._by_value["address"][0, : self._count] = addresses
            where = self._by_value
        else:
            if dtype not in self._tables:
                self._tables[dtype] = AddressTable(self._count, self._device)
            where = self._tables[dtype](addresses)
        self._launcher(f"{kernel}.cu", kernel, {**macros, "POINTERS": self._size}, len(tiles), (where, tiles, *arguments))


class FlattenPlan:
    """See `ddpcomm.implementations.DeviceFlattenPlan`. launcher: for tests; None means the GPU's."""

    def __init__(
        self,
        numels: Sequence[int],
        offsets: Sequence[int],
        total_numel: int,
        dtype: torch.dtype,
        device: torch.device,
        launcher: Launcher | None = None,
    ) -> None:
        parts = dtype.itemsize // _real(dtype).itemsize
        self._launcher = launcher or CudaLauncher(device)
        self._tiles = _Tiles([n * parts for n in numels], [o * parts for o in offsets], total_numel * parts, device, self._launcher)

    def flatten(self, groups: Groups, out: Tensor, scale: float, accumulate: bool) -> None:
        tiles = self._tiles.with_gaps
        if len(tiles) == 0:
            return
        for dtype, addresses in groups:
            self._tiles.launch("flatten", _conversion(dtype, out.dtype, scale, accumulate), tiles, addresses, dtype, float(scale), out)

    def unflatten(self, flat: Tensor, groups: Groups, scale: float, statistics: Tensor | None) -> None:
        tiles = self._tiles.without_gaps
        partials = torch.zeros(len(tiles) if statistics is not None else 0, 2, dtype=torch.float64, device=flat.device)
        if len(tiles) > 0:
            for dtype, addresses in groups:
                macros = {**_conversion(flat.dtype, dtype, scale, False), "NORM": int(statistics is not None)}
                if statistics is not None:
                    macros.update(SOURCE=_TYPES[flat.dtype], RESULT=_TYPES[dtype], COPY=0)
                self._tiles.launch("unflatten", macros, tiles, addresses, dtype, float(scale), flat, partials)
        if statistics is not None:
            self._sum(flat.dtype, partials, statistics)

    def norm(self, flat: Tensor, statistics: Tensor) -> None:
        tiles = self._tiles.without_gaps
        partials = torch.zeros(len(tiles), 2, dtype=torch.float64, device=flat.device)
        if len(tiles) > 0:
            self._launcher("norm.cu", "norm_tiles", {"SOURCE": _TYPES[flat.dtype], "POINTERS": 0}, len(tiles), (tiles, flat, partials))
        self._sum(flat.dtype, partials, statistics)

    def _sum(self, dtype: torch.dtype, partials: Tensor, statistics: Tensor) -> None:
        self._launcher("norm.cu", "sum_partials", {"SOURCE": _TYPES[dtype], "POINTERS": 0}, 1, (partials, len(partials), statistics))


class QuantisePlan:
    """See `ddpcomm.implementations.DeviceQuantisePlan`. Codes and residual are aligned to 16 bytes, as every allocation of torch's is."""

    def __init__(
        self,
        numels: Sequence[int],
        offsets: Sequence[int],
        total_numel: int,
        code: str,
        device: torch.device,
        launcher: Launcher | None = None,
    ) -> None:
        self._tiles = _Tiles(numels, offsets, total_numel, device, launcher or CudaLauncher(device))
        self._code = _CODES[code]

    def quantise(self, groups: Groups, codes: Tensor, scales: Tensor, scale: float, residual: Tensor | None) -> None:
        tiles = self._tiles.with_gaps
        _check_aligned(codes=codes, residual=residual)
        if len(tiles) == 0:
            return
        for dtype, addresses in groups:
            macros = {"SOURCE": _TYPES[dtype], "CODE": self._code, "FEEDBACK": int(residual is not None)}
            kept = scales if residual is None else residual
            self._tiles.launch("quantise", macros, tiles, addresses, dtype, float(scale), kept, codes, scales)

    def dequantise(self, codes: Tensor, scales: Tensor, groups: Groups, scale: float, accumulate: bool) -> None:
        tiles = self._tiles.without_gaps
        _check_aligned(codes=codes)
        if len(tiles) == 0:
            return
        for dtype, addresses in groups:
            macros = {"RESULT": _TYPES[dtype], "CODE": self._code, "ACCUMULATE": int(accumulate)}
            self._tiles.launch("dequantise", macros, tiles, addresses, dtype, float(scale), codes, scales)


def _check_aligned(**buffers: Tensor | None) -> None:
    for name, buffer in buffers.items():
        if buffer is not None and buffer.data_ptr() % 16:
            raise ValueError(f"{name} must begin at a multiple of 16 bytes; clone it first")
