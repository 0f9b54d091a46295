"""Gradient accumulation: `no_sync` in every order."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from torch import Tensor, nn

from ddpcomm import DistributedDataParallel
from tests.ddp.models import Fork, both_arms, left_arm, loss_itself, right_arm
from tests.ddp.on_ranks import on_two_ranks
from tests.ddp.oracle import BUCKETS_AND_VIEWS, Step, Trial, no_sync, run, whole_numbers
from tests.ranks import RankContext


def accumulate(*steps: Step, local: int) -> Step:
    """All of `steps` on one batch, the first `local` of them under no_sync."""

    def step(model: nn.Module, x: Tensor) -> None:
        for number, micro_step in enumerate(steps):
            if number < local:
                with no_sync(model):
                    run(micro_step, model, x * (number + 1))
            else:
                run(micro_step, model, x * (number + 1))

    return step


@pytest.mark.parametrize("static", [False, True], ids=["", "static graph"])
@on_two_ranks
def test_first_backward_of_all(rank: RankContext, static: bool) -> None:
    for options in BUCKETS_AND_VIEWS:
        for local in range(3):
            trial = Trial(rank, Fork, static_graph=static, **options)
            for turn in range(3):
                trial.step(accumulate(both_arms, both_arms, both_arms, local=local), whole_numbers(turn, 5, 3))


@on_two_ranks
def test_every_order(rank: RankContext) -> None:
    """Rounds of differing length one after another."""
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Fork, **options)
        for turn, local in enumerate([0, 1, 0, 2, 2, 0, 3]):
            trial.step(accumulate(*[both_arms] * 4, local=local), whole_numbers(turn, 5, 3))


@on_two_ranks
def test_different_arms_in_a_round(rank: RankContext) -> None:
    """A parameter that only a local micro-batch used is averaged with the rest."""
    for options in BUCKETS_AND_VIEWS:
        for find in (False, True):
            trial = Trial(rank, Fork, find_unused_parameters=find, **options)
            for turn, arms in enumerate(itertools.product([left_arm, right_arm, both_arms], repeat=2)):
                trial.step(accumulate(*arms, local=1), whole_numbers(turn, 5, 3))


@on_two_ranks
def test_different_numbers_of_micro_batches(rank: RankContext) -> None:
    def step(model: nn.Module, batch: tuple[Tensor, int]) -> None:
        x, local = batch
        accumulate(*[left_arm] * local, both_arms, local=local)(model, x)

    def make() -> nn.Module:
        model = Fork()
        model.register_buffer("table", torch.zeros(3))
        return model

    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, make, **options)
        for turn, counts in enumerate([(0, 1), (2, 0), (1, 3), (0, 0)]):
            trial.step(step, list(zip(whole_numbers(turn, 5, 3), counts, strict=True)))


@on_two_ranks
def test_forward_counts_not_backward(rank: RankContext) -> None:
    """As in torch: a backward synchronises if its forward ran outside no_sync, wherever the backward itself runs."""
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Fork, **options)
        for turn in range(3):
            batches = whole_numbers(turn, 5, 3)
            with no_sync(trial.ddp):
                loss = both_arms(trial.ddp, batches[rank.rank])
            trial.zero_grad()
            loss.backward()
            trial.oracle.run(both_arms, batches)
            own = trial.oracle.replicas[rank.rank]
            assert all(torch.equal(p.grad, q.grad) for p, q in zip(trial.module.parameters(), own.parameters(), strict=True))

            loss = both_arms(trial.ddp, batches[rank.rank])
            with no_sync(trial.ddp):
                loss.backward()
            trial.oracle.run(both_arms, batches)
            trial.oracle.average()
            trial.check()


@on_two_ranks
def test_local_and_synchronising_forwards_in_one_backward(rank: RankContext) -> None:
    """One output that asks for synchronisation speaks for all."""

    def step(model: nn.Module, x: Tensor) -> Tensor:
        with no_sync(model):
            first = left_arm(model, x)
        second = both_arms(model, x * 2)
        with no_sync(model):
            third = right_arm(model, x * 3)
        return first + second + third

    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Fork, **options)
        for turn in range(3):
            trial.step(step, whole_numbers(turn, 5, 3))


class Itself(nn.Module):
    """Returns its parameter: outputs of all forwards are one leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self) -> Tensor:
        return self.weight


@pytest.mark.parametrize("local_first", [True, False])
@on_two_ranks
def test_one_leaf_of_a_local_and_a_synchronising_forward(rank: RankContext, local_first: bool) -> None:
    ddp = DistributedDataParallel(Itself())
    for _ in range(2):
        ddp.zero_grad()
        with no_sync(ddp) if local_first else contextlib.nullcontext():
            first = ddp()
        with contextlib.nullcontext() if local_first else no_sync(ddp):
            second = ddp()
        ((first + second) * (rank.rank + 1.0)).sum().backward()
        assert ddp.module.weight.grad.tolist() == [3.0] * 3
    with no_sync(ddp):
        ddp.zero_grad()
        (ddp() * (rank.rank + 1.0)).sum().backward()
    assert ddp.module.weight.grad.tolist() == [rank.rank + 1.0] * 3
    ddp.close()


@on_two_ranks
def test_switched_off_and_nested(rank: RankContext) -> None:
    trial = Trial(rank, Fork)
    for turn in range(2):
        batches = whole_numbers(turn, 5, 3)
        trial.zero_grad()
        with trial.ddp.no_sync(enabled=False):
            run(both_arms, trial.ddp, batches[rank.rank])
        trial.oracle.step(both_arms, batches)
        trial.check()
        with trial.ddp.no_sync():
            with trial.ddp.no_sync(), trial.ddp.no_sync(enabled=False):
                assert not trial.ddp.require_backward_grad_sync
            assert not trial.ddp.require_backward_grad_sync
        assert trial.ddp.require_backward_grad_sync
        with pytest.raises(KeyError), trial.ddp.no_sync():
            raise KeyError
        assert trial.ddp.require_backward_grad_sync


@on_two_ranks
def test_gradients_set_to_none_within_a_round(rank: RankContext) -> None:
    """What was accumulated is gone, and isn't waited for."""

    def step(model: nn.Module, x: Tensor) -> None:
        with no_sync(model):
            run(both_arms, model, x)
        model.zero_grad()
        run(left_arm, model, x)

    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Fork, find_unused_parameters=True, **options)
        for turn in range(3):
            trial.step(step, whole_numbers(turn, 5, 3))


@on_two_ranks
def test_only_one_rank_accumulated(rank: RankContext) -> None:
    """Gradients of its own that one rank alone has from before count in the average."""

    def step(model: nn.Module, batch: tuple[Tensor, bool]) -> None:
        x, accumulates = batch
        if accumulates:
            with no_sync(model):
                run(right_arm, model, x)
        run(left_arm, model, x * 2)

    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Fork, find_unused_parameters=True, **options)
        for turn, who in enumerate([(True, False), (False, True), (True, True), (False, False)]):
            trial.step(step, list(zip(whole_numbers(turn, 5, 3), who, strict=True)))


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x).sum() + 0 * self.count.sum()


@on_two_ranks
def test_buffers_are_synchronised_after_a_synchronising_forward(rank: RankContext) -> None:
    """As in torch: not again between micro-batches."""
    trial = Trial(rank, Counted)
    buffer = trial.module.count
    for _ in range(2):
        buffer.fill_(10.0 + rank.rank)
        with no_sync(trial.ddp):
            run(loss_itself, trial.ddp, torch.ones(2, 3))
        assert buffer.item() == 10
        buffer.fill_(20.0 + rank.rank)
        with no_sync(trial.ddp):
            run(loss_itself, trial.ddp, torch.ones(2, 3))
        run(loss_itself, trial.ddp, torch.ones(2, 3))
        assert buffer.item() == 20 + rank.rank
