"""Parameters that take no part in a backward: on some ranks, on all, now and then."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ddp.models import Fork, both_arms, left_arm, loss_itself, right_arm, squares
from tests.ddp.on_ranks import on_two_ranks, same_on_all_ranks
from tests.ddp.oracle import BUCKETS_AND_VIEWS, TINY_BUCKETS_MB, Trial, whole_numbers
from tests.ranks import RankContext


def chosen_arms(model: nn.Module, batch: tuple[Tensor, str]) -> Tensor:
    x, arms = batch
    return model(x, arms)


@on_two_ranks
def test_arm_never_used_in_a_single_step(rank: RankContext) -> None:
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Fork, **options)
        trial.step(left_arm, whole_numbers(1, 5, 3))
        assert trial.module.right.weight.grad is None


@pytest.mark.parametrize("find", [False, True], ids=["not expected", "expected"])
@on_two_ranks
def test_arm_comes_and_goes(rank: RankContext, find: bool) -> None:
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Fork, find_unused_parameters=find, **options)
        for turn, step in enumerate((both_arms, left_arm, both_arms, right_arm, left_arm)):
            trial.step(step, whole_numbers(turn, 5, 3))


@on_two_ranks
def test_ranks_use_different_arms(rank: RankContext) -> None:
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Fork, **options)
        for turn, arms in enumerate(
            [("left", "right"), ("right", "left"), ("left right", "left"), ("left", "left"), ("right", "left right")]
        ):
            trial.step(chosen_arms, list(zip(whole_numbers(turn, 5, 3), arms, strict=True)))


@pytest.mark.parametrize("set_to_none", [False, True], ids=["zeros", "none"])
@on_two_ranks
def test_gradients_that_are_there_already(rank: RankContext, set_to_none: bool) -> None:
    """What no rank uses keeps its gradient; what one rank uses is averaged on top of what is there."""
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Fork, **options)
        trial.step(both_arms, whole_numbers(1, 5, 3))
        trial.step(left_arm, whole_numbers(2, 5, 3), zero_grad=False)
        trial.step(chosen_arms, list(zip(whole_numbers(3, 5, 3), ("left", "right"), strict=True)), zero_grad=False)
        trial.change(lambda model: model.zero_grad(set_to_none=set_to_none))
        trial.step(right_arm, whole_numbers(4, 5, 3), zero_grad=False)
        trial.step(both_arms, whole_numbers(5, 5, 3), zero_grad=False)


class Detector(nn.Module):
    """Gives a constant for an empty batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 2)

    def forward(self, boxes: Tensor) -> Tensor:
        return self.body(boxes).pow(2).sum() if len(boxes) else torch.zeros((), requires_grad=True)


@on_two_ranks
def test_constant_loss(rank: RankContext) -> None:
    """On one rank, on the other, on both."""
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Detector, **options)
        for turn, sizes in enumerate([(0, 4), (4, 4), (4, 0), (0, 0), (0, 4), (4, 4)]):
            batches = [x[:size] for x, size in zip(whole_numbers(turn, 4, 3), sizes, strict=True)]
            trial.step(loss_itself, batches)


@on_two_ranks
def test_empty_batch(rank: RankContext) -> None:
    """Its gradients are zeros, not missing."""
    trial = Trial(rank, lambda: nn.Linear(3, 2))
    for turn in range(3):
        batches = whole_numbers(turn, 4, 3)
        batches[turn % 2] = batches[turn % 2][:0]
        trial.step(squares, batches)


@on_two_ranks
def test_nothing_at_all_is_used(rank: RankContext) -> None:
    def constant(model: nn.Module, x: Tensor) -> Tensor:
        model(x)
        return torch.ones((), requires_grad=True) * 2

    trial = Trial(rank, Fork)
    trial.step(both_arms, whole_numbers(1, 5, 3))
    trial.step(constant, whole_numbers(2, 5, 3), zero_grad=False)  # never heard of by the wrapper: no collective either
    trial.step(both_arms, whole_numbers(3, 5, 3))


@on_two_ranks
def test_skipped_buckets(rank: RankContext) -> None:
    """skip_all_reduce_unused_params: fewer buckets go out, the same gradients come back."""
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Fork, skip_all_reduce_unused_params=True, find_unused_parameters=True, **options)
        for turn, step in enumerate((both_arms, left_arm, right_arm, both_arms, left_arm)):
            trial.step(step, whole_numbers(turn, 5, 3))


@on_two_ranks
def test_delayed_parameters(rank: RankContext) -> None:
    for options in BUCKETS_AND_VIEWS:
        model = Fork()
        delayed: dict[str, Any] = {
            "delay_all_reduce_named_params": [("left.weight", model.left.weight), ("right.bias", model.right.bias)],
            "param_to_hook_all_reduce": model.trunk.weight,
        }
        trial = Trial(rank, Fork, **options, **delayed)
        for turn, step in enumerate((both_arms, left_arm, both_arms)):
            trial.step(step, whole_numbers(turn, 5, 3))


@on_two_ranks
def test_warning_names_them_once(rank: RankContext) -> None:
    def warned(**options: Any) -> list[str]:
        trial = Trial(rank, Fork, bucket_cap_mb=TINY_BUCKETS_MB, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for turn in range(3):
                trial.step(left_arm, whole_numbers(turn, 5, 3))
        return [str(w.message) for w in caught]

    (text,) = same_on_all_ranks(warned())
    assert "right.weight" in text
    assert "right.bias" in text
    assert "left" not in text
    assert not warned(find_unused_parameters=True)
