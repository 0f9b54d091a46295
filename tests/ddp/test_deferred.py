"""What the ranks had to say, heard at the start of the next backward: as on CUDA, where the host doesn't wait at the end of each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpcomm import DistributedDataParallel
from ddpcomm.errors import BackwardInterruptedError, LateGradientError
from tests.ddp.models import Fork, both_arms, left_arm
from tests.ddp.on_ranks import on_two_ranks
from tests.ddp.oracle import BUCKETS_AND_VIEWS, Trial, build, whole_numbers
from tests.ranks import RankContext


def defer(ddp: DistributedDataParallel) -> None:
    ddp._reducer.defers_status = True


@on_two_ranks
def test_gradients_are_the_same(rank: RankContext) -> None:
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Fork, **options)
        defer(trial.ddp)
        deferred = 0
        for turn, step in enumerate((both_arms, both_arms, left_arm, both_arms, both_arms)):
            trial.step(step, whole_numbers(turn, 5, 3))
            deferred += trial.ddp._reducer.deferred is not None
        assert deferred == 3  # all but the first, which learns the order, and the one that leaves an arm out


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).sum()


@on_two_ranks
def test_interruption_elsewhere_is_an_error_before_the_next_average(rank: RankContext) -> None:
    ddp = DistributedDataParallel(build(Fragile))
    defer(ddp)
    batches = [whole_numbers(turn, 5, 3) for turn in range(4)]

    def blow(_: torch.Tensor) -> None:
        raise ValueError("fuse blown")

    for turn in range(2):
        ddp.zero_grad()
        ddp(batches[turn][rank.rank]).backward()
    if rank.rank == 0:
        handle = ddp.module.second.weight.register_hook(blow)
        with pytest.raises(ValueError, match="fuse blown"):
            ddp(batches[2][0]).backward()
        handle.remove()
        ddp.zero_grad()
        ddp(batches[3][0])
    else:
        ddp(batches[2][1]).backward()
        with pytest.raises(BackwardInterruptedError, match="exception on rank 0"):
            ddp(batches[3][1])
    trial = Trial(rank, Fragile)
    trial.step(lambda model, x: model(x), batches[3])
    ddp.zero_grad()
    ddp(batches[3][rank.rank]).backward()
    for name, parameter in ddp.module.named_parameters():
        assert torch.equal(parameter.grad, dict(trial.module.named_parameters())[name].grad)


class Repeating(nn.Module):
    """A layer applied under re-entrant checkpoints, as often as the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)
        return self.head(x).sum()


@on_two_ranks
def test_late_gradients_are_refused_on_both_ranks(rank: RankContext) -> None:
    ddp = DistributedDataParallel(build(Repeating), bucket_cap_mb=1e-6)
    defer(ddp)
    x = whole_numbers(1, 5, 3)[rank.rank].requires_grad_()
    ddp(x, 1).backward()
    loss = ddp(x, 3)
    with pytest.raises(LateGradientError, match=r"layer\.bias"):
        loss.backward()
