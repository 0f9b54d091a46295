"""Activation checkpointing, both kinds: nested, shared, varying, and reached without the wrapper's forward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ddpcomm.errors import LateGradientError
from tests.ddp.on_ranks import on_two_ranks
from tests.ddp.oracle import BUCKETS_AND_VIEWS, Step, Trial, inner, no_sync, raises_everywhere, run, whole_numbers
from tests.ranks import RankContext

REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


class Layers(nn.Module):
    """`plan` says which of three layers to apply, one after another; capitals under a checkpoint, brackets nest checkpoints.

    The same plan in small letters, without brackets, computes the same.
    """

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.head = nn.Linear(3, 1)
        self.reentrant = reentrant

    def forward(self, x: Tensor, plan: str) -> Tensor:
        return self.head(self.apply_plan(x, plan)).sum()

    def apply_plan(self, x: Tensor, plan: str) -> Tensor:
        while plan:
            if plan[0] == "(":
                end = matching(plan)
                x = self.recomputed(lambda y, part=plan[1:end]: self.apply_plan(y, part), x)
                plan = plan[end + 1 :]
                continue
            layer = getattr(self, plan[0].lower())
            step = lambda y, layer=layer: layer(y).relu()  # noqa: E731
            x = self.recomputed(step, x) if plan[0].isupper() else step(x)
            plan = plan[1:]
        return x

    def recomputed(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return checkpoint(function, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


def matching(plan: str) -> int:
    depth = 0
    for position, letter in enumerate(plan):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return position
    raise ValueError(plan)


def with_plan(plan: str) -> Step:
    return lambda model, x: model(x.clone().requires_grad_(), plan)


def without_wrapper(plan: str) -> Step:
    return lambda model, x: inner(model)(x.clone().requires_grad_(), plan)


def small_numbers(seed: int) -> list[Tensor]:
    return whole_numbers(seed, 2, 3, largest=1)


PLANS = ["aBc", "ABC", "(ab)c", "(aBc)", "(A(B)C)", "((a)b)c", "AA", "aBA", "(aA)A", "(ab)(ab)(Ab)a"]


@pytest.mark.parametrize("plan", PLANS)
@REENTRANT
@on_two_ranks
def test_plan(rank: RankContext, plan: str, reentrant: bool) -> None:
    for options in BUCKETS_AND_VIEWS:
        for step in (with_plan, without_wrapper):
            trial = Trial(rank, lambda: Layers(reentrant), find_unused_parameters=True, **options)
            for turn in range(3):
                trial.step(step(plan), small_numbers(turn))


@REENTRANT
@on_two_ranks
def test_static_graph(rank: RankContext, reentrant: bool) -> None:
    for plan in ("AA", "(aBc)A", "ABC"):
        trial = Trial(rank, lambda: Layers(reentrant), static_graph=True)
        for turn in range(3):
            trial.step(with_plan(plan), small_numbers(turn))


@REENTRANT
@on_two_ranks
def test_plan_changes_from_step_to_step(rank: RankContext, reentrant: bool) -> None:
    """So does the number of times that a parameter receives a gradient."""
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, lambda: Layers(reentrant), find_unused_parameters=True, **options)
        for turn, plan in enumerate(["abc", "A", "AA", "AAA", "ABCABC", "a", "cBA", "((A)A)(AbC)", "CCC"]):
            trial.step(with_plan(plan), small_numbers(turn))


@REENTRANT
@on_two_ranks
def test_ranks_follow_different_plans(rank: RankContext, reentrant: bool) -> None:
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, lambda: Layers(reentrant), find_unused_parameters=True, **options)
        for turn, plans in enumerate([("A", "bC"), ("AAA", "abc"), ("b", "CAC"), ("AB", "BA")]):
            batches = list(zip(small_numbers(turn), plans, strict=True))
            trial.step(lambda model, batch: with_plan(batch[1])(model, batch[0]), batches)


@on_two_ranks
def test_late_gradient_in_a_bucket(rank: RankContext) -> None:
    """The gradient has gone out from memory that the average was written into: an error on both ranks, once, and then on."""
    for lateness in ((True, True), (True, False), (False, True)):
        trial = Trial(rank, lambda: Layers(True), gradient_as_bucket_view=True, bucket_cap_mb=1e-6)
        trial.step(with_plan("ABC"), small_numbers(1))
        trial.step(with_plan("ABC"), small_numbers(2))
        trial.change(lambda model: model.zero_grad(set_to_none=False))
        plan = "ABCC" if lateness[rank.rank] else "ABC"
        with raises_everywhere(LateGradientError, "c.weight", "rank"):
            run(with_plan(plan), trial.ddp, small_numbers(3)[rank.rank])
        assert "c.weight" in trial.ddp.unsynchronized_parameters()
        for turn, plan in enumerate(("ABCC", "ABC", "ABCC")):
            trial.change(lambda model: model.zero_grad(set_to_none=False))
            trial.step(with_plan(plan), small_numbers(4 + turn), zero_grad=False)


@REENTRANT
@on_two_ranks
def test_under_no_sync(rank: RankContext, reentrant: bool) -> None:
    def accumulate(plan: str, local: Step) -> Step:
        def step(model: nn.Module, x: Tensor) -> None:
            with no_sync(model):
                run(local, model, x)
            run(with_plan(plan), model, x * 2)

        return step

    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, lambda: Layers(reentrant), find_unused_parameters=True, **options)
        for turn, plan in enumerate(["AbC", "AAB", "(A(B)C)"]):
            trial.step(accumulate(plan, with_plan(plan)), small_numbers(turn))
            trial.step(accumulate(plan, without_wrapper(plan)), small_numbers(turn))


@REENTRANT
@on_two_ranks
def test_wrapper_inside_a_checkpoint(rank: RankContext, reentrant: bool) -> None:
    """The whole wrapped model is recomputed during backward."""

    def recomputed(model: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant).pow(2).sum()  # type: ignore[no-any-return]

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))

    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, make, **options)
        for turn in range(3):
            trial.step(recomputed, whole_numbers(turn, 5, 3))


@REENTRANT
@on_two_ranks
def test_checkpoint_sequential(rank: RankContext, reentrant: bool) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(3, 3) for _ in range(5)])

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint_sequential(self.layers, 3, x, use_reentrant=reentrant).sum()  # type: ignore[no-any-return]

    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Deep, **options)
        for turn in range(3):
            trial.step(lambda model, x: model(x.clone().requires_grad_()), small_numbers(turn))


@on_two_ranks
def test_exception_inside_a_reentrant_checkpoint(rank: RankContext) -> None:
    """Raised by the recomputation, in a graph task of its own."""

    class Fragile(Layers):
        blows = False

        def apply_plan(self, x: Tensor, plan: str) -> Tensor:
            if self.blows and torch._C._current_graph_task_id() != -1:
                raise ValueError("fuse blown")
            return super().apply_plan(x, plan)

    for plan in ("c(ab)c", "(a(b)c)"):
        trial = Trial(rank, lambda: Fragile(True))
        trial.step(with_plan(plan), small_numbers(1))
        trial.module.blows = True
        with pytest.raises(ValueError, match="fuse blown"):
            run(with_plan(plan), trial.ddp, small_numbers(2)[rank.rank])
        trial.module.blows = False
        for turn in range(2):
            trial.step(with_plan(plan), small_numbers(3 + turn))
