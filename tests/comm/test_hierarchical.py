"""The hierarchical communicator, on one machine split by force, does what every transport must."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

from ddpcomm.comm.factory import create_communicator
from ddpcomm.comm.hierarchical import HierarchicalCommunicator
from ddpcomm.errors import ConfigurationError, TransportUnavailableError
from tests.comm import conformance
from tests.comm.conformance import Transport
from tests.ranks import RankContext, RankPool

pytestmark = pytest.mark.timeout(300)

TWO_BY_TWO = Transport("hierarchical", {"hosts": ((0, 1), (2, 3))})
INTERLEAVED = Transport("hierarchical", {"hosts": ((0, 2), (1, 3))})
UNEVEN = Transport("hierarchical", {"hosts": ((0, 3, 4), (1,), (2,))})
ONE_HOST = Transport("hierarchical", {"hosts": ((0, 1),)})
SMALL = [name for name in conformance.CHECKS if name != "large"]


@pytest.mark.parametrize("name", SMALL)
def test_two_hosts_of_two(ranks: Callable[[int], RankPool], name: str) -> None:
    ranks(4).run(conformance.run, TWO_BY_TWO, name)


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "broadcast", "kinds_in_flight"])
def test_interleaved_ranks(ranks: Callable[[int], RankPool], name: str) -> None:
    ranks(4).run(conformance.run, INTERLEAVED, name)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "in_flight", "same_bits_on_all_ranks"])
def test_uneven_hosts(ranks: Callable[[int], RankPool], name: str) -> None:
    ranks(5).run(conformance.run, UNEVEN, name)


@pytest.mark.parametrize("name", SMALL)
def test_one_host(ranks: Callable[[int], RankPool], name: str) -> None:
    ranks(2).run(conformance.run, ONE_HOST, name)


def hosts_found(context: RankContext, hosts: tuple[tuple[int, ...], ...] | None) -> object:
    with create_communicator(context.process_group, "cpu", "hierarchical", timedelta(seconds=20), hosts=hosts) as communicator:
        assert isinstance(communicator, HierarchicalCommunicator)
        communicator.barrier().wait()
        return communicator.hosts


def test_hosts_are_found(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(3).run(hosts_found, None) == [((0, 1, 2),)] * 3
    assert ranks(3).run(hosts_found, ((1,), (2, 0))) == [((0, 2), (1,))] * 3


def refused(context: RankContext) -> None:
    with pytest.raises(TransportUnavailableError, match="no two ranks"):
        create_communicator(context.process_group, "cpu", "hierarchical", hosts=((0,), (1,)))
    for hosts in (((0,),), ((0, 1), (1,)), ((0, 1, 2),)):
        with pytest.raises(ConfigurationError, match="once"):
            create_communicator(context.process_group, "cpu", "hierarchical", hosts=hosts)
    tensor = torch.ones(3)
    with create_communicator(context.process_group, "cpu", "hierarchical", hosts=((0, 1),)) as communicator:
        communicator.all_reduce(tensor).wait()
    assert (tensor == 2).all()


def test_what_cannot_be(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(refused)
