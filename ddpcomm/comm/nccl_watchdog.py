"""A thread that looks after collectives under way, so that none hangs for ever and every rank hears of a failure on any.

Nobody else could: after `Work.wait()` the host is free, and a kernel that waits for a lost rank would never end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Protocol

from ddpcomm.comm.cuda_runtime import CudaRuntime
from ddpcomm.comm.order import CollectiveOrder, Operation, Position
from ddpcomm.comm.rendezvous import Distress, Rendezvous
from ddpcomm.errors import CollectiveMismatchError, CollectiveTimeoutError, CommunicationError, PeerLostError

_log = logging.getLogger(__name__)
_SHORTEST_POLL, _LONGEST_POLL = timedelta(milliseconds=10), timedelta(seconds=1)
_POLLS_WITHIN_LIMIT = 10
_GATHER_SECONDS = 2.5  # more than the longest poll: a rank that lives has answered by then
_KINDS: dict[str, type[CommunicationError]] = {
    kind.__name__: kind for kind in (CollectiveTimeoutError, PeerLostError, CollectiveMismatchError, CommunicationError)
}


class Watched(Protocol):
    """A collective under way. `deadline` is in seconds of time.monotonic()."""

    operation: Operation
    deadline: float

    def finished(self) -> bool:
        """Whether the device is done with it."""


class Watchdog:
    """Polls, as often as a tenth of the time limit but at least every second: works' ends and time limits, libnccl's own errors, the order
    of collectives beside rank 0's, and what other ranks report.

    The first failure, here or elsewhere, aborts the communicator and is the error that every later call raises.

    Args:
        rendezvous: where ranks tell each other.
        order: what this rank has issued.
        limit: time limit of a collective.
        failing: is set as soon as the communicator has failed, before it is known why.
        runtime: told of the thread.
        poll_errors: returns an error of libnccl's, if there is one; never blocks.
        abort: stops everything under way; returns within a time limit of its own.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        order: CollectiveOrder,
        limit: timedelta,
        failing: threading.Event,
        runtime: CudaRuntime,
        poll_errors: Callable[[], CommunicationError | None],
        abort: Callable[[], bool],
    ) -> None:
        self._rendezvous = rendezvous
        self._order = order
        self._runtime = runtime
        self._poll_errors = poll_errors
        self._abort = abort
        self._pause = min(max(limit / _POLLS_WITHIN_LIMIT, _SHORTEST_POLL), _LONGEST_POLL).total_seconds()
        self._works: deque[Watched] = deque()
        self._compared = 0
        self._store_works = rendezvous.world_size > 1
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failing = failing
        self._first = threading.Lock()
        self._failure: CommunicationError | None = None
        self._diagnosed = threading.Event()

    # ---- for the transport ------------------------------------------------------------------------------------------

    def watch(self, work: Watched) -> None:
        self._works.append(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ddpcomm-nccl-watchdog", daemon=True)
            self._thread.start()

    def raise_if_failed(self) -> None:
        """Raises what made the communicator fail, if it has."""
        if self._failure is not None:
            self._diagnosed.wait(2 * _GATHER_SECONDS)
            raise self._failure.with_traceback(None)

    def expire(self, operation: Operation, limit: timedelta) -> CommunicationError:
        """Fails because a collective is not done within its time limit. Returns the error to raise."""
        return self.fail(CollectiveTimeoutError(f"{operation} was not done after {limit.total_seconds():g} s"))

    def fail(self, error: CommunicationError) -> CommunicationError:
        """Aborts, tells the others, and finds out who is missing; returns the error to raise: the first one of all."""
        if not self._begin_to_fail(error):
            self._diagnosed.wait(2 * _GATHER_SECONDS)
            return self._failure or error
        try:
            self._tell(error)
            self._abort()
            self._failure = self._diagnose(error)
            _log.error("NCCL communicator of rank %d aborted: %s", self._rendezvous.rank, self._failure)
        finally:
            self._diagnosed.set()
        return self._failure

    def give_up(self, error: CommunicationError) -> None:
        """Lets every later call raise `error`, as after a failure, but aborts nothing and tells nobody."""
        if self._begin_to_fail(error):
            self._diagnosed.set()

    def drain(self, limit: timedelta) -> bool:
        """Waits until all collectives are done; whether they are."""
        deadline = time.monotonic() + limit.total_seconds()
        while self._failure is None and not all(work.finished() for work in tuple(self._works)):
            if time.monotonic() > deadline:
                return False
            time.sleep(min(self._pause, _SHORTEST_POLL.total_seconds()))
        return self._failure is None

    def stop(self) -> None:
        """Ends the thread. Idempotent."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._runtime.let_others_capture()
            while self._failure is None and not self._stop.wait(self._pause):
                self._look()
        except CommunicationError as error:
            self.fail(error)
        except Exception as error:  # CUDA's own errors among them: they, too, must reach the caller
            self.fail(CommunicationError(f"looking after collectives failed: {type(error).__name__}: {error}"))

    def _look(self) -> None:
        now = time.monotonic()
        for work in tuple(self._works):
            if work.finished():
                self._works.remove(work)
            elif now > work.deadline:
                raise CollectiveTimeoutError(f"{work.operation} was not done within its time limit")
        if error := self._poll_errors():
            raise error
        if self._store_works:
            try:
                self._compare_order()
                distress = self._rendezvous.hear()
            except CollectiveMismatchError:
                raise
            except CommunicationError as error:  # the rank that hosts the store may simply have finished first
                self._store_works = False
                _log.info("rank %d no longer hears of other ranks' failures: %s", self._rendezvous.rank, error)
            else:
                if distress is not None:
                    raise self._heard(distress)

    def _compare_order(self) -> None:
        """Compares one digest after another with rank 0's; one that rank 0 hasn't come to yet is compared the next time."""
        while self._compared < len(self._order.checkpoints):
            count, digest = self._order.checkpoints[self._compared]
            if self._rendezvous.rank == 0:
                self._rendezvous.post(f"order/{count}", digest)
            else:
                first = self._rendezvous.read(f"order/{count}", 0)
                if first is None:
                    return
                if first != digest:
                    raise CollectiveMismatchError(
                        f"ranks 0 and {self._rendezvous.rank} issued different collectives among the first {count}; "
                        f"the last of rank {self._rendezvous.rank} is {self._order.position().last}"
                    )
            self._compared += 1

    # ---- failures ---------------------------------------------------------------------------------------------------

    def _begin_to_fail(self, error: CommunicationError) -> bool:
        """From here on every wait within the transport ends. Whether this is the first failure."""
        if not self._first.acquire(blocking=False):
            return False
        self._failure = error
        self._failing.set()
        return True

    def _heard(self, distress: Distress) -> CommunicationError:
        kind = _KINDS.get(distress.kind, CommunicationError)
        return kind(f"rank {distress.rank} gave up: {distress.message}")

    def _tell(self, error: CommunicationError) -> None:
        if not self._store_works:
            return
        try:
            self._rendezvous.post("position", asdict(self._order.position()))
            self._rendezvous.cry(type(error).__name__, str(error))
        except CommunicationError as unreachable:
            self._store_works = False
            _log.warning("rank %d can't tell the other ranks: %s", self._rendezvous.rank, unreachable)

    def _diagnose(self, error: CommunicationError) -> CommunicationError:
        """The error, with what the other ranks were at."""
        positions = self._gather() if self._store_works else {}
        mine = self._order.position()
        silent = [rank for rank in range(self._rendezvous.world_size) if rank not in positions] if positions else []
        furthest = max([mine.count, *(position.count for position in positions.values())])
        behind = [rank for rank, position in positions.items() if position.count < furthest]
        differing = [rank for rank, position in positions.items() if position.count == mine.count and position.digest != mine.digest]
        advice = "The communicator is aborted; make a new one among the ranks that live, or start the job again."
        parts = [str(error).rstrip(".")]
        if silent:
            parts.append(f"No answer from {_ranks(silent)}: dead, or stopped")
        parts += [f"Rank {rank} has issued only {positions[rank].count} collectives, the last {positions[rank].last}" for rank in behind]
        parts += [f"Rank {rank} issued others than rank {self._rendezvous.rank}, the last {positions[rank].last}" for rank in differing]
        message = ". ".join([*parts, advice])
        if isinstance(error, PeerLostError):
            return PeerLostError(message, silent[0] if len(silent) == 1 else None)
        if differing or isinstance(error, CollectiveMismatchError):
            return CollectiveMismatchError(message)
        if isinstance(error, CollectiveTimeoutError):
            return CollectiveTimeoutError(message, sorted({*silent, *behind}))
        return CommunicationError(message)

    def _gather(self) -> dict[int, Position]:
        """Where the ranks are that answer soon."""
        positions: dict[int, Position] = {}
        deadline = time.monotonic() + _GATHER_SECONDS
        try:
            while len(positions) < self._rendezvous.world_size and time.monotonic() < deadline:
                for rank in range(self._rendezvous.world_size):
                    if rank not in positions and (note := self._rendezvous.read("position", rank)) is not None:
                        positions[rank] = Position(**note)
                time.sleep(_SHORTEST_POLL.total_seconds())
        except CommunicationError as unreachable:
            _log.warning("rank %d can't ask the other ranks: %s", self._rendezvous.rank, unreachable)
        return positions


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
