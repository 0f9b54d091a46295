"""What no synchroniser can go below, on this machine and over one transport, without overlap."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

import ddpcomm
from ddpcomm import _native, ops
from ddpcomm.native import DTYPES, reader

ALONE = "all-reduce alone"
BARE = "bare exchange"
Wrap = Callable[[nn.Module], nn.Module]


class Wrapper(nn.Module):
    """Hands its inputs on to `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)


class AllReduceAlone(Wrapper):
    """The floor that a transport sets without overlap: one all-reduce of as many bytes as there are gradients, at the end of backward.

    No gradient is copied in or out, so each rank keeps its own and they can't be compared with averages. It is called by a hook of the
    first parameter, which is among the last to be ready.
    """

    def __init__(self, module: nn.Module, transport: str) -> None:
        super().__init__(module)
        self.communicator = ddpcomm.create_communicator(device=next(module.parameters()).device, transport=transport)
        self.buffer = self.communicator.empty(sum(p.numel() for p in module.parameters()), torch.float32).zero_()
        next(module.parameters()).register_post_accumulate_grad_hook(self._exchange)

    def _exchange(self, _: Tensor) -> None:
        self.communicator.all_reduce(self.buffer).wait()


class BareExchange(Wrapper):
    """The least that averages every gradient through hooks: a native hook for each parameter, then, with the last gradient, one look at
    all of them, one copy into a buffer, one all-reduce and one copy back.

    It trusts that every parameter receives one gradient, dense and laid out like its parameter, in every backward, and that nothing of it
    changes. Nothing tells the ranks if that is wrong.
    """

    def __init__(self, module: nn.Module, transport: str) -> None:
        super().__init__(module)
        parameters: list[Tensor] = list(module.parameters())
        device, numels = parameters[0].device, [p.numel() for p in parameters]
        offsets = [0, *accumulate(numels)]
        self.communicator = ddpcomm.create_communicator(device=device, transport=transport)
        self.buffer = self.communicator.empty(offsets[-1], torch.float32)
        views = [self.buffer[start : start + p.numel()].view_as(p) for start, p in zip(offsets, parameters, strict=False)]
        self._plan = ops.FlattenPlan(numels, offsets[:-1], offsets[-1], torch.float32, device)
        self._table = _native.GradientTable(reader, parameters, views, [DTYPES[p.dtype] for p in parameters])
        self._countdown = _native.Countdown(self._exchange, lambda _: None, None)
        self._countdown.resize(len(parameters))
        self._arm = partial(self._countdown.arm, [1] * len(parameters), [len(parameters)], [0] * len(parameters))
        self._arm()
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(self._countdown.hook(index))

    def _exchange(self) -> None:
        gradients, _, _ = self._table.gather()
        self._plan.flatten(gradients, self.buffer, 1.0 / self.communicator.world_size)
        self.communicator.all_reduce(self.buffer).wait()
        self._plan.unflatten(self.buffer, gradients)
        self._arm()


def floors(transport: str) -> dict[str, Wrap]:
    """By subject."""
    return {
        f"{ALONE} {transport}": partial(AllReduceAlone, transport=transport),
        f"{BARE} {transport}": partial(BareExchange, transport=transport),
    }
