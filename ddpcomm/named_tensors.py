"""The parameters and buffers of a module that a wrapper looks after, by name, and a cheap look whether modules still hold the same."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from ddpcomm._native import ContainerWatch


def named_parameters(module: nn.Module, ignored: Collection[str]) -> Iterator[tuple[str, nn.Parameter]]:
    """In registration order, each once, under the first of its names that isn't ignored.

    As in torch's DDP a tied parameter is left alone only where it is ignored in every module that holds it, and a module that has several
    names goes by the first.
    """
    seen: set[nn.Parameter] = set()
    for prefix, submodule in module.named_modules():
        for name, parameter in submodule.named_parameters(prefix, recurse=False):
            if name not in ignored and parameter not in seen:
                seen.add(parameter)
                yield name, parameter


def named_buffers(module: nn.Module, ignored: Collection[str]) -> dict[str, Tensor]:
    """The buffers as they are now, re-assigned ones too."""
    return {name: buffer for name, buffer in module.named_buffers() if name not in ignored}


class TensorWatch:
    """Tells whether a tensor or submodule came, went or was exchanged. Costs 5 ns for each, 1 us where TorchScript holds them.

    Args:
        module: it and all its submodules are watched.
        kind: of tensors, by the entry that modules keep them in: "_parameters" or "_buffers".
    """

    def __init__(self, module: nn.Module, kind: str) -> None:
        modules = list(module.modules())
        # These have no such entries in their __dict__, and their submodules can't be exchanged.
        self._scripted = [m for m in modules if isinstance(m, torch.jit.ScriptModule)]
        self._kind = kind
        self._scripted_tensors = self._of_scripted()
        self._containers = ContainerWatch([m.__dict__ for m in modules if not isinstance(m, torch.jit.ScriptModule)], (kind, "_modules"))

    def changed(self) -> bool:
        if self._containers.changed():
            return True
        return bool(self._scripted) and list(map(id, self._of_scripted())) != list(map(id, self._scripted_tensors))

    def _of_scripted(self) -> list[Tensor]:
        return [tensor for m in self._scripted for tensor in getattr(m, self._kind).values()]
