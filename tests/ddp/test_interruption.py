"""Exceptions in the middle of backward, on one rank or on all: they arrive as they are, the others are told, training goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpcomm.errors import BackwardInterruptedError
from tests.ddp.on_ranks import exchange, on_two_ranks
from tests.ddp.oracle import BUCKETS_AND_VIEWS, Trial, no_sync, run, whole_numbers
from tests.ranks import RankContext


class Fuse(torch.autograd.Function):
    """Passes values and gradients through, unless it is to blow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blows: bool) -> Tensor:  # type: ignore[override]
        ctx.blows = blows
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.blows:
            raise ValueError("fuse blown")
        return gradient, None


class Fused(nn.Module):
    """Three layers, with a fuse after each. `blows` is the number of the fuse to blow."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
        self.table = nn.Embedding(4, 3, sparse=True)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor, blows: int | None = None) -> Tensor:
        x = x + self.table(torch.arange(len(x)) % 4)
        for number, layer in enumerate(self.layers):
            x = Fuse.apply(layer(x), number == blows)
        return x.sum()


def small_numbers(seed: int) -> list[Tensor]:
    return whole_numbers(seed, 2, 3, largest=1)


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def interrupted(trial: Trial, blows: int | None, seed: int) -> None:
    """A backward that some rank doesn't end well. `blows`: this rank's fuse, if any."""
    trial.zero_grad()
    loss = trial.ddp(small_numbers(seed)[trial.rank], blows)
    if blows is not None:
        with pytest.raises(ValueError, match="fuse blown"):
            loss.backward()
    else:
        with pytest.raises(BackwardInterruptedError, match=f"rank {1 - trial.rank}"):
            loss.backward()
    arrived = [name for name, p in trial.module.named_parameters() if p.grad is not None]
    assert trial.ddp.unsynchronized_parameters().keys() >= set(arrived)


@pytest.mark.parametrize("fuse", [0, 1, 2])
@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)], ids=["rank 0", "rank 1", "both"])
@on_two_ranks
def test_training_goes_on(rank: RankContext, who: tuple[int, ...], fuse: int) -> None:
    """Interrupted in the first backward, and in later ones, several times over."""
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Fused, **options)
        blows = fuse if rank.rank in who else None
        for number in range(3):
            interrupted(trial, blows, number)
            if number == 1:
                interrupted(trial, blows, number)
            for turn in range(2):
                trial.step(plain, small_numbers(turn))


@on_two_ranks
def test_gradients_of_before_that_lie_in_buckets(rank: RankContext) -> None:
    """They were written over, and are told of as well, on both ranks."""
    trial = Trial(rank, Fused, gradient_as_bucket_view=True)
    trial.step(plain, small_numbers(1))
    with pytest.raises((ValueError, BackwardInterruptedError)):
        trial.ddp(small_numbers(2)[rank.rank], 2 if rank.rank == 0 else None).backward()
    assert trial.ddp.unsynchronized_parameters().keys() == {name for name, _ in trial.module.named_parameters()}
    trial.step(plain, small_numbers(3))
    assert not trial.ddp.unsynchronized_parameters()


@on_two_ranks
def test_at_different_depths(rank: RankContext) -> None:
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Fused, **options)
        for number in range(3):
            interrupted(trial, (0, 2)[rank.rank], number)
            trial.step(plain, small_numbers(number))


@on_two_ranks
def test_under_no_sync(rank: RankContext) -> None:
    """Nothing had gone out: the other rank isn't concerned."""
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Fused, **options)
        for number in range(2):
            trial.zero_grad()
            with no_sync(trial.ddp):
                if rank.rank == 0:
                    with pytest.raises(ValueError, match="fuse blown"):
                        trial.ddp(small_numbers(number)[0], 1).backward()
                else:
                    run(plain, trial.ddp, small_numbers(number)[1])
            trial.step(plain, small_numbers(number))


@on_two_ranks
def test_exception_in_forward(rank: RankContext) -> None:
    """On both ranks: nothing had begun."""

    class Fragile(Fused):
        def forward(self, x: Tensor, blows: int | None = None) -> Tensor:
            out = super().forward(x)
            if blows is not None:
                raise ValueError("fuse blown")
            return out

    trial = Trial(rank, Fragile)
    for turn in range(3):
        with pytest.raises(ValueError, match="fuse blown"):
            trial.ddp(small_numbers(turn)[rank.rank], 1)
        trial.step(plain, small_numbers(turn))


@on_two_ranks
def test_exception_in_a_gradient_hook(rank: RankContext) -> None:
    def fail(gradient: Tensor) -> None:
        raise ValueError("fuse blown")

    for options in BUCKETS_AND_VIEWS:
        for layer in range(3):
            trial = Trial(rank, Fused, **options)
            trial.step(plain, small_numbers(1))
            handle = trial.module.layers[layer].weight.register_hook(fail) if rank.rank == 0 else None
            interrupted_elsewhere = pytest.raises(ValueError if rank.rank == 0 else BackwardInterruptedError)
            with interrupted_elsewhere:
                run(plain, trial.ddp, small_numbers(2)[rank.rank])
            if handle is not None:
                handle.remove()
            trial.step(plain, small_numbers(3))


@on_two_ranks
def test_keyboard_interrupt(rank: RankContext) -> None:
    class Interrupt(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            raise KeyboardInterrupt

    trial = Trial(rank, Fused)
    trial.step(plain, small_numbers(1))
    x = Interrupt.apply(small_numbers(2)[rank.rank].requires_grad_()) if rank.rank == 0 else small_numbers(2)[1]
    with pytest.raises(KeyboardInterrupt if rank.rank == 0 else BackwardInterruptedError):
        trial.ddp(x).backward()
    trial.step(plain, small_numbers(3))


@on_two_ranks
def test_second_model_is_not_concerned(rank: RankContext) -> None:
    first, second = Trial(rank, Fused), Trial(rank, Fused)
    for number in range(2):
        interrupted(first, 1 if rank.rank == 0 else None, number)
        second.step(plain, small_numbers(number))
        first.step(plain, small_numbers(number))


@on_two_ranks
def test_exception_that_is_kept(rank: RankContext) -> None:
    """A traceback that outlives the backward doesn't hold it open."""
    trial = Trial(rank, Fused)
    kept: list[BaseException] = []
    for number in range(2):
        try:
            trial.ddp(small_numbers(number)[rank.rank], 1 if rank.rank == 0 else None).backward()
        except (ValueError, BackwardInterruptedError) as error:
            kept.append(error)
        assert exchange(len(kept)) == [number + 1, number + 1]
        trial.step(plain, small_numbers(number))
