"""The norm of the gradients, and clipping by it.

It is measured anew each time, in one pass over the gradients: what a backward might keep can't be trusted, for `GradScaler.unscale_`,
collectives and writes through `.data` change gradients and bump no version.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddpcomm import ops
from ddpcomm.errors import NonFiniteGradientError


def gradient_statistics(gradients: Sequence[Tensor]) -> Tensor:
    """[sum of squares, number of values that are not finite]: two float64, on the first gradient's device."""
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
