"""Buffers: rank 0's before every training forward, whatever object holds them, and never in evaluation."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
