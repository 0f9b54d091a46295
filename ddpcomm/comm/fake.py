"""A communicator of any size in one process, for tests: nothing is sent, every other rank is taken to hold what this one does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from ddpcomm.comm.base import Communicator, CompletedWork, ReduceOp, Work
from ddpcomm.errors import ConfigurationError

ErrorFactory = Callable[[], Exception]


@dataclass(frozen=True)
class FakeCall:
    """A collective that was called: its name, what it reduces with, and the tensor that goes in."""

    operation: str
    op: ReduceOp | None
    numel: int
    dtype: torch.dtype | None


class FakeCommunicator(Communicator):
    """Ranks that all hold the same: a sum is the world size times the tensor, an average or a maximum is the tensor itself.

    `calls` lists what was called, oldest first.

    Args:
        rank, world_size: what the communicator claims to be.
        device: where the tensors live.
        timeout: ignored.
    """

    transport = "fake"

    def __init__(self, rank: int = 0, world_size: int = 1, device: torch.device | None = None, timeout: timedelta | None = None) -> None:
        if not 0 <= rank < world_size:
            raise ConfigurationError(f"rank must be from 0 to {world_size - 1}, got {rank}")
        super().__init__(rank, world_size, device or torch.device("cpu"), timeout)
        self.calls: list[FakeCall] = []
        self._failures: dict[int, ErrorFactory] = {}

    def fail(self, call: int, error: ErrorFactory) -> None:
        """Makes a call raise what `error` returns; calls are counted from 0, over all collectives, from the communicator's beginning."""
        self._failures[call] = error

    def count(self, operation: str) -> int:
        """How often a collective was called."""
        return sum(call.operation == operation for call in self.calls)

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Work:
        return self._do("all_reduce", op, tensor, lambda: self._reduce_into(tensor, tensor, op))

    def _broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._do("broadcast", None, tensor, lambda: None)

    def _all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        return self._do("all_gather", None, tensor, lambda: out.view(self.world_size, -1).copy_(tensor.view(1, -1)))

    def _reduce_scatter(self, out: Tensor, tensor: Tensor, op: ReduceOp) -> Work:
        def reduce() -> None:
            self._reduce_into(out, tensor.view(self.world_size, -1)[self.rank].view_as(out), op)

        return self._do("reduce_scatter", op, tensor, reduce)

    def _barrier(self) -> Work:
        return self._do("barrier", None, None, lambda: None)

    def _do(self, operation: str, op: ReduceOp | None, tensor: Tensor | None, action: Callable[[], object]) -> Work:
        number = len(self.calls)
        numel, dtype = (0, None) if tensor is None else (tensor.numel(), tensor.dtype)
        self.calls.append(FakeCall(operation, op, numel, dtype))
        if number in self._failures:
            raise self._failures[number]()
        with torch.no_grad():
            action()
        return CompletedWork()

    def _reduce_into(self, out: Tensor, tensor: Tensor, op: ReduceOp) -> None:
        if out is not tensor:
            out.copy_(tensor)
        if op == "sum":
            out.mul_(self.world_size)
