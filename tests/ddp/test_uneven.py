"""Ranks with different numbers of batches, within join()."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpcomm import DistributedDataParallel
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
