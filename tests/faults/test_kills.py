"""A rank is killed, at each point of training and at random ones: the others raise a typed error in time, and end as programs do."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from bench.chaos import kills
from tests.faults.kills import CONSTRUCTION, POINTS, TRANSPORTS, VICTIM, kill_at
from tests.nursery import Nursery

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as made:
        yield made


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_is_killed(nursery: Nursery, transport: str, point: str) -> None:
    before = set(os.listdir("/dev/shm"))
    kill = kill_at(nursery, point, transport)
    assert not kill.problems, "\n".join(kill.problems)
    assert not {name for name in os.listdir("/dev/shm") if "ddpcomm" in name} - before
    for outcome in kill.outcomes.values():
        assert any(f"{name}(" in outcome.text for name in ("all_reduce", "broadcast", "all_gather")), outcome
        if point in CONSTRUCTION:
            assert outcome.text.startswith("construction failed: ")
        if point in ("before its first bucket", "between two buckets", "inside an all-reduce"):
            assert "could not be averaged" in outcome.text
            assert "layers." in outcome.text
        if transport == "shared_memory" and point != "setting up the transport":
            assert outcome.kind == "PeerLostError"
            assert outcome.lost_rank == VICTIM
            assert f"rank {VICTIM} has died" in outcome.text
    if point == "join":
        assert any("all_gather(" in outcome.text for outcome in kill.outcomes.values())


def test_random_kills() -> None:
    """As `python -m bench.chaos` does."""
    for kill in kills(TRANSPORTS, 20, seed=1):
        assert not kill.problems, "\n".join(kill.problems)
