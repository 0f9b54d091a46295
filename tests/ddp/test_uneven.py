"""Ranks with different numbers of batches, within join()."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

from ddpcomm import DistributedDataParallel
from ddpcomm.errors import NonFiniteGradientError
from tests.ddp.models import squares
from tests.ddp.on_ranks import on_two_ranks
from tests.ddp.oracle import build, whole_numbers
from tests.ranks import RankContext

STEPS = (2, 4)  # batches of rank 0 and of rank 1


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


@pytest.mark.parametrize("by_world_size", [True, False])
@on_two_ranks
def test_a_missing_batch_counts_as_zeros_or_not_at_all(rank: RankContext, by_world_size: bool) -> None:
    batches = [whole_numbers(turn, 5, 3) for turn in range(max(STEPS))]
    ddp = DistributedDataParallel(build(small))
    optimizer = torch.optim.SGD(ddp.parameters(), 2.0**-12, momentum=0.5)
    with ddp.join(divide_by_initial_world_size=by_world_size):
        for turn in range(STEPS[rank.rank]):
            optimizer.zero_grad()
            squares(ddp, batches[turn][rank.rank]).backward()
            optimizer.step()

    alone = build(small)
    optimizer = torch.optim.SGD(alone.parameters(), 2.0**-12, momentum=0.5)
    for turn, batch in enumerate(batches):
        active = [r for r in range(2) if turn < STEPS[r]]
        optimizer.zero_grad()
        for r in active:
            (squares(alone, batch[r]) / (2 if by_world_size else len(active))).backward()
        optimizer.step()
    for found, wanted in zip(ddp.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@on_two_ranks
def test_early_end_can_be_an_error(rank: RankContext) -> None:
    ddp = DistributedDataParallel(build(small))

    def train() -> None:
        with ddp.join(throw_on_early_termination=True):
            for turn in range(STEPS[rank.rank]):
                squares(ddp, whole_numbers(turn, 5, 3)[rank.rank]).backward()

    with pytest.raises(RuntimeError, match="exhausted"):
        train()


@on_two_ranks
def test_with_buffers(rank: RankContext) -> None:
    ddp = DistributedDataParallel(build(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))))
    with ddp.join():
        for turn in range(STEPS[rank.rank]):
            squares(ddp, whole_numbers(turn, 6, 3)[rank.rank]).backward()
    assert ddp.module[1].num_batches_tracked.item() == max(STEPS)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@on_two_ranks
def test_a_rank_without_input_receives_the_averages(rank: RankContext, view: bool) -> None:
    """A sharded optimizer, which steps on every rank as long as one has input, trains as one process does."""
    batches = [whole_numbers(turn, 5, 3) for turn in range(max(STEPS))]
    ddp = DistributedDataParallel(build(small), gradient_as_bucket_view=view)
    sharded = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=2.0**-12, momentum=0.5)
    kept = None
    with Join([ddp, sharded]):
        for turn in range(STEPS[rank.rank]):
            sharded.zero_grad()
            squares(ddp, batches[turn][rank.rank]).backward()
            kept = [p.grad.clone() for p in ddp.parameters()]
            sharded.step()

    alone = build(small)
    optimizer = torch.optim.SGD(alone.parameters(), 2.0**-12, momentum=0.5)
    for turn, batch in enumerate(batches):
        optimizer.zero_grad()
        for r in (r for r in range(2) if turn < STEPS[r]):
            (squares(alone, batch[r]) / 2).backward()
        optimizer.step()
    for found, wanted in zip(ddp.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-5, atol=1e-6)
    changed = [not torch.equal(p.grad, before) for p, before in zip(ddp.parameters(), kept, strict=True)]
    assert all(changed) == (STEPS[rank.rank] < max(STEPS))


class Rows(nn.Module):
    """One of its two tables in each forward, and a linear layer that some batches leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, 2, sparse=True)
        self.line = nn.Linear(2, 1)
        self.never = nn.Parameter(torch.ones(2))

    def forward(self, where: torch.Tensor, uses_line: bool = True) -> torch.Tensor:
        rows = self.rows(where)
        return self.line(rows).sum() if uses_line else rows.sum()


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@on_two_ranks
def test_sparse_and_unused_gradients_without_input(rank: RankContext, view: bool) -> None:
    """What no rank used stays as it was; so does a gradient that somebody else holds."""
    ddp = DistributedDataParallel(build(Rows), gradient_as_bucket_view=view, find_unused_parameters=True)
    where = torch.tensor([0, 1 + rank.rank])
    ddp(where).backward()
    line, held = ddp.module.line.weight.grad.clone(), ddp.module.line.weight.grad
    ddp.module.never.grad = torch.full((2,), 7.0)
    rows = ddp.module.rows.weight
    with ddp.join():
        for _ in range(rank.rank):
            rows.grad = None
            ddp(where, uses_line=False).backward()
    assert torch.equal(rows.grad.to_dense(), torch.tensor([[0.5, 0.5], [0, 0], [0.5, 0.5], [0, 0], [0, 0]]))
    assert ddp.module.line.weight.grad is held
    assert torch.equal(held, line)
    assert torch.equal(ddp.module.never.grad, torch.full((2,), 7.0))


@on_two_ranks
def test_a_sparse_gradient_that_is_not_finite_is_an_error_without_input_too(rank: RankContext) -> None:
    ddp = DistributedDataParallel(build(Rows), nonfinite="raise", find_unused_parameters=True)
    large = torch.finfo(torch.float32).max

    def train() -> None:
        with ddp.join():
            for _ in range(rank.rank):
                ddp(torch.tensor([0]), uses_line=False).mul(large).mul(2.0).backward()

    with pytest.raises(NonFiniteGradientError):
        train()
