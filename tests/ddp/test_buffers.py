"""Buffers: rank 0's before every training forward, whatever object holds them, and never in evaluation."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcomm.comm.base import Communicator
from ddpcomm.comm.factory import create_communicator
from tests.ddp.models import squares
from tests.ddp.on_ranks import on_two_ranks, same_on_all_ranks
from tests.ddp.oracle import Trial, build, whole_numbers
from tests.ranks import RankContext


class Scaled(nn.Module):
    """Multiplies by a buffer, and counts its forwards differently on each rank, in a new tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2)
        self.register_buffer("count", torch.ones(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.count.tolist()
        out = self.line(x) * self.count
        self.count = self.count + 1 + (dist.get_rank() if self.training else 0)
        self.calls += 1
        return out


@on_two_ranks
def test_reassigned_buffers_are_rank_0s(rank: RankContext) -> None:
    from ddpcomm import DistributedDataParallel

    ddp = DistributedDataParallel(build(Scaled))
    for turn in range(3):
        squares(ddp, whole_numbers(turn, 5, 3)[rank.rank]).backward()
        assert ddp.module.seen == [1.0 + turn, 1.0 + turn]
        same_on_all_ranks(ddp.module.line.weight.grad.tolist())


@on_two_ranks
def test_two_forwards_before_a_backward_keep_saved_tensors(rank: RankContext) -> None:
    """Buffers arrive without a new version, so that what the first forward saved is still good."""

    def normalised() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    from ddpcomm import DistributedDataParallel

    ddp = DistributedDataParallel(build(normalised))
    x = [batch[rank.rank] for batch in (whole_numbers(1, 6, 3), whole_numbers(2, 6, 3))]
    (ddp(x[0]).sin().sum() - squares(ddp, x[1])).backward()
    same_on_all_ranks([p.grad.tolist() for p in ddp.parameters()])
    same_on_all_ranks(ddp.module[1].num_batches_tracked.item())


@on_two_ranks
def test_rank_0_validates_alone(rank: RankContext) -> None:
    trial = Trial(rank, lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False, momentum=0.5)))
    trial.oracle.replicas.clear()
    for turn in range(3):
        trial.module.zero_grad()
        trial.ddp(whole_numbers(turn, 6, 3)[rank.rank]).sum().backward()
        if rank.rank == 0:
            trial.ddp.eval()
            with torch.no_grad():
                x = whole_numbers(9, 6, 3)[1]
                assert torch.equal(trial.ddp(x), trial.module(x))
            trial.ddp.train()
        same_on_all_ranks([p.grad.tolist() for p in trial.ddp.parameters()])


@on_two_ranks
def test_buffers_are_left_alone_if_asked(rank: RankContext) -> None:
    from ddpcomm import DistributedDataParallel

    ddp = DistributedDataParallel(build(Scaled), forward_sync_buffers=False)
    for turn in range(2):
        squares(ddp, whole_numbers(turn, 5, 3)[rank.rank]).backward()
    assert ddp.module.seen == [2.0 + rank.rank] * 2


@on_two_ranks
def test_buffers_that_change_in_place_are_looked_at_again(rank: RankContext) -> None:
    """What a broadcast takes is prepared once: other memory, dtype, shape or order of elements must not go by it."""
    from ddpcomm.module_state import ModuleBuffers

    communicator = on_process_group()
    module = nn.Module()
    module.register_buffer("values", torch.zeros(2, 3))
    buffers = ModuleBuffers(module, ())
    values = module.values
    for number, change in enumerate(
        (
            lambda: torch.arange(6.0).view(2, 3),
            lambda: torch.arange(6.0).view(2, 3) + 1,
            lambda: torch.arange(6.0).view(2, 3).t(),
            lambda: torch.arange(12.0).view(6, 2)[:, 1],
            lambda: torch.arange(10.0),
            lambda: torch.arange(6.0).expand(2, 6),
            lambda: torch._neg_view(torch.arange(3.0)),
        )
    ):
        expected = change() + number
        values.data = expected.clone() if rank.rank == 0 else torch.zeros_like(expected)
        buffers.broadcast(communicator, 0)
        assert module.values is values
        assert torch.equal(values, expected), number
    module.values = torch.full((2,), 7.0 + rank.rank, dtype=torch.float64)
    module.register_buffer("more", torch.full((3,), 5 + rank.rank))
    buffers.broadcast(communicator, 1)
    assert (module.values.tolist(), module.more.tolist()) == ([8.0, 8.0], [6, 6, 6])
    del module.more
    assert list(buffers.named()) == ["values"]


@on_two_ranks
def test_a_buffer_of_another_shape_on_one_rank_is_an_error_there(rank: RankContext) -> None:
    from ddpcomm.errors import RankMismatchError
    from ddpcomm.module_state import ModuleBuffers

    communicator = on_process_group()
    module = nn.Module()
    module.register_buffer("values", torch.zeros(4))
    buffers = ModuleBuffers(module, ())
    buffers.broadcast(communicator, 0)
    module.values.data = torch.full((2, 2) if rank.rank else (4,), 3.0)
    if rank.rank == 0:
        buffers.broadcast(communicator, 0)
    else:
        with pytest.raises(RankMismatchError, match="buffers values have other shapes"):
            buffers.broadcast(communicator, 0)
    assert module.values.tolist() == ([[3.0, 3.0], [3.0, 3.0]] if rank.rank else [3.0] * 4)


def on_process_group() -> Communicator:
    return create_communicator(None, "cpu", "process_group")
