"""The plans of implementation "triton"."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .addresses import Groups
from .flatten import Flatten
from .norm import Norm
from .quantise import Quantise
from .unflatten import Unflatten


class FlattenPlan:
    """See `ddpcomm.implementations.DeviceFlattenPlan`. What an operation needs is built when it is first used."""

    def __init__(self, numels: Sequence[int], offsets: Sequence[int], total_numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._layout = (tuple(numels), tuple(offsets), total_numel, dtype, device)
        self._flatten: Flatten | None = None
        self._unflatten: Unflatten | None = None
        self._norm: Norm | None = None

    def flatten(self, groups: Groups, out: Tensor, scale: float, accumulate: bool) -> None:
        if self._flatten is None:
            self._flatten = Flatten(*self._layout)
        self._flatten(groups, out, scale, accumulate)

    def unflatten(self, flat: Tensor, groups: Groups, scale: float, statistics: Tensor | None) -> None:
        if self._unflatten is None:
            self._unflatten = Unflatten(*self._layout)
        self._unflatten(flat, groups, scale, statistics)

    def norm(self, flat: Tensor, statistics: Tensor) -> None:
        if self._norm is None:
            self._norm = Norm(*self._layout)
        self._norm(flat, statistics)


class QuantisePlan(Quantise):
    """See `ddpcomm.implementations.DeviceQuantisePlan`."""
