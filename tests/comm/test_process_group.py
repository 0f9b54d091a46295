"""The process-group communicator, over Gloo, does what every transport must."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ddpcomm.comm.process_group import ProcessGroupCommunicator, resolve, translate
from ddpcomm.errors import CollectiveTimeoutError, CommunicationError, ConfigurationError, PeerLostError
from tests.comm import conformance
from tests.comm.conformance import Transport
from tests.ranks import RankContext, RankPool

pytestmark = pytest.mark.timeout(300)

GLOO = Transport("process_group")


@pytest.mark.parametrize("name", conformance.CHECKS)
def test_two_ranks(ranks: Callable[[int], RankPool], name: str) -> None:
    ranks(2).run(conformance.run, GLOO, name)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", [name for name in conformance.CHECKS if name != "large"])
def test_other_world_sizes(ranks: Callable[[int], RankPool], world_size: int, name: str) -> None:
    ranks(world_size).run(conformance.run, GLOO, name)


def test_without_a_group() -> None:
    with pytest.raises(ConfigurationError, match="has not been initialized"):
        resolve(None)
    with pytest.raises(ConfigurationError, match="not a rank"):
        resolve(dist.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]


def missing_rank(context: RankContext) -> None:
    communicator = ProcessGroupCommunicator(context.process_group, torch.device("cpu"), timedelta(seconds=1))
    if context.rank == 0:
        with pytest.raises(CollectiveTimeoutError, match="all_reduce"):
            communicator.all_reduce(torch.ones(5)).wait()


def test_a_missing_rank(two_ranks: RankPool) -> None:
    two_ranks.run(missing_rank)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Timed out waiting 1000ms for recv operation to complete", CollectiveTimeoutError),
        ("Connection closed by peer [127.0.0.1]:1234", PeerLostError),
        ("Read error [127.0.0.1]:7: Connection reset by peer", PeerLostError),
        ("something else", CommunicationError),
    ],
)
def test_errors_are_translated(text: str, kind: type[Exception]) -> None:
    error = translate(RuntimeError(text), "all_reduce(5 x torch.float32)")
    assert type(error) is kind
    assert "all_reduce(5 x torch.float32)" in str(error)
    assert text in str(error)
