"""The ways to exchange gradients that are measured beside each other."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

import ddpcomm
from bench.floors import Wrap, Wrapper, floors
from ddpcomm import ops
from ddpcomm.layout import BYTES_PER_MB, DEFAULT_BUCKET_MB

NONE = "none"
TORCH = "torch"
TRANSPORTS = ("process_group", "shared_memory", "nccl", "auto")

TORCH_MODES: dict[str, dict[str, Any]] = {
    TORCH: {},
    "torch view": {"gradient_as_bucket_view": True},
    "torch static": {"static_graph": True},
    "torch batched": {"batched_grad_copy": True},
    "torch unused": {"find_unused_parameters": True},
}


class OwnBackward(Wrapper, ABC):
    """Of a library that asks for a call of its own in place of `loss.backward()`."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None: ...


class AfterBackward(Wrapper):
    """Buckets like DDP's, by the same kernels over the same transport, but without overlap: all of it when backward has ended.

    Args:
        exchanged: called with no arguments when the exchange begins and when it ends.
    """

    def __init__(self, module: nn.Module, transport: str, exchanged: Callable[[], None] = lambda: None) -> None:
        super().__init__(module)
        self.communicator = ddpcomm.create_communicator(device=next(module.parameters()).device, transport=transport)
        self._exchanged = exchanged
        self._buckets = [
            (bucket, self.communicator.empty(sum(p.numel() for p in bucket), torch.float32)) for bucket in filled_buckets(module)
        ]

    def forward(self, *inputs: Any) -> Any:
        output = super().forward(*inputs)
        output.register_hook(lambda _: Variable._execution_engine.queue_callback(self._exchange))  # type: ignore[attr-defined]
        return output

    def _exchange(self) -> None:
        self._exchanged()
        works = []
        for parameters, buffer in self._buckets:
            ops.flatten([p.grad for p in parameters], buffer, 1.0 / self.communicator.world_size)
            works.append(self.communicator.all_reduce(buffer))
        for work, (parameters, buffer) in zip(works, self._buckets, strict=True):
            work.wait()
            ops.unflatten(buffer, [p.grad for p in parameters])
        self._exchanged()


def filled_buckets(module: nn.Module) -> Iterator[list[nn.Parameter]]:
    """The parameters, last ones first, in groups that reach the usual size of a bucket."""
    bucket: list[nn.Parameter] = []
    for parameter in reversed(list(module.parameters())):
        bucket.append(parameter)
        if sum(p.nbytes for p in bucket) >= DEFAULT_BUCKET_MB * BYTES_PER_MB:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def torch_ddp(**options: Any) -> Wrap:
    return lambda module: nn.parallel.DistributedDataParallel(module, **options)


def own_ddp(transport: str, **options: Any) -> Wrap:
    return lambda module: ddpcomm.DistributedDataParallel(module, transport=transport, **options)


def plain(module: nn.Module) -> nn.Module:
    return module


def engines(transports: list[str]) -> dict[str, Callable[..., Wrap]]:
    """By name, what makes a wrapper from DDP's options: torch's DDP, and ddpcomm's over each transport."""
    return {TORCH: torch_ddp, **{f"ddpcomm {transport}": lambda t=transport, **options: own_ddp(t, **options) for transport in transports}}


def wrappers(transports: list[str]) -> dict[str, Wrap]:
    """By subject, what wraps a module: nothing, torch's DDP in each of its modes, ddpcomm over each transport, with and without views,
    and each transport's floors."""
    found: dict[str, Wrap] = {NONE: plain}
    found |= {name: torch_ddp(**options) for name, options in TORCH_MODES.items()}
    for transport in transports:
        for view in (False, True):
            found[f"ddpcomm {transport}{' view' if view else ''}"] = own_ddp(transport, gradient_as_bucket_view=view)
        found |= floors(transport)
    return found


def twin(module: nn.Module) -> nn.Module:
    """A copy that shares the parameters' memory, but has gradients and buffers of its own: weights are not changed here."""
    memo = {id(parameter): nn.Parameter(parameter.detach()) for parameter in module.parameters()}
    return copy.deepcopy(module, memo)


def gradients(module: nn.Module) -> list[Tensor]:
    """A copy of every gradient; of a distributed tensor, of this rank's part."""
    found = []
    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            raise ValueError(f"{name} has no gradient")
        found.append((gradient.to_local() if hasattr(gradient, "to_local") else gradient).clone())
    return found
