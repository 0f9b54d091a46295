"""Several communicators that take all-reduces in turn, as the round-robin process groups of the paper (arXiv 2006.15704, section 3.3)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import cycle

import torch
from torch import Tensor

import ddpcomm
from ddpcomm.comm.base import Communicator, ReduceOp, Work


class RoundRobin(Communicator):
    """Memory comes from the members in turn, and who gave a tensor reduces it: in place, and, for buckets, one member after the other.
    Everything else is done by the first. All ranks take the same turns, because they call the same methods in the same order.

    Args:
        members: over the same ranks, each of its own; this object closes them.
    """

    def __init__(self, members: Sequence[Communicator]) -> None:
        first = members[0]
        super().__init__(first.rank, first.world_size, first.device, first.timeout)
        self.transport = f"{len(members)} x {first.transport}"
        self.averages_in_passing = first.averages_in_passing
        self.members = members
        self._turns = cycle(members)
        self._owners: dict[int, tuple[weakref.ref[Tensor], Communicator]] = {}

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        member = next(self._turns)
        tensor = member.empty(numel, dtype)
        self._owners[tensor.data_ptr()] = weakref.ref(tensor), member
        return tensor

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Work:
        reference, member = self._owners.get(tensor.data_ptr(), (lambda: None, self.members[0]))
        return (member if reference() is not None else self.members[0]).all_reduce(tensor, op)

    def _broadcast(self, tensor: Tensor, source: int) -> Work:
        return self.members[0].broadcast(tensor, source)

    def _all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        return self.members[0].all_gather(out, tensor)

    def _reduce_scatter(self, out: Tensor, tensor: Tensor, op: ReduceOp) -> Work:
        return self.members[0].reduce_scatter(out, tensor, op)

    def _barrier(self) -> Work:
        return self.members[0].barrier()

    def progress(self) -> None:
        for member in self.members:
            member.progress()

    def check(self) -> None:
        for member in self.members:
            member.check()

    def _close(self) -> None:
        for member in self.members:
            member.close()


def use(model: ddpcomm.DistributedDataParallel, communicator: Communicator) -> None:
    """Lets a model that has not run yet exchange its gradients over another communicator, of the same ranks, which it owns from then on."""
    model._communicator.close()
    model._communicator = communicator
    model._reducer.use(communicator)
