"""A rank that goes its own way: a typed error on the others, in time, that names the first difference; never a mixture."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch import nn

from ddpcomm import DistributedDataParallel, create_communicator
from ddpcomm.comm.base import bucket_header
from ddpcomm.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    DDPCommError,
    PeerLostError,
    RankMismatchError,
)
from ddpcomm.layout_check import require_same_layout
from tests.ddp.on_ranks import exchange, on_two_ranks
from tests.ddp.oracle import TINY_BUCKETS_MB, build, raises_everywhere, whole_numbers
from tests.ranks import RankContext, RankPool

pytestmark = pytest.mark.timeout(120)

TRANSPORTS = ["shared_memory", "process_group"]


def twins() -> nn.Module:
    """Layers of one shape: whoever mistakes one for another finds no difference in any size."""
    return nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])


def named(prefix: str) -> nn.Module:
    model = nn.Sequential()
    for i in range(3):
        model.add_module(f"{prefix}{i}", nn.Linear(3, 3))
    return model


def backward(ddp: nn.Module, rank: int, turn: int = 0) -> None:
    ddp(whole_numbers(turn, 4, 3)[rank]).pow(2).sum().backward()


def reverse_buckets(ddp: DistributedDataParallel) -> None:
    ddp._reducer._order.reverse()
    ddp._reducer.arrange()


@on_two_ranks
def test_headers_are_compared_before_any_data_is_touched(rank: RankContext) -> None:
    with create_communicator(None, "cpu", "shared_memory", timedelta(seconds=20)) as communicator:
        tensor = communicator.empty(64, torch.float32).fill_(1.0)
        communicator.announce(bucket_header(7, 0, 2))
        communicator.all_reduce(tensor).wait()
        communicator.announce(bucket_header(7 + rank.rank, 1, 2))
        with pytest.raises(CollectiveMismatchError) as caught:
            communicator.all_reduce(tensor).wait()
        assert "rank 0 called all_reduce(sum, 64 x float32, 256 bytes, bucket 1 of 2 in layout 00000007)" in str(caught.value)
        assert "in layout 00000008" in str(caught.value)
        assert tensor.unique().tolist() == [2.0]


@on_two_ranks
def test_a_header_belongs_to_one_call(rank: RankContext) -> None:
    with create_communicator(None, "cpu", "shared_memory", timedelta(seconds=20)) as communicator:
        tensor = torch.ones(4)
        communicator.announce(bucket_header(7, 0, 2))
        communicator.all_reduce(tensor).wait()
        if rank.rank == 0:
            communicator.announce(0)
        communicator.all_reduce(tensor).wait()
        assert tensor.tolist() == [4.0] * 4


@on_two_ranks
def test_buckets_in_another_order(rank: RankContext) -> None:
    """Of equal sizes: without the header every average would be one of different layers."""
    for view in (False, True):
        ddp = DistributedDataParallel(build(twins), bucket_cap_mb=TINY_BUCKETS_MB, transport="shared_memory", gradient_as_bucket_view=view)
        backward(ddp, rank.rank)
        ddp.zero_grad()
        if rank.rank == 1:
            reverse_buckets(ddp)
        with pytest.raises(CollectiveMismatchError, match="of 8 in layout"):
            backward(ddp, rank.rank)
        assert ddp.unsynchronized_parameters()
        with pytest.raises(CommunicationError):
            backward(ddp, rank.rank)


@on_two_ranks
def test_another_number_of_buckets(rank: RankContext) -> None:
    ddp = DistributedDataParallel(build(twins), transport="shared_memory")
    backward(ddp, rank.rank)
    ddp.zero_grad()
    if rank.rank == 1:
        ddp._reducer.bucket_ends = frozenset({"2.weight"})
        ddp._reducer.arrange()
    with pytest.raises(CollectiveMismatchError, match=r"bucket 0 of 1 in layout.*bucket 0 of 2 in layout"):
        backward(ddp, rank.rank)


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_two_ranks
def test_layouts_are_compared_when_they_change(rank: RankContext, transport: str) -> None:
    ddp = DistributedDataParallel(build(twins), bucket_cap_mb=TINY_BUCKETS_MB, transport=transport)
    require_same_layout(ddp._reducer)
    if rank.rank == 1:
        reverse_buckets(ddp)
    with raises_everywhere(RankMismatchError, "3.bias is [3] torch.float32"):
        require_same_layout(ddp._reducer)
    with pytest.raises(RankMismatchError, match="an earlier failure left this model without synchronisation"):
        backward(ddp, rank.rank)


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_two_ranks
def test_other_parameters_of_the_same_shapes(rank: RankContext, transport: str) -> None:
    """Nobody compared the models when they were wrapped."""
    ddp = DistributedDataParallel(build(lambda: named("ab"[rank.rank])), init_sync=False, transport=transport)
    with pytest.raises((CollectiveMismatchError, RankMismatchError)):
        backward(ddp, rank.rank)
    assert ddp.unsynchronized_parameters()


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_two_ranks
def test_another_dtype_on_one_rank(rank: RankContext, transport: str) -> None:
    ddp = DistributedDataParallel(build(twins), transport=transport)
    backward(ddp, rank.rank)
    ddp.zero_grad()
    if rank.rank == 1:
        ddp.module.double()
        ddp.module.register_forward_pre_hook(lambda _, inputs: tuple(x.double() for x in inputs))
    with raises_everywhere(RankMismatchError, "0.weight is [3, 3] torch.float32"):
        backward(ddp, rank.rank)


def one_step_less(context: RankContext, transport: str, leave: str) -> str:
    ddp = DistributedDataParallel(build(twins), transport=transport)
    for turn in range(3 - context.rank):
        ddp.zero_grad()
        try:
            backward(ddp, context.rank, turn)
        except DDPCommError as error:
            assert turn == 2
            assert ddp.unsynchronized_parameters()
            exchange("done")
            return type(error).__name__
    if leave == "close":
        ddp.close()
    exchange("done")
    return ""


@pytest.mark.parametrize(
    ("transport", "leave", "error"),
    [
        ("shared_memory", "close", PeerLostError),
        ("shared_memory", "wait", CollectiveTimeoutError),
        ("process_group", "wait", CollectiveTimeoutError),
    ],
)
def test_one_step_less_on_a_rank(two_ranks: RankPool, transport: str, leave: str, error: type[CommunicationError]) -> None:
    results = two_ranks.run(one_step_less, transport, leave, group_timeout=timedelta(seconds=3))
    assert results == [error.__name__, ""]
