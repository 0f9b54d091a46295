"""A model trained inside another backward, and two models in one backward."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpcomm import DistributedDataParallel
from tests.ddp.on_ranks import on_two_ranks
from tests.ddp.oracle import whole_numbers
from tests.ranks import RankContext


class RunsInBackward(torch.autograd.Function):
    """Its backward calls `run`, with gradients enabled: a local loss, say."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[], None]) -> Tensor:
        ctx.run = run
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            ctx.run()
        return gradient * 2, None


@pytest.mark.parametrize("outer", ["backward", "grad", "grad of a leaf", "two in a row"])
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@on_two_ranks
def test_trained_inside_another_backward(rank: RankContext, outer: str, transport: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    ddp = DistributedDataParallel(model, transport=transport)
    scale = torch.ones(3, requires_grad=True)
    seen = []

    def train(value: float) -> None:
        model.zero_grad()
        ddp(torch.full((1, 3), value)).sum().backward()
        seen.append(model.weight.grad.tolist())

    def train_twice(value: float) -> None:
        train(value)
        train(value + 1)

    for step in range(3):
        value = float(rank.rank + 1 + step)
        run = functools.partial(train_twice if outer == "two in a row" else train, value)
        x = torch.ones(1, 3, requires_grad=True)
        seen.clear()
        loss = RunsInBackward.apply(x if outer == "grad of a leaf" else x * scale, run).sum()
        if outer.startswith("grad"):
            torch.autograd.grad(loss, x)
        else:
            loss.backward()
        assert seen == [[[1.5 + step + turn] * 3] for turn in range(len(seen))]
        assert len(seen) == (2 if outer == "two in a row" else 1)
    ddp.close()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, skips: bool) -> Tensor:
        return self.c(x) if skips else self.c(self.b(self.a(x)))


def skips(step: int, rank: int) -> tuple[bool, bool]:
    return (step + rank) % 2 == 0, (step + 2 * rank) % 3 == 0


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@on_two_ranks
def test_two_models_in_one_backward_on_other_branches(rank: RankContext, transport: str) -> None:
    torch.manual_seed(0)
    plain = [Branches().double(), Branches().double()]
    wrapped = [
        DistributedDataParallel(copy.deepcopy(m), bucket_cap_mb=1e-6, find_unused_parameters=True, transport=transport) for m in plain
    ]

    def backward(models: list[Any], step: int, of_rank: int) -> None:
        first, second = skips(step, of_rank)
        models[1](models[0](whole_numbers(step, 2, 4, dtype=torch.float64)[of_rank], first), second).pow(2).sum().backward()

    for step in range(6):
        for model in (*plain, *wrapped):
            model.zero_grad()
        backward(wrapped, step, rank.rank)
        for of_rank in range(rank.world_size):
            backward(plain, step, of_rank)
        for ours, theirs in zip(wrapped, plain, strict=True):
            for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                if other.grad is not None:
                    torch.testing.assert_close(one.grad, other.grad / rank.world_size)
    for model in wrapped:
        model.close()


class ReturnsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.anchor = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.anchor


@on_two_ranks
def test_hooks_on_a_returned_parameter_do_not_pile_up(rank: RankContext) -> None:
    model = ReturnsParameter()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    for _ in range(5):
        ddp.zero_grad()
        ddp(torch.ones(1, 2))[0].sum().backward()
    assert len(model.anchor._backward_hooks or ()) == 1
    ddp(torch.ones(1, 2))[1].mul(rank.rank + 1.0).sum().backward()
    assert model.anchor.grad.tolist() == [1.5] * 3
    assert not model.anchor._backward_hooks
    ddp(torch.ones(1, 2))
    ddp.close()
    assert not model.anchor._backward_hooks
