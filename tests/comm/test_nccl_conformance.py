"""The nccl transport, over Gloo in libnccl's place, does what every transport must."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from ddpcomm.comm.base import Communicator
from tests.comm import conformance
from tests.comm.conformance import Transport
from tests.comm.nccl_over_gloo import nccl_over_gloo
from tests.rank_process import RankContext
from tests.ranks import RankPool

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class NcclOverGloo(Transport):
    """Each communicator has a recorder of its own."""

    def make(self, context: RankContext, **options: Any) -> Communicator:
        return nccl_over_gloo(context, **(self.options | options))[0]


ONE = NcclOverGloo("nccl")
THREE = NcclOverGloo("nccl", {"communicators": 3})
PLAIN = NcclOverGloo("nccl", {"memory": "plain"})

MIXED = "all_reduce_of_mixed_memory"  # not with windows, which are made by all ranks together
DATA = ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "in_flight"]


@pytest.mark.parametrize("name", [name for name in conformance.CHECKS if name != MIXED])
def test_two_ranks(ranks: Callable[[int], RankPool], name: str) -> None:
    ranks(2).run(conformance.run, ONE, name)


@pytest.mark.parametrize(("transport", "name"), [(PLAIN, MIXED), *((THREE, name) for name in DATA)])
def test_other_options(ranks: Callable[[int], RankPool], transport: Transport, name: str) -> None:
    ranks(2).run(conformance.run, transport, name)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", DATA)
def test_other_world_sizes(ranks: Callable[[int], RankPool], world_size: int, name: str) -> None:
    ranks(world_size).run(conformance.run, ONE, name)
