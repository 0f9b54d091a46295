"""What is known of a model's gradients after a backward: which are averaged, which parameters took part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddpcomm.parameters import ManagedParameter, ParameterSet
from ddpcomm.reduction import Reduction
from ddpcomm.statistics import Statistics


class Record:
    """Kept by a reducer, read by its model.

    Args:
        statistics: where sizes of unused parameters and the like are noted.
        keep_counts: keep on how many ranks each parameter was used.
    """

    def __init__(self, statistics: Statistics, keep_counts: bool) -> None:
        self.statistics = statistics
        self.unused: dict[str, str] = {}
        self.graph_is_static = True
        self.complete = True
        """Whether the last backward that was to synchronise did."""
        self.brought: list[Tensor] = []
        """Parameters to which the last backward brought an average, and no gradient of this rank's own."""
        self._keep_counts = keep_counts
        self._own: dict[int, tuple[Tensor, str]] = {}
        self._used_before: list[bool] | None = None
        self._flags: list[tuple[Sequence[int], Tensor]] = []

    def gradients_are_own(self, parameters: ParameterSet, fires: Sequence[int], why: str) -> None:
        """Those that received a gradient in this backward hold this rank's own."""
        for parameter, count in zip(parameters.parameters, fires, strict=True):
            if count:
                self._own[id(parameter)] = parameter, why

    def forget(self) -> None:
        """The gradients are gone, on purpose."""
        self._own.clear()
        self.complete = True
        self.brought = []

    def is_own(self, parameter: Tensor) -> bool:
        """Whether a gradient is waiting for its average, from a backward before."""
        return id(parameter) in self._own and parameter.grad is not None

    def averaged(
        self, reduction: Reduction, parameters: ParameterSet, fires: Sequence[int], used: list[bool], somewhere: Sequence[bool]
    ) -> list[str]:
        """Gradients were averaged.

        Args:
            reduction: that did it.
            parameters: whose.
            fires: by parameter, how often it received a gradient in this backward.
            used: whether this rank used it, in this backward or in those before that its average takes up.
            somewhere: whether some rank did.

        Returns:
            The parameters that no rank used.
        """
        self._own.clear()
        self.complete = True
        idle: list[ManagedParameter] = []
        self.unused = {}
        self.brought = []
        if not all(fires):
            self.brought = [p for p, count, anywhere in zip(parameters.parameters, fires, somewhere, strict=True) if anywhere and not count]
        if not all(used):
            idle = [m for m, anywhere in zip(parameters.managed, somewhere, strict=True) if not anywhere]
            self.unused = {
                name: "used on other ranks only" if anywhere else "used on no rank"
                for name, here, anywhere in zip(parameters.names, used, somewhere, strict=True)
                if not here
            }
        self.graph_is_static = self.graph_is_static and self._used_before in (None, used)
        self._used_before = used
        self.statistics.unused_parameter_bytes = sum(m.parameter.nbytes for m in idle)
        if self._keep_counts:
            buckets = reduction.arrangement.buckets
            self._flags = [(bucket.layout.flagged, torch.empty_like(bucket.flags).copy_(bucket.flags)) for bucket in buckets]
        return [m.name for m in idle]

    def unsynchronized(self, parameters: ParameterSet) -> dict[str, str]:
        """Parameters whose gradient is this rank's own, and why."""
        return {m.name: self._own[id(m.parameter)][1] for m in parameters.managed if self.is_own(m.parameter)}

    def used_counts(self, numel: int, divisor: float) -> Tensor:
        """On how many ranks each of `numel` parameters was used, int32; flags were divided by `divisor`."""
        counts = torch.zeros(numel, dtype=torch.int32)
        for flagged, flags in self._flags:
            counts[list(flagged)] = (flags.double() * divisor).round().to(torch.int32).cpu()
        return counts
