"""Notes that the ranks leave for each other in the process group's store, for the day on which a wait fails.

A thread does all of it, over a connection of its own: neither a store that doesn't answer nor a blocking call on it elsewhere can hold up
the caller. Everything is best effort: when the store fails, the notes end, and nothing else does.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ddpcomm.comm.forked import leave_to_parent_after_fork

_log = logging.getLogger(__name__)
PERIOD = timedelta(seconds=1)
_LIMIT = timedelta(seconds=1)


class ReportBoard:
    """One rank's side of the board.

    Args:
        store: a connection that nobody else uses, under keys that no other board has.
        rank, world_size: this rank among those that share the board.
        describe: called in the board's thread, once a `PERIOD`; what it returns is put up if it has changed. Anything that JSON holds.
    """

    def __init__(self, store: Store, rank: int, world_size: int, describe: Callable[[], Any]) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._describe = describe
        self._posted: Any = None
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended = False
        self._closed = False
        leave_to_parent_after_fork(self)
        self._thread = threading.Thread(target=self._run, name="ddpcomm reports", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, process_group: dist.ProcessGroup, describe: Callable[[], Any]) -> ReportBoard | None:
        """A board that all ranks of a group share, if all make their boards in the same order; nothing is waited for.

        Returns:
            None where the group's store can't have one.
        """
        rank = process_group.rank()
        try:
            store = dist.distributed_c10d._get_process_group_store(process_group)
            number = store.add(f"ddpcomm/reports/made/{rank}", 1)
            own = PrefixStore(f"ddpcomm/reports/{number}", store).clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        except (RuntimeError, KeyError, ValueError) as error:
            _log.info("ranks won't report where they are: %s", error)
            return None
        return cls(own, rank, process_group.size(), describe)

    def post(self, topic: str, value: Any, wait: timedelta | None = None) -> None:
        """Puts up a note of this rank's, in place of its last one on the same topic.

        Args:
            value: anything that JSON holds.
            wait: until it is up, at most this long.
        """
        self._do(lambda: self._store.set(f"{topic}/{self.rank}", json.dumps(value)), wait)

    def read(self, topic: str, ranks: Iterable[int], limit: timedelta = _LIMIT) -> dict[int, Any]:
        """The notes of these ranks, by rank, as far as there are any and they could be had in time."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + limit.total_seconds()

        def look() -> None:
            for rank in ranks:
                key = f"{topic}/{rank}"
                if time.monotonic() < deadline and self._store.check([key]):
                    found[rank] = json.loads(self._store.get(key))

        self._do(look, limit)
        return dict(found)

    def close(self) -> None:
        """Ends the thread, once it has put up what it was given, within a second. Idempotent."""
        if not self._closed:
            self._closed = True
            self._requests.put(None)
            if threading.current_thread() is not self._thread:  # which may happen to collect the garbage that this belongs to
                self._thread.join(_LIMIT.total_seconds())

    def leave_to_parent(self) -> None:
        """In a forked child: there is no thread, and the connection is the parent's."""
        self._closed = self._ended = True

    def _do(self, action: Callable[[], object], wait: timedelta | None) -> None:
        """Has the thread do something; returns after `wait` at the latest."""
        done = threading.Event()

        def act() -> None:
            try:
                action()
            finally:
                done.set()

        if self._ended or self._closed:
            return
        self._requests.put(act)
        if wait is not None:
            done.wait(wait.total_seconds())

    def _run(self) -> None:
        try:
            while True:
                try:
                    request = self._requests.get(timeout=PERIOD.total_seconds())
                except queue.Empty:
                    request = self._post_changes
                if request is None:
                    return
                request()
        except Exception as error:  # torch's stores raise nothing more precise; and whatever else it was, training goes on
            _log.info("rank %d no longer reports where it is: %s", self.rank, error)
        finally:
            self._ended = True

    def _post_changes(self) -> None:
        now = self._describe()
        if now is not None and now != self._posted:
            self._posted = now
            self._store.set(f"where/{self.rank}", json.dumps([time.time(), now]))
