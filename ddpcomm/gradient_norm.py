"""The norm of the gradients, taken while they are written: clipping then costs no pass of its own for it.

The first call of `DistributedDataParallel.grad_norm()` reads all gradients; from then on each backward keeps the sum of squares of every
bucket, which unflatten adds up as the bytes pass, or, where gradients are views of their bucket, one pass over the bucket. What is kept
counts only as long as the very same gradients are there, unchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ddpcomm import ops
from ddpcomm.arrangement import Arrangement
from ddpcomm.errors import NonFiniteGradientError


class GradientNorms:
    """What the last backward kept of its buckets.

    `wanted`: whether backwards are to keep anything.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._statistics: list[Tensor] = []
        self._gradients: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def keep(self, arrangement: Arrangement) -> None:
        """Called when a backward has put all its averages in place."""
        self.forget()
        buckets = [bucket for bucket in arrangement.buckets if bucket.slots]
        if not self.wanted or any(bucket.statistics is None for bucket in buckets):
            return
        self._statistics = [bucket.statistics for bucket in buckets if bucket.statistics is not None]
        for bucket in buckets:
            for parameter in bucket.parameters:
                if parameter.grad is not None:
                    self._gradients[id(parameter)] = (weakref.ref(parameter.grad), parameter.grad._version)

    def forget(self) -> None:
        self._statistics = []
        self._gradients = {}

    def statistics(self, parameters: Iterable[Tensor]) -> Tensor:
        """[sum of squares, number of values that are not finite] over the gradients of `parameters`: two float64."""
        present = [parameter for parameter in parameters if parameter.grad is not None]
        # Always measured anew. What a backward has kept can't be trusted: GradScaler.unscale_, collectives and writes through .data change
        # gradients and bump no version.
        return _statistics([p.grad for p in present if p.grad is not None])


def _statistics(gradients: Sequence[Tensor]) -> Tensor:
    dense = [g.coalesce().values() if g.layout is not torch.strided else g.detach() for g in gradients]
    real = [torch.view_as_real(g.resolve_conj()) if g.is_complex() else g for g in dense]
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in real:
        by_device.setdefault(gradient.device, []).append(gradient)
    if not by_device:
        return torch.zeros(2, dtype=torch.float64)
    first = next(iter(by_device))
    return torch.stack([ops.norm(some).to(first) for some in by_device.values()]).sum(dim=0)


def clip(gradients: Sequence[Tensor], statistics: Tensor, max_norm: float, error_if_nonfinite: bool) -> Tensor:
    """Scales `gradients` by max_norm / norm where that is less than 1, as `torch.nn.utils.clip_grad_norm_` does. Returns the norm.

    Raises:
        NonFiniteGradientError: with `error_if_nonfinite`; nothing is changed. On CUDA the host waits.
    """
    norm = statistics[0].sqrt()
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise NonFiniteGradientError(
            f"the norm of the gradients is {norm.item()}: {int(statistics[1])} of their values are not finite, so they can't be clipped; "
            "lower the learning rate or the loss scale, or pass error_if_nonfinite=False"
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if norm.device.type == "cpu" and factor == 1:
        return norm
    for gradient in gradients:
        gradient.detach().mul_(factor.to(device=gradient.device, dtype=torch.float32))
    return norm
