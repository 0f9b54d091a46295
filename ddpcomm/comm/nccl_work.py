"""A collective under way on a communication stream."""

from __future__ import annotations

import time
from datetime import timedelta

from torch import Tensor

from ddpcomm.comm.cuda_runtime import CudaRuntime, Event
from ddpcomm.comm.nccl_watchdog import Watchdog
from ddpcomm.comm.order import Operation

_SHORTEST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 20e-6, 1e-3


class NcclWork:
    """Ends with an event on the communication stream.

    The tensors are kept until their memory can be used again by the stream that issued the collective: when that stream has been made to
    wait, or when the device is known to be done. Another stream that waits does not count: memory that is freed goes back to the stream
    that it was allocated for.

    Args:
        end: recorded right after the collective.
        tensors: all that the collective reads or writes.
        issued_on: cudaStream_t of the stream that was current when it was issued.
        limit: time limit, from now on.
        blocking: `wait` blocks the caller too, as a barrier's must.
    """

    __slots__ = ("_blocking", "_done", "_end", "_issued_on", "_limit", "_runtime", "_tensors", "_watchdog", "deadline", "operation")

    def __init__(
        self,
        operation: Operation,
        end: Event,
        tensors: tuple[Tensor, ...],
        issued_on: int,
        limit: timedelta,
        runtime: CudaRuntime,
        watchdog: Watchdog,
        blocking: bool = False,
    ) -> None:
        self.operation = operation
        self.deadline = time.monotonic() + limit.total_seconds()
        self._end = end
        self._tensors = tensors
        self._issued_on = issued_on
        self._limit = limit
        self._runtime = runtime
        self._watchdog = watchdog
        self._blocking = blocking
        self._done = False

    def wait(self, timeout: timedelta | None = None) -> None:
        """Makes the current stream wait; the caller goes on. With a `timeout` the caller, too, is blocked until the collective is done.

        Raises:
            CollectiveTimeoutError: `timeout`, or the communicator's own limit, passed. The communicator is aborted.
            CommunicationError: the communicator has failed, in this collective or another.
        """
        self._watchdog.raise_if_failed()
        if timeout is not None or self._blocking:
            self._block(timeout or self._limit)
        stream = self._runtime.current_stream()
        self._runtime.wait(stream, self._end)
        if stream.cuda_stream == self._issued_on:
            self._tensors = ()

    def is_completed(self) -> bool:
        """Whether the device is done with it. Raises as `wait`."""
        self._watchdog.raise_if_failed()
        return self.finished()

    def finished(self) -> bool:
        """Whether the device is done with it, or stopped by an abort; the tensors are let go then."""
        if not self._done and self._runtime.is_complete(self._end):
            self._done = True
            self._tensors = ()
        return self._done

    def _block(self, limit: timedelta) -> None:
        deadline = time.monotonic() + limit.total_seconds()
        pause = _SHORTEST_POLL_SECONDS
        while not self.is_completed():
            if time.monotonic() > deadline:
                raise self._watchdog.expire(self.operation, limit)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_SECONDS)
        self._watchdog.raise_if_failed()
