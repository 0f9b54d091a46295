"""What ranks tell each other through the process group's key-value store: at set-up, and when something has gone wrong.

Nothing here touches a GPU, so it also works while one hangs. Every meeting costs a rank a handful of the store's round trips, whatever the
number of ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ddpcomm.errors import CollectiveTimeoutError, CommunicationError, RankMismatchError

_SHORTEST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.001, 0.1


@dataclass(frozen=True)
class Distress:
    """The first failure that some rank reported."""

    rank: int
    kind: str
    message: str


class Rendezvous:
    """A set of ranks that meet at a store. All ranks call the collective methods in the same order.

    Args:
        store: a torch.distributed store.
        rank, world_size: this rank among those that meet.
        timeout: time limit of every meeting.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._timeout = timeout
        self._meetings = 0
        self.interrupt: Callable[[], None] | None = None
        """Called again and again by whoever waits; raises to end the wait."""

    @classmethod
    def of(cls, process_group: dist.ProcessGroup, purpose: str, timeout: timedelta) -> Rendezvous:
        """The ranks of a process group, under keys that no other meeting uses. Collective; nothing is waited for."""
        store = dist.distributed_c10d._get_process_group_store(process_group)
        number = store.add(f"ddpcomm/{purpose}/made/{process_group.rank()}", 1)
        return cls(PrefixStore(f"ddpcomm/{purpose}/{number}", store), process_group.rank(), process_group.size(), timeout)

    def part(self, name: str, ranks: Sequence[int]) -> Rendezvous:
        """Some of these ranks, this one among them, numbered anew in the order given. Collective over those; `name` must be new."""
        return Rendezvous(PrefixStore(name, self._store), ranks.index(self.rank), len(ranks), self._timeout)

    # ---- meetings: collective ---------------------------------------------------------------------------------------

    def from_first(self, value: str) -> str:
        """Rank 0's value, on every rank; what the others pass is ignored.

        Raises:
            CollectiveTimeoutError: rank 0 did not come in time.
            CommunicationError: the store is gone.
        """
        key = self._next_key("from_first")
        if self.rank == 0:
            self._ask("set", key, value)
        self._wait(key, "rank 0")
        return self._get(key)

    def check_equal(self, what: str, value: str, description: str = "") -> None:
        """Compares the ranks' values. An error quotes their descriptions, or the values themselves.

        Raises:
            RankMismatchError: they differ; on every rank, with the same message.
            CollectiveTimeoutError, CommunicationError: as `from_first`.
        """
        first, first_description = json.loads(self.from_first(json.dumps([value, description or value])))
        reason = f"{what}. Rank 0: {first_description}; rank {self.rank}: {description or value}"
        agree, reason = self.minimum(int(first == value), reason)
        if not agree:
            raise RankMismatchError(f"the ranks differ in {reason}. Make them equal on all ranks.")

    def minimum(self, value: int, reason: str = "") -> tuple[int, str]:
        """The smallest of the ranks' values, which are 0 or more and small, and the reason that one of the ranks with it gave."""
        key = self._next_key("minimum")
        self._ask("set", f"{key}/reason/{value}", reason)
        self._ask("add", f"{key}/votes/{value}", 1)
        arrived = self._ask("add", f"{key}/arrived", 1)
        if arrived == self.world_size:
            self._ask("set", f"{key}/complete", "")
        self._wait(f"{key}/complete", f"some rank ({arrived} of {self.world_size} had arrived when it began to wait)")
        least = next(least for least in range(value + 1) if self._ask("add", f"{key}/votes/{least}", 0) > 0)
        return least, self._get(f"{key}/reason/{least}")

    def _next_key(self, kind: str) -> str:
        self._meetings += 1
        return f"{self._meetings}/{kind}"

    def _wait(self, key: str, whom: str) -> None:
        deadline = time.monotonic() + self._timeout.total_seconds()
        pause = _SHORTEST_POLL_SECONDS
        while not self._ask("check", [key]):
            if self.interrupt is not None:
                self.interrupt()
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(
                    f"rank {self.rank} waited {self._timeout.total_seconds():g} s for {whom}. All ranks must make the same calls in the "
                    "same order; look for one that died or took another path."
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_SECONDS)

    def _get(self, key: str) -> str:
        return str(self._ask("get", key).decode())

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, method)(*arguments)
        except RuntimeError as error:  # torch has types only for some of a store's failures
            raise CommunicationError(f"the process group's store can't be reached; its host has probably ended ({error})") from error

    # ---- notes: not collective --------------------------------------------------------------------------------------

    def post(self, topic: str, value: Any) -> None:
        """Leaves a note of this rank's, anything that JSON holds, for the others."""
        self._ask("set", f"notes/{topic}/{self.rank}", json.dumps(value))

    def read(self, topic: str, rank: int) -> Any:
        """The note of a rank, None where there is none yet."""
        key = f"notes/{topic}/{rank}"
        return json.loads(self._get(key)) if self._ask("check", [key]) else None

    def cry(self, kind: str, message: str) -> None:
        """Tells all ranks of a failure, unless some rank has told of one before."""
        self._ask("compare_set", "distress", "", json.dumps([self.rank, kind, message]))

    def hear(self) -> Distress | None:
        """The first failure that was told of."""
        return Distress(*json.loads(self._get("distress"))) if self._ask("check", ["distress"]) else None
