"""Meetings of ranks at a store, with a thread for each rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ddpcomm.comm.rendezvous import Distress, Rendezvous
from ddpcomm.errors import CollectiveTimeoutError, CommunicationError, RankMismatchError

LIMIT = timedelta(seconds=20)


@pytest.fixture(params=["hash", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return dist.HashStore() if request.param == "hash" else dist.FileStore(str(tmp_path / "store"), 3)


def together(store: Any, function: Callable[[Rendezvous], Any], world_size: int = 3) -> list[Any]:
    """Calls `function` for each rank at once; returns what each returned or raised."""
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            results[rank] = function(Rendezvous(store, rank, world_size, LIMIT))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_rank_0_s_value_reaches_all(store: Any) -> None:
    assert together(store, lambda ranks: [ranks.from_first(f"{ranks.rank}{turn}") for turn in "ab"]) == [["0a", "0b"]] * 3


def test_the_smallest_value_wins_with_its_reason(store: Any) -> None:
    assert together(store, lambda ranks: ranks.minimum((ranks.rank + 2) % 3, f"rank {ranks.rank}")) == [(0, "rank 1")] * 3
    assert together(dist.PrefixStore("again", store), lambda ranks: ranks.minimum(1)) == [(1, "")] * 3


def test_values_that_differ_are_an_error_everywhere(store: Any) -> None:
    def compare(ranks: Rendezvous) -> None:
        ranks.check_equal("colours", "red")
        ranks.check_equal("colours", "green" if ranks.rank == 2 else "red", f"the colour of {ranks.rank}")

    errors = together(store, compare)
    assert all(isinstance(error, RankMismatchError) for error in errors)
    assert {str(error) for error in errors} == {
        "the ranks differ in colours. Rank 0: the colour of 0; rank 2: the colour of 2. Make them equal on all ranks."
    }


def test_a_rank_that_does_not_come_is_missed() -> None:
    ranks = Rendezvous(dist.HashStore(), 1, 2, timedelta(milliseconds=50))
    with pytest.raises(CollectiveTimeoutError, match=r"rank 1 waited 0\.05 s for rank 0"):
        ranks.from_first("")
    with pytest.raises(CollectiveTimeoutError, match=r"1 of 2 had arrived"):
        ranks.minimum(1)


def test_some_ranks_meet_apart(store: Any) -> None:
    def part(ranks: Rendezvous) -> tuple[int, int, str]:
        if ranks.rank == 1:
            return 0, 0, ""
        others = ranks.part("others", [2, 0])
        return others.rank, others.world_size, others.from_first(f"from {ranks.rank}")

    assert together(store, part) == [(1, 2, "from 2"), (0, 0, ""), (0, 2, "from 2")]


def test_notes_are_left_and_found(store: Any) -> None:
    ranks = [Rendezvous(store, rank, 2, LIMIT) for rank in range(2)]
    assert ranks[0].read("place", 1) is None
    ranks[1].post("place", {"count": 3})
    assert ranks[0].read("place", 1) == {"count": 3}
    assert ranks[1].read("place", 0) is None


def test_the_first_cry_is_the_one_that_is_heard(store: Any) -> None:
    ranks = [Rendezvous(store, rank, 2, LIMIT) for rank in range(2)]
    assert ranks[0].hear() is None
    ranks[1].cry("PeerLostError", "help")
    ranks[0].cry("CommunicationError", "me too")
    assert ranks[0].hear() == ranks[1].hear() == Distress(1, "PeerLostError", "help")


def test_a_store_that_is_gone_is_a_typed_error() -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer")

    with pytest.raises(CommunicationError, match="its host has probably ended"):
        Rendezvous(Gone(), 0, 2, LIMIT).hear()  # type: ignore[arg-type]
