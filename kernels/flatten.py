"""flatten in Triton: many tensors into one buffer, copy + scale + cast in one launch.

Bytes: each source byte is read once, each byte of the buffer written once, and 32 bytes of tile table are read for each 4096 elements.
Tiles whose both sides are aligned to 16 bytes, and which are whole, move by 128-bit accesses; that has to be said to the compiler
(`multiple_of`), which knows nothing about an address that was loaded from memory and would fall back to 32-bit accesses.

A call takes one launch for each dtype among its tensors: normally one. Products and sums are rounded one after another, as the reference's
(no fused multiply-add: `OPTIONS`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .addresses import Groups
from .numbers import element_of, format_of, narrow, real_parts, widen
from .tiles import COLUMNS, TILE, AddressTable, tile_table

WARPS = 8
OPTIONS: dict[str, Any] = {"num_warps": WARPS, "enable_fp_fusion": False}
"""Of a launch."""


@triton.jit
def convert_block(
    source,
    target,
    places,
    valid,
    written,
    factor,
    MASKED: tl.constexpr,
    SOURCE: tl.constexpr,
    RESULT: tl.constexpr,
    RESULT_ELEMENT: tl.constexpr,
    COMPUTE: tl.constexpr,
    SCALED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Moves the elements at `places`; returns them as stored, in the compute type. Masked: loads below `valid`, stores below `written`."""
    element = tl.load(source + places, mask=places < valid, other=0) if MASKED else tl.load(source + places)
    value = widen(element, SOURCE, COMPUTE)
    if SCALED:
        value = value * factor
    if ACCUMULATE:
        before = tl.load(target + places, mask=places < valid, other=0) if MASKED else tl.load(target + places)
        value = widen(before, RESULT, COMPUTE) + value
    stored = narrow(value, RESULT, RESULT_ELEMENT)
    if MASKED:
        tl.store(target + places, stored, mask=places < written)
    else:
        tl.store(target + places, stored)
    return widen(stored, RESULT, COMPUTE)


@triton.jit
def flatten_kernel(
    addresses,
    tiles,
    factor_pointer,
    out,
    SOURCE: tl.constexpr,
    SOURCE_ELEMENT: tl.constexpr,
    SOURCE_BYTES: tl.constexpr,
    RESULT: tl.constexpr,
    RESULT_ELEMENT: tl.constexpr,
    RESULT_BYTES: tl.constexpr,
    COMPUTE: tl.constexpr,
    SCALED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tiles + tl.program_id(0) * COLUMNS
    address = tl.load(addresses + tl.load(row))
    if address != -1:  # tiles.OTHER
        counts = tl.load(row + 3)
        written = (counts >> 32).to(tl.int32)
        valid = tl.where(address == 0, 0, counts.to(tl.int32))  # tiles.ABSENT
        factor = tl.load(factor_pointer).to(COMPUTE)
        places = tl.arange(0, TILE)
        source_address = address + tl.load(row + 1) * SOURCE_BYTES
        target_address = out.to(tl.int64) + tl.load(row + 2) * RESULT_BYTES
        source = source_address.to(tl.pointer_type(SOURCE_ELEMENT))
        target = target_address.to(tl.pointer_type(RESULT_ELEMENT))
        if (valid == TILE) & ((source_address | target_address) % 16 == 0):
            convert_block(
                tl.multiple_of(source, 16), tl.multiple_of(target, 16), places, valid, written, factor,
                False, SOURCE, RESULT, RESULT_ELEMENT, COMPUTE, SCALED, ACCUMULATE,
            )  # fmt: skip
        else:
            reach = written
            if ACCUMULATE:
                reach = valid
            convert_block(
                source, target, places, valid, reach, factor,
                True, SOURCE, RESULT, RESULT_ELEMENT, COMPUTE, SCALED, ACCUMULATE,
            )  # fmt: skip


def conversion(source: torch.dtype, result: torch.dtype, scale: float, accumulate: bool, *, copy_bits: bool = True) -> dict[str, Any]:
    """The compile-time arguments of a conversion. copy_bits: numbers that need no conversion are moved as integers."""
    copied = copy_bits and source == result and scale == 1 and not accumulate
    source_format, result_format = ("bits", "bits") if copied else (format_of(source), format_of(result))
    source_element, result_element = element_of(source, source_format), element_of(result, result_format)
    compute = tl.float64 if "float64" in (source_format, result_format) else tl.float32
    return {
        "SOURCE": source_format,
        "SOURCE_ELEMENT": source_element,
        "SOURCE_BYTES": real_parts(source)[0].itemsize,
        "RESULT": result_format,
        "RESULT_ELEMENT": result_element,
        "RESULT_BYTES": real_parts(result)[0].itemsize,
        "COMPUTE": compute,
        "SCALED": scale != 1,
        "ACCUMULATE": accumulate,
        "COLUMNS": COLUMNS,
        "TILE": TILE,
    }


class Factor:
    """A scale on the device, made anew only when it changes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._scale: float | None = None
        self._tensor = torch.empty(0)

    def __call__(self, scale: float) -> Tensor:
        if scale != self._scale:
            self._tensor = torch.full((1,), scale, dtype=torch.float64, device=self._device)
            self._scale = scale
        return self._tensor


class Flatten:
    """flatten over a fixed layout. Arguments as for `ddpcomm.plans.FlattenPlan`."""

    def __init__(self, numels: Sequence[int], offsets: Sequence[int], total_numel: int, dtype: torch.dtype, device: torch.device) -> None:
        parts = real_parts(dtype)[1]
        table = tile_table([n * parts for n in numels], [o * parts for o in offsets], total_numel * parts, gaps=True)
        self._tiles = torch.from_numpy(table).to(device)
        self._factor = Factor(device)
        self._tables: dict[torch.dtype, AddressTable] = {}
        self._count = len(numels)
        self._device = device

    def __call__(self, groups: Groups, out: Tensor, scale: float, accumulate: bool) -> None:
        if len(self._tiles) == 0:
            return
        for dtype, addresses in groups:
            table = self._tables.get(dtype)
            if table is None:
                table = self._tables[dtype] = AddressTable(self._count, self._device)
            flatten_kernel[(len(self._tiles),)](
                table(addresses),
                self._tiles,
                self._factor(scale),
                out.view(torch.uint8) if out.numel() else out,
                **conversion(dtype, out.dtype, scale, accumulate),
                **OPTIONS,
            )
