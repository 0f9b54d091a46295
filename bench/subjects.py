"""The ways to exchange gradients that are measured beside each other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ddpcomm

NONE = "none"
TRANSPORTS = ("process_group", "shared_memory", "auto")

TORCH_MODES: dict[str, dict[str, Any]] = {
    "torch": {},
    "torch view": {"gradient_as_bucket_view": True},
    "torch static": {"static_graph": True},
    "torch batched": {"batched_grad_copy": True},
    "torch unused": {"find_unused_parameters": True},
}


def wrappers(transports: list[str]) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """By subject, what wraps a module: nothing, torch's DDP in each of its modes, ddpcomm over each transport, with and without views."""
    found: dict[str, Callable[[nn.Module], nn.Module]] = {NONE: lambda module: module}
    for name, options in TORCH_MODES.items():
        found[name] = lambda module, options=options: nn.parallel.DistributedDataParallel(module, **options)
    for transport in transports:
        for view in (False, True):
            found[f"ddpcomm {transport}{' view' if view else ''}"] = lambda module, transport=transport, view=view: (
                ddpcomm.DistributedDataParallel(module, gradient_as_bucket_view=view, transport=transport)
            )
    return found


def twin(module: nn.Module) -> nn.Module:
    """A copy that shares the parameters' memory, but has gradients and buffers of its own: weights are not changed here."""
    memo = {id(parameter): nn.Parameter(parameter.detach()) for parameter in module.parameters()}
    return copy.deepcopy(module, memo)


def gradients(module: nn.Module) -> list[torch.Tensor]:
    """A copy of every gradient."""
    found = []
    for name, parameter in module.named_parameters():
        if parameter.grad is None:
            raise ValueError(f"{name} has no gradient")
        found.append(parameter.grad.clone())
    return found
