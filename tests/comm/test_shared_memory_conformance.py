"""The shared-memory communicator does what every transport must."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.comm import conformance
from tests.comm.conformance import Transport
from tests.ranks import RankPool

pytestmark = pytest.mark.timeout(300)

PLAIN = Transport("shared_memory")
# Small pieces, and no small messages: each tensor takes many turns through the staging buffers.
IN_PIECES = Transport("shared_memory", {"piece_bytes": 4096, "small_bytes": 64})


@pytest.mark.parametrize("name", conformance.CHECKS)
def test_two_ranks(ranks: Callable[[int], RankPool], name: str) -> None:
    ranks(2).run(conformance.run, PLAIN, name)


@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize("name", [name for name in conformance.CHECKS if name != "large"])
def test_other_world_sizes(ranks: Callable[[int], RankPool], world_size: int, name: str) -> None:
    ranks(world_size).run(conformance.run, PLAIN, name)


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("name", ["all_reduce", "all_reduce_of_mixed_memory", "broadcast", "all_gather", "reduce_scatter", "in_flight"])
def test_in_pieces(ranks: Callable[[int], RankPool], world_size: int, name: str) -> None:
    ranks(world_size).run(conformance.run, IN_PIECES, name)
