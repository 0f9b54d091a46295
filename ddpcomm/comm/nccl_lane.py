"""One NCCL communicator and the stream that only it uses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import torch

from ddpcomm.comm.cuda_runtime import CudaRuntime, Stream, order_after
from ddpcomm.comm.nccl_library import IN_PROGRESS, SUCCESS, Handle, NcclLibrary
from ddpcomm.errors import ClosedError, CollectiveTimeoutError, CommunicationError

_Result = TypeVar("_Result")
_POLLS_WITHOUT_PAUSE = 100
_PAUSE_SECONDS = 100e-6
_ABORT_ANYWAY_SECONDS = 1.0


class Lane:
    """Calls libnccl for one communicator, and waits until a non-blocking one has taken each call.

    Args:
        index: which of the communicators.
        communicator: the handle, which the lane owns from now on.
        limit: time limit of a call.
        failing: whether the transport has failed, so that nothing goes on waiting.
    """

    def __init__(
        self, index: int, communicator: Handle, library: NcclLibrary, runtime: CudaRuntime, limit: timedelta, failing: Callable[[], bool]
    ) -> None:
        self.index = index
        self.stream = runtime.create_stream()
        self._communicator: Handle | None = communicator
        self._library = library
        self._runtime = runtime
        self._limit = limit
        self._failing = failing
        self._ready = runtime.create_event()
        self._lock = threading.Lock()
        self._revoked = False
        self._scaled_sums: dict[tuple[torch.dtype, float], int] = {}

    def follow(self, producers: Iterable[Stream]) -> None:
        """What the lane issues from now on runs after what is on these streams now."""
        order_after(self._runtime, self.stream, producers, self._ready)

    def call(self, operation: object, function: Callable[[Handle], _Result]) -> _Result:
        """Calls `function` with the communicator. When it returns, the call has been taken: its work is on the stream. `operation` names
        it in errors.

        Raises:
            ClosedError: the lane is closed or aborted.
            CollectiveTimeoutError: libnccl was still at it after the time limit.
            CommunicationError: libnccl reports an error.
        """
        with self._lock:
            if self._communicator is None:
                raise ClosedError(f"{operation}: this NCCL communicator is closed")
            result = function(self._communicator)
            settle(self._library, self._communicator, operation, self._limit, self._failing)
        return result

    def scaled_sum(self, scale: float, dtype: torch.dtype) -> int:
        """The operator that multiplies by `scale` before it sums, made once for each dtype and scale."""
        key = dtype, scale
        if key not in self._scaled_sums:
            self._scaled_sums[key] = self.call(
                "ncclRedOpCreatePreMulSum", lambda communicator: self._library.create_scaled_sum(communicator, scale, dtype)
            )
        return self._scaled_sums[key]

    @property
    def usable(self) -> bool:
        """Whether there is still a communicator, though perhaps a revoked one."""
        return self._communicator is not None

    @property
    def revoked(self) -> bool:
        return self._revoked

    def error(self) -> CommunicationError | None:
        """What went wrong since, if anything. Never blocks."""
        if not self._lock.acquire(blocking=False):
            return None  # a call is under way, which sees its own errors
        try:
            if self._communicator is None:
                return None
            state = self._library.state(self._communicator)
            return None if state in (SUCCESS, IN_PROGRESS) else self._library.error(self._communicator, state, "a collective")
        finally:
            self._lock.release()

    def memory_bytes(self) -> int:
        """The device memory that the communicator itself holds; 0 once it is closed."""
        with self._lock:
            return 0 if self._communicator is None else self._library.memory_bytes(self._communicator)

    def revoke(self) -> None:
        """Ends what is under way; of the communicator only `shrink` and the end can be had then."""
        self.call("ncclCommRevoke", self._library.revoke)
        self._revoked = True

    def shrink(self, excluded: Sequence[int], config: Mapping[str, int | str], abort: bool) -> Handle:
        """A communicator without the excluded ranks. Collective over the others."""
        handle = self.call("ncclCommShrink", lambda communicator: self._library.shrink(communicator, excluded, config, abort))
        settle(self._library, handle, "ncclCommShrink", self._limit, self._failing)
        return handle

    def close(self, limit: timedelta) -> None:
        """Flushes, then frees. Collective. Blocks for as long as libnccl does; a non-blocking communicator no longer than `limit`.

        Raises:
            CommunicationError: it could not be flushed, and was aborted.
        """
        with self._lock:
            communicator, self._communicator = self._communicator, None
        if communicator is None:
            return
        try:
            for op in self._scaled_sums.values():
                self._library.destroy_operator(communicator, op)
            if not self._revoked:  # after that, libnccl has nothing left to flush and refuses to
                self._library.finalize(communicator)
                settle(self._library, communicator, "ncclCommFinalize", limit, self._failing)
            self._library.destroy(communicator)
        except CommunicationError:
            self._library.abort(communicator)
            raise

    def abort(self) -> None:
        """Ends what is under way, and frees. A call that another thread has been in for a second is no reason to wait any longer."""
        locked = self._lock.acquire(timeout=_ABORT_ANYWAY_SECONDS)
        try:
            communicator, self._communicator = self._communicator, None
            if communicator is not None:
                self._library.abort(communicator)
        finally:
            if locked:
                self._lock.release()


def settle(library: NcclLibrary, communicator: Handle, operation: object, limit: timedelta, failing: Callable[[], bool]) -> None:
    """Waits until a non-blocking communicator has taken its last call.

    Until then nothing may be put on the stream that the call was given, and no other call be made.

    Raises:
        CollectiveTimeoutError, CommunicationError: as `Lane.call`.
    """
    deadline = time.monotonic() + limit.total_seconds()
    polls = 0
    while (state := library.state(communicator)) == IN_PROGRESS:
        if failing():
            raise CommunicationError(f"{operation}: the communicator was aborted meanwhile")
        if time.monotonic() > deadline:
            raise CollectiveTimeoutError(
                f"{operation}: libnccl was still at it after {limit.total_seconds():g} s; some rank never called it"
            )
        polls += 1
        if polls > _POLLS_WITHOUT_PAUSE:
            time.sleep(_PAUSE_SECONDS)
    if state != SUCCESS:
        raise library.error(communicator, state, str(operation))
