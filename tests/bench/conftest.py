"""Benchmarks under test run in the session's pools of ranks, so that none spawns processes of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench import accumulation, breakdown, bucket_size, communicators, scaling, step_time
from tests.ranks import RankPool

SCRIPTS = (accumulation, breakdown, bucket_size, communicators, scaling, step_time)


class Borrowed:
    """In place of `RankPool`: one of the session's, which is not closed."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool

    def __enter__(self) -> RankPool:
        return self._pool

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def borrowed_pools(monkeypatch: pytest.MonkeyPatch, ranks: Callable[[int], RankPool]) -> None:
    def borrow(world_size: int, **options: Any) -> Borrowed:
        return Borrowed(ranks(world_size))

    for script in SCRIPTS:
        monkeypatch.setattr(script, "RankPool", borrow)
