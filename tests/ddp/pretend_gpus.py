"""Lets tests that ask for CUDA devices run on CPU ranks: while it lasts, every request for a GPU is answered with the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def asks_for_gpu(value: object) -> bool:
    """Whether an argument that may be a device names a GPU."""
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.startswith("cuda")


class TensorsStayHere(TorchFunctionMode):
    """Functions on tensors that name a GPU get the CPU instead."""

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if asks_for_gpu(kwargs.get("device")) or _is_index(kwargs.get("device")):
            kwargs["device"] = CPU
        if function is torch.Tensor.to:
            args = [CPU if position == 1 and (asks_for_gpu(a) or _is_index(a)) else a for position, a in enumerate(args)]
        return function(*args, **kwargs)


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Idle:
    """A stream or an event on which nothing ever has to be waited for."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, *_: Any) -> Idle:
        return Idle()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


@contextlib.contextmanager
def gpus_are_cpu(count: int) -> Iterator[None]:
    """There seem to be `count` GPUs, all of which are the CPU."""
    move = nn.Module.to

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        first = [CPU if asks_for_gpu(a) or _is_index(a) else a for a in args[:1]]
        if asks_for_gpu(kwargs.get("device")) or _is_index(kwargs.get("device")):
            kwargs["device"] = CPU
        return move(self, *first, *args[1:], **kwargs)

    # A function of its own for each: torch.compile keeps a table of them.
    nothing = {name: lambda *_, **__: None for name in ("set_device", "synchronize", "manual_seed", "_sleep")}
    no_context = {name: lambda *_, **__: contextlib.nullcontext() for name in ("stream", "device")}
    answers = {
        "device_count": lambda: count,
        "current_device": lambda: 0,
        "current_stream": lambda *_: Idle(),
        "Stream": Idle,
        "Event": Idle,
    }
    with (
        mock.patch.multiple(nn.Module, to=to, cuda=lambda self, *_: self),
        mock.patch.multiple(torch.cuda, **answers, **nothing, **no_context),
        TensorsStayHere(),
    ):
        yield
