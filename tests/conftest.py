"""Fixtures for all tests: pools of ranks, shared by the whole session, and a check that nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.leftovers import Leftovers
from tests.ranks import RankPool


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails the session's last test when a process or a file in /dev/shm outlives the session's pools."""
    leftovers = Leftovers()
    yield
    found = leftovers.find()
    assert not found, "the tests left behind:\n" + "\n".join(found)


@pytest.fixture(scope="session")
def ranks(nothing_left_behind: None) -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n)` is the session's pool of n ranks."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield pool
    for each in pools.values():
        each.close()


@pytest.fixture(scope="session")
def two_ranks(ranks: Callable[[int], RankPool]) -> RankPool:
    """The session's pool of two ranks."""
    return ranks(2)
