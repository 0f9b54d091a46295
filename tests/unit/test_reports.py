"""What the ranks know of each other: the board, the places, and exceptions that autograd's engine hides."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from ddpcomm.comm.report_board import ReportBoard
from ddpcomm.raised import when_raised
from ddpcomm.whereabouts import CONSTRUCTION, FORWARD, OWN_CODE, Whereabouts

pytestmark = pytest.mark.timeout(60)

LIMIT = timedelta(seconds=5)
MakeBoard = Callable[..., ReportBoard]


@pytest.fixture
def board() -> Iterator[MakeBoard]:
    """Makes boards of two ranks over one store."""
    store, made = HashStore(), []

    def make(rank: int, describe: Callable[[], Any] = lambda: None, over: Any = None) -> ReportBoard:
        made.append(ReportBoard(over or PrefixStore("reports", store), rank, 2, describe))
        return made[-1]

    yield make
    for each in made:
        each.close()
        each.close()


def test_notes_are_read_by_others(board: MakeBoard) -> None:
    first, second = board(0), board(1)
    assert second.read("raised", [0, 1], LIMIT) == {}
    first.post("raised", [1, "text"], LIMIT)
    first.post("raised", [2, "text"], LIMIT)
    assert second.read("raised", [0, 1], LIMIT) == {0: [2, "text"]}


def test_places_are_put_up_when_they_change(board: MakeBoard) -> None:
    places = iter(["here", "here", "there"])
    last: list[str] = []

    def describe() -> str:
        last[:] = [next(places, *last)]
        return last[0]

    board(0, describe)
    reader, seen = board(1), []
    deadline = time.monotonic() + 20
    while [place for _, place in seen] != ["here", "there"] and time.monotonic() < deadline:
        note = reader.read("where", [0], LIMIT).get(0)
        if note is not None and note not in seen:
            seen.append(note)
        time.sleep(0.05)
    assert [place for _, place in seen] == ["here", "there"]
    assert abs(time.time() - seen[-1][0]) < 20


class Stuck:
    """A store that doesn't answer."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.released.wait()

    def check(self, keys: list[str]) -> bool:
        self.released.wait()
        return False


class Broken:
    def set(self, key: str, value: str) -> None:
        raise RuntimeError("connection reset")


def test_a_store_that_does_not_answer_holds_nobody_up(board: MakeBoard) -> None:
    store = Stuck()
    stuck = board(0, over=store)
    begin = time.monotonic()
    stuck.post("raised", "text")
    assert stuck.read("raised", [1], timedelta(seconds=0.2)) == {}
    stuck.close()
    assert time.monotonic() - begin < 5
    store.released.set()


def test_a_store_that_fails_ends_the_notes_alone(board: MakeBoard) -> None:
    broken = board(0, over=Broken())
    broken.post("raised", "text", LIMIT)
    broken._thread.join(10)
    assert not broken._thread.is_alive()
    broken.post("raised", "text", LIMIT)
    assert broken.read("raised", [1], LIMIT) == {}


def test_order_of_places() -> None:
    places = [
        Whereabouts(CONSTRUCTION),
        Whereabouts(OWN_CODE),
        Whereabouts(FORWARD),
        Whereabouts(OWN_CODE, 1, sent=0, buckets=3),
        Whereabouts(OWN_CODE, 1, sent=2, buckets=3),
        Whereabouts(OWN_CODE, 1),
        Whereabouts(FORWARD, 1),
        Whereabouts(OWN_CODE, 2, sent=0, buckets=3),
    ]
    for i, place in enumerate(places):
        assert [place.is_behind(other) for other in places] == [i < j for j in range(len(places))]


def test_text_of_places() -> None:
    assert str(Whereabouts(CONSTRUCTION)) == "was in construction"
    assert str(Whereabouts(FORWARD, 3)) == "was in forward, after 3 backwards"
    lacking = Whereabouts(OWN_CODE, 4, 1, 3, None, ("a", "b"), 5)
    assert str(lacking) == "was in backward 4, had sent 1 of 3 buckets; bucket 1 lacked the gradients of a, b and 5 more"
    assert str(Whereabouts(OWN_CODE, 4, 3, 3, 2)) == "was in backward 4, had sent 3 of 3 buckets and waited for bucket 2"


class Failing(torch.autograd.Function):
    """Asks for the exception as soon as its backward is dropped, as a reducer does."""

    told: list[BaseException] = []  # noqa: RUF012 - the tests clear it

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        when_raised(Failing.told.append)
        raise ValueError("out of order")


def test_the_exception_of_a_backward_is_seen() -> None:
    Failing.told.clear()
    with pytest.raises(ValueError, match="out of order") as caught:
        Failing.apply(torch.ones(1, requires_grad=True)).sum().backward()
    assert Failing.told == [caught.value]


def test_an_exception_that_is_handled_already_is_not_meant() -> None:
    Failing.told.clear()
    try:
        raise KeyError("an earlier one")
    except KeyError:
        with pytest.raises(ValueError, match="out of order") as caught:
            Failing.apply(torch.ones(1, requires_grad=True)).sum().backward()
    assert Failing.told == [caught.value]


def test_none_is_seen_where_none_is_raised() -> None:
    told: list[BaseException] = []
    when_raised(told.append)
    for _ in range(200):
        gc.isenabled()
    with pytest.raises(ValueError, match="much later"):
        raise ValueError("much later")
    assert not told
