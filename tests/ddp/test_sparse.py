"""Sparse gradients: of embeddings and others, declared or not, few rows or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.ddp.models import loss_itself
from tests.ddp.on_ranks import on_two_ranks
from tests.ddp.oracle import BUCKETS_AND_VIEWS, Trial, no_sync, run
from tests.ranks import RankContext


class Tables(nn.Module):
    """Two tables and a layer; tells which table to use by the batch's key."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 3, sparse=True, **options)
        self.tags = nn.EmbeddingBag(6, 3, sparse=True, mode="sum")
        self.line = nn.Linear(3, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        rows = []
        if "words" in batch:
            rows.append(self.words(batch["words"]))
        if "tags" in batch:
            rows.append(self.tags(batch["tags"].unsqueeze(0)))
        return self.line(torch.cat(rows)).pow(2).sum()


def words(*index: int) -> dict[str, Tensor]:
    return {"words": torch.tensor(index, dtype=torch.int64)}


def tags(*index: int) -> dict[str, Tensor]:
    return {"tags": torch.tensor(index, dtype=torch.int64)}


BATCHES = {
    "the same rows": [words(1, 2), words(2, 1)],
    "other rows": [words(0, 5), words(3)],
    "rows several times": [words(1, 1, 4, 1), words(1, 4)],
    "both tables": [words(1) | tags(2, 3), words(1) | tags(3)],
    "each its own table": [words(1, 3), tags(2, 2, 5)],
    "one on one rank": [words(1) | tags(2), tags(5)],
    "no row on one rank": [words(1, 2), words()],
    "no row at all": [words(), words()],
}


@pytest.mark.parametrize("name", BATCHES)
@on_two_ranks
def test_rows(rank: RankContext, name: str) -> None:
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Tables, find_unused_parameters=True, **options)
        for _ in range(3):
            trial.step(loss_itself, BATCHES[name])


@on_two_ranks
def test_one_kind_of_batch_after_another(rank: RankContext) -> None:
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Tables, **options)
        for batches in BATCHES.values():
            trial.step(loss_itself, batches)
        for batches in BATCHES.values():
            trial.step(loss_itself, batches, zero_grad=False)


@on_two_ranks
def test_padding(rank: RankContext) -> None:
    for padding in (0, 2):
        trial = Trial(rank, lambda padding=padding: Tables(padding_idx=padding))
        for _ in range(2):
            trial.step(loss_itself, [words(1, 4, 4), words(padding, padding)])


class Undeclared(nn.Module):
    """Nothing tells beforehand that the first table's gradient is sparse, or when."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(6, 3))
        self.other = nn.Linear(3, 2)

    def forward(self, batch: tuple[Tensor, bool]) -> Tensor:
        index, sparse = batch
        return self.other(functional.embedding(index, self.table, sparse=sparse)).pow(2).sum()


@pytest.mark.parametrize("kinds", [(True, True), (True, False), (False, True)], ids=["both", "rank 0", "rank 1"])
@on_two_ranks
def test_undeclared(rank: RankContext, kinds: tuple[bool, bool]) -> None:
    """Found out in the first backward, or in a later one; the values are right whichever layout comes back."""
    for options in BUCKETS_AND_VIEWS:
        for dense_steps in (0, 2):
            trial = Trial(rank, Undeclared, **options)
            for turn in range(dense_steps):
                batches = [(torch.tensor([turn, 1]), False), (torch.tensor([2]), False)]
                trial.step(loss_itself, batches)
            for turn in range(3):
                batches = [(torch.tensor([turn, 1]), kinds[0]), (torch.tensor([2, 3]), kinds[1])]
                trial.zero_grad()
                run(loss_itself, trial.ddp, batches[rank.rank])
                trial.oracle.step(loss_itself, batches)
                for found, expected in zip(trial.module.parameters(), trial.oracle.replicas[0].parameters(), strict=True):
                    assert torch.equal(found.grad.to_dense(), expected.grad.to_dense())


@on_two_ranks
def test_shared_by_sparse_and_dense_use(rank: RankContext) -> None:
    """The sum of both kinds is dense."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(6, 3, sparse=True)

        def forward(self, index: Tensor) -> Tensor:
            return functional.linear(self.table(index), self.table.weight).sum()

    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Shared, **options)
        for turn in range(3):
            trial.step(loss_itself, [torch.tensor([turn, 1]), torch.tensor([2])])


@on_two_ranks
def test_accumulation(rank: RankContext) -> None:
    def step(model: nn.Module, batch: dict[str, Tensor]) -> None:
        with no_sync(model):
            run(loss_itself, model, words(1, 5))
        run(loss_itself, model, batch)

    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Tables, find_unused_parameters=True, **options)
        for batches in BATCHES.values():
            trial.step(step, batches)


@on_two_ranks
def test_two_sparse_dimensions(rank: RankContext) -> None:
    """Like the gradients of sparse matrices: single elements, not rows."""

    class Elements(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor, index: Tensor) -> Tensor:  # type: ignore[override]
            ctx.save_for_backward(index)
            ctx.shape = weight.shape
            return weight[index[0], index[1]].sum()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            (index,) = ctx.saved_tensors
            return torch.sparse_coo_tensor(index, gradient.expand(index.shape[1]), ctx.shape), None

    class Matrix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 3))

        def forward(self, index: Tensor) -> Tensor:
            return Elements.apply(self.weight, index)  # type: ignore[no-any-return]

    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Matrix, **options)
        batches = [torch.tensor([[0, 1, 1], [2, 0, 1]]), torch.tensor([[1], [1]])]
        for _ in range(3):
            trial.zero_grad()
            run(loss_itself, trial.ddp, batches[rank.rank])
            trial.oracle.step(loss_itself, batches)
            assert trial.module.weight.grad.is_sparse
            assert torch.equal(trial.module.weight.grad.to_dense(), trial.oracle.replicas[0].weight.grad.to_dense())


@on_two_ranks
def test_training(rank: RankContext) -> None:
    """With an optimizer for sparse gradients and one for the others."""
    trial = Trial(rank, Tables)
    models = (trial.ddp.module, *trial.oracle.replicas)
    tables = [torch.optim.SparseAdam([*m.words.parameters(), *m.tags.parameters()], 0.5) for m in models]
    lines = [torch.optim.SGD(m.line.parameters(), 2**-6) for m in models]
    for batches in list(BATCHES.values())[:4] * 2:
        trial.step(loss_itself, batches)
        for optimizer in (*tables, *lines):
            optimizer.step()
        trial.check_weights()
