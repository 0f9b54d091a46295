"""The fake communicator: alone it does what every transport must; with more ranks it acts as if all held the same."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

from ddpcomm.comm.factory import create_communicator
from ddpcomm.comm.fake import FakeCall, FakeCommunicator
from ddpcomm.errors import CommunicationError, ConfigurationError, PeerLostError
from tests.comm import conformance
from tests.comm.conformance import Transport
from tests.ranks import RankPool


@pytest.mark.parametrize("name", conformance.CHECKS)
def test_alone(ranks: Callable[[int], RankPool], name: str) -> None:
    ranks(1).run(conformance.run, Transport("fake"), name)


def fake(rank: int = 1, world_size: int = 4) -> FakeCommunicator:
    communicator = create_communicator(transport="fake", rank=rank, world_size=world_size)
    assert isinstance(communicator, FakeCommunicator)
    return communicator


def test_all_ranks_hold_the_same() -> None:
    communicator = fake()
    tensor = torch.arange(4.0)
    communicator.all_reduce(tensor, "avg").wait()
    communicator.all_reduce(tensor, "max").wait(timedelta(seconds=1))
    communicator.broadcast(tensor, 3).wait()
    assert tensor.tolist() == [0, 1, 2, 3]
    communicator.all_reduce(tensor).wait()
    assert tensor.tolist() == [0, 4, 8, 12]
    out = torch.empty(16)
    assert communicator.all_gather(out, tensor).is_completed()
    assert out.tolist() == [0, 4, 8, 12] * 4
    part = torch.empty(1)
    communicator.reduce_scatter(part, tensor, "avg").wait()
    assert part.tolist() == [4]
    communicator.barrier().wait()


def test_calls_are_counted() -> None:
    communicator = fake()
    communicator.all_reduce(torch.ones(3), "avg")
    communicator.barrier()
    communicator.all_reduce(torch.ones(5, dtype=torch.int32))
    assert communicator.calls == [
        FakeCall("all_reduce", "avg", 3, torch.float32),
        FakeCall("barrier", None, 0, None),
        FakeCall("all_reduce", "sum", 5, torch.int32),
    ]
    assert communicator.count("all_reduce") == 2


def test_a_call_fails_when_told() -> None:
    communicator = fake()
    communicator.fail(1, lambda: PeerLostError("rank 2 is gone", 2))
    tensor = torch.ones(2)
    communicator.all_reduce(tensor)
    with pytest.raises(PeerLostError, match="rank 2") as caught:
        communicator.barrier()
    assert caught.value.lost_rank == 2
    communicator.all_reduce(tensor)
    assert tensor.tolist() == [16, 16]
    assert issubclass(PeerLostError, CommunicationError)


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_ranks_that_cannot_be(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigurationError, match="rank must be"):
        fake(rank, world_size)
