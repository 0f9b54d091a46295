"""Large gradients are copied into their bucket as soon as they are there: what happens to them afterwards must count all the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddpcomm.buckets
from ddpcomm.errors import BackwardInterruptedError
from tests.ddp.models import Fork, both_arms, chain, left_arm, squares
from tests.ddp.on_ranks import on_two_ranks
from tests.ddp.oracle import Trial, inner, whole_numbers
from tests.ranks import RankContext

COPIES_AND_VIEWS = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])


def every_gradient_is_large(body: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(body)
    def patched(rank: RankContext, **arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ddpcomm.buckets, "EARLY_BYTES", 0)
            body(rank, **arguments)

    return patched


def count_early(trial: Trial) -> list[str]:
    """Names of the parameters that are copied early from now on."""
    found: list[str] = []
    for bucket in trial.ddp._reducer.arrangement.buckets:
        copy = bucket.pack_early

        def noted(parameter: int, scale: float, copy: Callable[..., None] = copy) -> None:
            found.append(trial.ddp._reducer.parameters.names[parameter])
            copy(parameter, scale)

        bucket.pack_early = noted  # type: ignore[method-assign]
    return found


@COPIES_AND_VIEWS
@on_two_ranks
@every_gradient_is_large
def test_all_are_copied_early(rank: RankContext, view: bool) -> None:
    trial = Trial(rank, chain, gradient_as_bucket_view=view)
    trial.step(squares, whole_numbers(0, 4, 3))
    early = count_early(trial)
    for step in range(3):
        early.clear()
        trial.step(squares, whole_numbers(step, 4, 3))
        assert sorted(early) == sorted(trial.ddp._reducer.parameters.names)


@on_two_ranks
def test_only_large_ones_are(rank: RankContext) -> None:
    trial = Trial(rank, lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 200_000), nn.Linear(200_000, 1)))
    trial.step(squares, whole_numbers(0, 2, 3))
    early = count_early(trial)
    trial.step(squares, whole_numbers(1, 2, 3))
    assert sorted(early) == ["1.bias", "1.weight", "2.weight"]


@COPIES_AND_VIEWS
@on_two_ranks
@every_gradient_is_large
def test_a_gradient_that_changes_after_its_copy(rank: RankContext, view: bool) -> None:
    """A hook on an earlier layer doubles a later layer's gradient, which has been copied by then, and replaces another."""

    def meddling(model: nn.Module, x: Tensor) -> Tensor:
        layers = inner(model)

        def meddle(gradient: Tensor) -> None:
            layers[4].weight.grad.mul_(2)
            layers[4].bias.grad = layers[4].bias.grad + 1

        handle = layers[0].weight.register_hook(meddle)
        loss = squares(model, x)
        loss.backward()
        handle.remove()
        return None  # type: ignore[return-value]

    trial = Trial(rank, chain, gradient_as_bucket_view=view)
    for step in range(4):
        trial.step(meddling, whole_numbers(step, 4, 3))


@COPIES_AND_VIEWS
@on_two_ranks
@every_gradient_is_large
def test_unused_parameters_accumulation_and_sizes_of_zero(rank: RankContext, view: bool) -> None:
    class Empty(Fork):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = nn.Parameter(torch.empty(0, 3))

        def forward(self, x: Tensor, arms: str = "left right") -> Tensor:
            return super().forward(x, arms) + self.nothing.sum()

    trial = Trial(rank, Empty, gradient_as_bucket_view=view, find_unused_parameters=True)
    for step in range(6):
        trial.step(left_arm if step % 3 == 1 else both_arms, whole_numbers(step, 2, 3))


@COPIES_AND_VIEWS
@on_two_ranks
@every_gradient_is_large
def test_an_interrupted_backward_leaves_no_copy_behind(rank: RankContext, view: bool) -> None:
    def fail(_: Tensor) -> None:
        raise ValueError("on purpose")

    trial = Trial(rank, chain, gradient_as_bucket_view=view)
    for step in range(3):
        trial.step(squares, whole_numbers(step, 4, 3))
        handle = trial.ddp.module[0].weight.register_hook(fail) if rank.rank == 1 else None
        with pytest.raises(ValueError if handle else BackwardInterruptedError):
            squares(trial.ddp, whole_numbers(9, 4, 3)[rank.rank]).backward()
        if handle:
            handle.remove()
        trial.ddp.zero_grad()


@COPIES_AND_VIEWS
@on_two_ranks
@every_gradient_is_large
def test_wire_formats(rank: RankContext, view: bool) -> None:
    trial = Trial(rank, chain, gradient_as_bucket_view=view)
    trial.ddp.register_comm_hook(None, ddpcomm.hooks.fp16)
    for step in range(3):
        trial.step(lambda model, x: model(x).sum(), whole_numbers(step, 4, 3))
