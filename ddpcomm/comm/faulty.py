"""Wraps a communicator and makes chosen collectives go wrong on this rank, for tests of everything above it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
from torch import Tensor

from ddpcomm.comm.base import Communicator, ReduceOp, Work
from ddpcomm.errors import CollectiveTimeoutError, CommunicationError

FaultKind = Literal["delay", "drop", "corrupt", "fail"]


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one collective.

    Args:
        call: which one, counted from 0 over all collectives of this communicator.
        kind: "delay" starts it late; "drop" never starts it, so that it times out here and on the peers; "corrupt" changes one element of
            the result on this rank; "fail" raises, without telling the peers.
        delay: for "delay".
        error: for "fail": makes what is raised.
        at_wait: for "fail": raised by `wait`, after the collective has run, instead of by the call.
    """

    call: int
    kind: FaultKind
    delay: timedelta = timedelta(seconds=0.1)
    error: Callable[[], Exception] = lambda: CommunicationError("a fault was injected")
    at_wait: bool = False


class FaultyCommunicator(Communicator):
    """`inner`, with faults. Closes `inner` when it is closed.

    Args:
        inner: does the work.
        faults: what goes wrong, at most one for a call.
    """

    def __init__(self, inner: Communicator, faults: Sequence[Fault] = ()) -> None:
        super().__init__(inner.rank, inner.world_size, inner.device, inner.timeout)
        self.transport = inner.transport
        self.averages_in_passing = inner.averages_in_passing
        self.shares_order_with = inner.shares_order_with
        self.inner = inner
        self.calls = 0
        self._faults = {fault.call: fault for fault in faults}

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.inner.empty(numel, dtype)

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Work:
        return self._start("all_reduce", tensor, lambda: self.inner.all_reduce(tensor, op))

    def _broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._start("broadcast", tensor, lambda: self.inner.broadcast(tensor, source))

    def _all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        return self._start("all_gather", out, lambda: self.inner.all_gather(out, tensor))

    def _reduce_scatter(self, out: Tensor, tensor: Tensor, op: ReduceOp) -> Work:
        return self._start("reduce_scatter", out, lambda: self.inner.reduce_scatter(out, tensor, op))

    def _barrier(self) -> Work:
        return self._start("barrier", None, self.inner.barrier)

    def announce(self, header: int) -> None:
        self.inner.announce(header)

    def progress(self) -> None:
        self.inner.progress()

    def _close(self) -> None:
        self.inner.close()

    def _start(self, operation: str, result: Tensor | None, begin: Callable[[], Work]) -> Work:
        fault = self._faults.get(self.calls)
        self.calls += 1
        if fault is None:
            return begin()
        if fault.kind == "drop":
            return _DroppedWork(operation, self.timeout)
        if fault.kind == "fail" and not fault.at_wait:
            raise fault.error()
        if fault.kind == "delay":
            time.sleep(fault.delay.total_seconds())
            return begin()
        return _FaultyWork(begin(), fault, result)


class _FaultyWork:
    """Runs the fault once, when the result is first waited for."""

    def __init__(self, inner: Work, fault: Fault, result: Tensor | None) -> None:
        self._inner = inner
        self._fault = fault
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> None:
        self._inner.wait(timeout)
        if self._fault.kind == "fail":
            raise self._fault.error()
        result, self._result = self._result, None
        if result is not None and result.numel() > 0:
            corrupt(result)

    def is_completed(self) -> bool:
        return self._inner.is_completed()


class _DroppedWork:
    """Never done."""

    def __init__(self, operation: str, timeout: timedelta | None) -> None:
        self._operation = operation
        self._timeout = timeout

    def wait(self, timeout: timedelta | None = None) -> None:
        limit = timeout or self._timeout or timedelta(seconds=1)
        time.sleep(limit.total_seconds())
        raise CollectiveTimeoutError(f"{self._operation} was dropped by a fault that was injected; waited {limit.total_seconds():g} s")

    def is_completed(self) -> bool:
        return False


def corrupt(tensor: Tensor) -> None:
    """Flips the lowest bit of the first element's first byte, in place: the smallest change that there is."""
    with torch.no_grad():
        tensor.reshape(-1)[:1].view(torch.uint8)[0] ^= 1
