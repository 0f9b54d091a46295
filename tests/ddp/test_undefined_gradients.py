"""Functions that return no gradient for a parameter: autograd reports it all the same, and it must count as unused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ddp.on_ranks import on_two_ranks
from tests.ddp.oracle import BUCKETS_AND_VIEWS, Trial, whole_numbers
from tests.ranks import RankContext


class Product(torch.autograd.Function):
    """`x * weight`, whose backward gives the weight a gradient or none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gives: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gives = gives
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0) if ctx.gives else None, None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.weight = nn.Parameter(torch.ones(3))
        self.last = nn.Linear(3, 1)

    def forward(self, x: Tensor, gives: bool) -> Tensor:
        return self.last(Product.apply(self.first(x), self.weight, gives)).sum()  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: tuple[Tensor, bool]) -> Tensor:
    return model(*batch)


@pytest.mark.parametrize("hook", [False, True], ids=["all-reduce", "communication hook"])
@on_two_ranks
def test_counts_as_unused(rank: RankContext, hook: bool) -> None:
    """On all ranks: its gradient stays as it was. On one: the other's half. In the first backward and in those that overlap."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    for options in BUCKETS_AND_VIEWS:
        for order in ([(False, False), (True, False), (True, True)], [(True, True), (False, False), (False, True), (False, False)]):
            trial = Trial(rank, Model, **options)
            if hook:
                trial.ddp.register_comm_hook(None, allreduce_hook)
            for turn, gives in enumerate(order):
                trial.step(loss, list(zip(whole_numbers(turn, 4, 3), gives, strict=True)), zero_grad=turn != 2)
                here, somewhere = gives[rank.rank], any(gives)
                expected = {} if here else {"weight": "used on other ranks only" if somewhere else "used on no rank"}
                assert trial.ddp.unused_parameters() == expected
