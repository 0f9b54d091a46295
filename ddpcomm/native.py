"""The implementations "native": `_native`'s plans, with torch's thread count and tensors for results."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddpcomm import _native

# DLPack's (code, bits) of each dtype that a flat buffer can have.
DTYPES: dict[torch.dtype, tuple[int, int]] = {
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.uint16: (1, 16),
    torch.uint32: (1, 32),
    torch.uint64: (1, 64),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
    torch.complex32: (5, 32),
    torch.complex64: (5, 64),
    torch.complex128: (5, 128),
    torch.bool: (6, 8),
    torch.float8_e4m3fn: (10, 8),
    torch.float8_e5m2: (12, 8),
}

_DTYPE_OF = {code: dtype for dtype, code in DTYPES.items()}

reader = _native.TensorReader(Tensor, DTYPES)


class FlattenPlan:
    """See `ddpcomm.implementations.FlattenImplementation`. `instruction_set` is one of `_native.instruction_sets()`; "" means the best."""

    def __init__(
        self, numels: Sequence[int], offsets: Sequence[int], total_numel: int, dtype: torch.dtype, instruction_set: str = ""
    ) -> None:
        self._count = len(numels)
        self._plan = _native.FlattenPlan(reader, numels, offsets, total_numel, DTYPES[dtype], instruction_set)

    def flatten(self, tensors: Sequence[Tensor | None], out: Tensor, scale: float, accumulate: bool) -> None:
        self._plan.flatten(tensors, out, scale, torch.get_num_threads(), accumulate)

    def flatten_around(
        self, tensors: Sequence[Tensor | None], out: Tensor, skipped: range, least_bytes: int
    ) -> list[tuple[int, int, int, int]]:
        """As `flatten` with scale 1, but for what tensors of `least_bytes` or more, and of `out`'s dtype, have in `skipped`: (tensor, first
        element in `out`, count, address) of each such part."""
        return self._plan.flatten_around(tensors, out, torch.get_num_threads(), skipped.start, skipped.stop, least_bytes)

    def unflatten(self, flat: Tensor, tensors: Sequence[Tensor | None], scale: float, statistics: Tensor | None) -> None:
        if statistics is None:
            self._plan.unflatten(flat, tensors, scale, torch.get_num_threads())
        else:
            statistics[0], statistics[1] = self._plan.unflatten_with_norm(flat, tensors, scale, torch.get_num_threads())

    def groups(
        self, tensors: Sequence[Tensor | None], flat: Tensor, scale: float, *, into_buffer: bool, accumulate: bool
    ) -> list[tuple[torch.dtype, list[int]]]:
        """Checks a call on any device. Returns the tensors' addresses as `ddpcomm.kernels.addresses.Groups`."""
        return [(_DTYPE_OF[code], each) for code, each in self._plan.addresses(tensors, flat, scale, into_buffer, accumulate)]

    def check_buffer(self, flat: Tensor) -> None:
        """Whether `flat`, on any device, is as the layout was made for."""
        self._plan.addresses([None] * self._count, flat, 1.0, False, False)

    def norm(self, flat: Tensor, statistics: Tensor) -> None:
        statistics[0], statistics[1] = self._plan.norm(flat, torch.get_num_threads())


class QuantisePlan:
    """See `ddpcomm.implementations.QuantiseImplementation`."""

    def __init__(self, numels: Sequence[int], offsets: Sequence[int], total_numel: int, code: str, instruction_set: str = "") -> None:
        self._plan = _native.QuantisePlan(reader, numels, offsets, total_numel, code, instruction_set)

    def quantise(self, tensors: Sequence[Tensor | None], codes: Tensor, scales: Tensor, scale: float, residual: Tensor | None) -> None:
        self._plan.quantise(tensors, codes, scales, residual, scale, torch.get_num_threads())

    def groups(
        self, tensors: Sequence[Tensor | None], codes: Tensor, scale: float, *, into_buffer: bool, accumulate: bool
    ) -> list[tuple[torch.dtype, list[int]]]:
        """As `FlattenPlan.groups`."""
        return [(_DTYPE_OF[code], each) for code, each in self._plan.addresses(tensors, codes, scale, into_buffer, accumulate)]

    def dequantise(self, codes: Tensor, scales: Tensor, tensors: Sequence[Tensor | None], scale: float, accumulate: bool) -> None:
        self._plan.dequantise(codes, scales, tensors, scale, accumulate, torch.get_num_threads())
