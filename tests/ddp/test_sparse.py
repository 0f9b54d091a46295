"""Sparse gradients: the average holds every rank's rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.ddp.on_ranks import on_two_ranks
from tests.ddp.oracle import Trial
from tests.ranks import RankContext


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 2, sparse=True, padding_idx=0)
        self.tags = nn.Embedding(6, 2, sparse=True)
        self.line = nn.Linear(2, 2)

    def forward(self, index: Tensor) -> Tensor:
        return self.line(self.words(index)).pow(2).sum()


def loss(model: Any, index: Tensor) -> Tensor:
    return model(index)


@pytest.mark.parametrize("view", [False, True])
@on_two_ranks
def test_rows_of_all_ranks_and_a_table_never_used(rank: RankContext, view: bool) -> None:
    trial = Trial(rank, Tables, gradient_as_bucket_view=view)
    for turn in range(3):
        trial.step(loss, [torch.tensor([1, 4, 4 + turn % 2]), torch.tensor([1, 2])])
    assert trial.module.tags.weight.grad is None


@on_two_ranks
def test_nothing_but_padding_on_one_rank(rank: RankContext) -> None:
    trial = Trial(rank, Tables)
    for turn in range(2):
        trial.step(loss, [torch.tensor([1, 4, 4 + turn]), torch.tensor([0, 0])])


class Undeclared(nn.Module):
    """Nothing about the module says that its table's gradient is going to be sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(6, 2))
        self.line = nn.Linear(2, 2)

    def forward(self, index: Tensor) -> Tensor:
        return self.line(functional.embedding(index, self.table, sparse=True)).pow(2).sum()


@on_two_ranks
def test_sparse_gradient_that_nothing_announced(rank: RankContext) -> None:
    trial = Trial(rank, Undeclared)
    for turn in range(3):
        trial.step(loss, [torch.tensor([1, 3]), torch.tensor([2, 3 + turn])])
