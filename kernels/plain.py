"""The plans of implementation "torch", on any device: kernels/reference.py over a fixed layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import reference


class FlattenPlan:
    """See `ddpcomm.implementations.FlattenImplementation`."""

    def __init__(self, numels: Sequence[int], offsets: Sequence[int], total_numel: int, dtype: torch.dtype) -> None:
        del total_numel, dtype
        self._numels = tuple(numels)
        self._offsets = tuple(offsets)

    @torch.no_grad()
    def flatten(self, tensors: Sequence[Tensor | None], out: Tensor, scale: float, accumulate: bool) -> None:
        reference.flatten(tensors, self._offsets, out, scale, accumulate)

    @torch.no_grad()
    def unflatten(self, flat: Tensor, tensors: Sequence[Tensor | None], scale: float, statistics: Tensor | None) -> None:
        reference.unflatten(flat, self._offsets, tensors, scale)
        if statistics is not None:
            statistics.copy_(reference.norm(tensors))

    @torch.no_grad()
    def norm(self, flat: Tensor, statistics: Tensor) -> None:
        statistics.copy_(reference.norm([flat[o : o + n] for o, n in zip(self._offsets, self._numels, strict=True)]))


class QuantisePlan:
    """See `ddpcomm.implementations.QuantiseImplementation`."""

    def __init__(self, numels: Sequence[int], offsets: Sequence[int], total_numel: int, code: str) -> None:
        del numels
        self._offsets = tuple(offsets)
        self._total_numel = total_numel
        self._code = code

    @torch.no_grad()
    def quantise(self, tensors: Sequence[Tensor | None], codes: Tensor, scales: Tensor, scale: float, residual: Tensor | None) -> None:
        values = torch.empty(self._total_numel, dtype=torch.float32, device=codes.device)
        reference.flatten(tensors, self._offsets, values, scale)
        if residual is not None:
            values += residual
        lost = reference.quantise(values, self._code, codes, scales)
        if residual is not None:
            residual.copy_(lost)

    @torch.no_grad()
    def dequantise(self, codes: Tensor, scales: Tensor, tensors: Sequence[Tensor | None], scale: float, accumulate: bool) -> None:
        values = reference.dequantise(codes, scales, self._code)
        reference.unflatten(values, self._offsets, tensors, scale, accumulate)
