"""Gradients of whole models equal the mean of what plain autograd gives each rank alone, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.ddp.models import MixedTypes, Tied, Transformer, chain, convolutions, loss_itself, next_token, squares
from tests.ddp.on_ranks import on_two_ranks
from tests.ddp.oracle import BUCKETS_AND_VIEWS, Trial, whole_numbers
from tests.ranks import RankContext

MODELS = {
    "chain": (chain, squares, lambda turn: whole_numbers(turn, 5, 3)),
    "convolutions": (convolutions, squares, lambda turn: whole_numbers(turn, 4, 2, 6, 6)),
    "transformer": (Transformer, next_token, lambda turn: [x.abs().long() for x in whole_numbers(turn, 3, 7, largest=10)]),
    "tied": (Tied, squares, lambda turn: whole_numbers(turn, 5, 3)),
    "mixed types": (MixedTypes, loss_itself, lambda turn: whole_numbers(turn, 3, 2)),
}


@pytest.mark.parametrize("transport", ["process_group", "shared_memory"])
@pytest.mark.parametrize("name", MODELS)
@on_two_ranks
def test_average(rank: RankContext, name: str, transport: str) -> None:
    make, step, batches = MODELS[name]
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, make, transport=transport, **options)
        for turn in range(3):
            trial.step(step, batches(turn))


@on_two_ranks
def test_training(rank: RankContext) -> None:
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Transformer, lambda p: torch.optim.AdamW(p, 0.01), **options)
        for turn in range(5):
            trial.step(next_token, MODELS["transformer"][2](turn))
