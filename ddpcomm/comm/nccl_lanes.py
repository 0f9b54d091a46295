"""All NCCL communicators of one transport: closed and aborted together."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

from ddpcomm.comm.cuda_runtime import CudaRuntime
from ddpcomm.comm.nccl_lane import Lane
from ddpcomm.comm.nccl_library import Handle, NcclLibrary
from ddpcomm.errors import CommunicationError

_log = logging.getLogger(__name__)
_ABORT_LIMIT = timedelta(seconds=10)


class Lanes:
    """Owns one lane for each handle, and the handles."""

    def __init__(
        self, handles: Sequence[Handle], library: NcclLibrary, runtime: CudaRuntime, limit: timedelta, failing: Callable[[], bool]
    ) -> None:
        self._runtime = runtime
        self._lanes = [Lane(index, handle, library, runtime, limit, failing) for index, handle in enumerate(handles)]

    def __len__(self) -> int:
        return len(self._lanes)

    def __getitem__(self, index: int) -> Lane:
        return self._lanes[index]

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes)

    @property
    def usable(self) -> bool:
        return all(lane.usable for lane in self._lanes)

    @property
    def revoked(self) -> bool:
        return any(lane.revoked for lane in self._lanes)

    def error(self) -> CommunicationError | None:
        """What libnccl says went wrong with any. Never blocks."""
        return next((error for lane in self._lanes if (error := lane.error()) is not None), None)

    def memory_bytes(self) -> int:
        """The device memory that the communicators themselves hold."""
        return sum(lane.memory_bytes() for lane in self._lanes)

    def close(self, limit: timedelta) -> bool:
        """Flushes and frees one after another, in the order that all ranks keep. Returns whether all went well within the limit; what
        didn't is aborted."""
        deadline = time.monotonic() + limit.total_seconds()

        def close_all() -> None:
            for lane in self._lanes:
                lane.close(timedelta(seconds=max(0.0, deadline - time.monotonic())))

        return self._within(limit + _ABORT_LIMIT, [close_all])

    def abort(self) -> bool:
        """Aborts all at once: a kernel of one communicator may hold up the freeing of another's memory. Returns whether all have ended."""
        ended = self._within(_ABORT_LIMIT, [lane.abort for lane in self._lanes])
        if not ended:
            _log.warning("libnccl has not ended all communicators %g s after their abort", _ABORT_LIMIT.total_seconds())
        return ended

    def destroy_streams(self) -> None:
        for lane in self._lanes:
            self._runtime.destroy_stream(lane.stream)

    def _within(self, limit: timedelta, functions: Sequence[Callable[[], None]]) -> bool:
        """Calls each in a thread of its own, for libnccl may hang in any. Returns whether all returned in time and none raised."""
        done: list[bool] = []

        def run(function: Callable[[], None]) -> None:
            try:
                with self._runtime.on_device():
                    function()
                done.append(True)
            except CommunicationError as error:
                _log.warning("%s", error)

        threads = [threading.Thread(target=run, args=(function,), name="ddpcomm-nccl-end", daemon=True) for function in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(limit.total_seconds())
        return len(done) == len(functions)
