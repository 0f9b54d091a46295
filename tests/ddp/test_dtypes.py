"""Parameters of every dtype, shape and memory order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ddpcomm.hooks import bf16, fp16
from tests.ddp.models import MixedTypes, loss_itself, squares
from tests.ddp.on_ranks import on_two_ranks
from tests.ddp.oracle import BUCKETS_AND_VIEWS, Trial, whole_numbers
from tests.ranks import RankContext


class Single(nn.Module):
    """One layer of a dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out = self.line(x.to(self.line.weight.dtype))
        return torch.view_as_real(out).pow(2).sum() if out.is_complex() else out.pow(2).sum()


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_two_ranks
def test_dtype(rank: RankContext, dtype: torch.dtype) -> None:
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, lambda: Single(dtype), **options)
        for turn in range(3):
            trial.step(loss_itself, whole_numbers(turn, 2, 3, largest=1))
        trial.step(loss_itself, whole_numbers(4, 2, 3, largest=1), zero_grad=False)


class Everything(nn.Module):
    """Parameters of no elements, of one, of odd numbers, of every dtype, in an order that spoils alignment."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scalar = nn.Parameter(torch.zeros(()))
        self.odd = nn.Parameter(torch.zeros(7))
        self.whole_plane = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        self.shortened = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        self.frozen_whole = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
        self.last_empty = nn.Parameter(torch.zeros(0, dtype=torch.float64))
        self.doubled = nn.Parameter(torch.zeros(1, 1, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out = x.sum() * self.scalar + (x[0] * self.odd[:3]).sum() + self.odd.sum()
        out = out + torch.view_as_real(self.whole_plane * x[0]).sum() + self.shortened.sum().float() * x[1].sum()
        return (out + self.doubled.sum() * x[1].sum() + self.empty.sum() + self.last_empty.sum()).float()


@on_two_ranks
def test_everything_in_one_model(rank: RankContext) -> None:
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Everything, **options)
        for turn in range(3):
            trial.step(loss_itself, whole_numbers(turn, 2, 3))


@on_two_ranks
def test_nothing_but_empty_parameters(rank: RankContext) -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(0, 3))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight.t()).sum()

    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Empty, **options)
        for turn in range(3):
            trial.step(loss_itself, whole_numbers(turn, 2, 3))


@on_two_ranks
def test_mixed_types(rank: RankContext) -> None:
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, MixedTypes, **options)
        for turn in range(3):
            trial.step(loss_itself, whole_numbers(turn, 3, 2))


@pytest.mark.parametrize("wire", [bf16, fp16], ids=["bf16", "fp16"])
@on_two_ranks
def test_everything_over_a_16_bit_wire(rank: RankContext, wire: object) -> None:
    """Small whole numbers and halves survive it."""
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Everything, **options)
        trial.ddp.register_comm_hook(None, wire)
        for turn in range(3):
            trial.step(loss_itself, whole_numbers(turn, 2, 3))


# ---- memory orders --------------------------------------------------------------------------------------------------


def image(seed: int) -> list[Tensor]:
    return whole_numbers(seed, 2, 2, 4, 4, largest=1)


def channels_last() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 1)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def partly_channels_last() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 1))
    model[0].to(memory_format=torch.channels_last)
    return model


class Transposed(nn.Module):
    """Weights that aren't contiguous: transposed, permuted, with gaps, overlapping."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.zeros(3, 2).t())
        self.permuted = nn.Parameter(torch.zeros(2, 3, 4).permute(2, 0, 1))
        self.gaps = nn.Parameter(torch.zeros(4, 6)[:, ::2])
        self.single = nn.Parameter(torch.zeros(1, 3).t())

    def forward(self, x: Tensor) -> Tensor:
        out = (x @ self.transposed.t()).sum() + (self.permuted * x[:2]).sum() + (self.gaps * x[0]).pow(2).sum()
        return out + (x @ self.single).pow(2).sum()


@pytest.mark.parametrize("make", [channels_last, partly_channels_last], ids=lambda make: make.__name__)
@pytest.mark.parametrize("channels_last_input", [False, True], ids=["contiguous input", "channels-last input"])
@on_two_ranks
def test_channels_last(rank: RankContext, make: Callable[[], nn.Module], channels_last_input: bool) -> None:
    order = torch.channels_last if channels_last_input else torch.contiguous_format
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, make, **options)
        for turn in range(3):
            trial.step(squares, [x.contiguous(memory_format=order) for x in image(turn)])
            for p in trial.module.parameters():
                if options["gradient_as_bucket_view"]:
                    assert p.grad.stride() == p.stride()


@on_two_ranks
def test_channels_last_on_one_rank_only(rank: RankContext) -> None:
    """Of the input, that is: the gradients' memory orders then differ between the ranks, their values must not be mixed up."""
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, lambda: nn.Conv2d(2, 3, 3), **options)
        for turn in range(3):
            batches = image(turn)
            batches[turn % 2] = batches[turn % 2].contiguous(memory_format=torch.channels_last)
            trial.step(squares, batches)


@on_two_ranks
def test_not_contiguous(rank: RankContext) -> None:
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Transposed, **options)
        for turn in range(3):
            trial.step(loss_itself, whole_numbers(turn, 4, 3))
        trial.step(loss_itself, whole_numbers(5, 4, 3), zero_grad=False)


@on_two_ranks
def test_gradients_in_other_orders(rank: RankContext) -> None:
    """Gradients that the user puts there: transposed, expanded, negated, conjugated; then accumulated into."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.real = nn.Parameter(torch.zeros(3, 3))
            self.whole_plane = nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (self.real * x).sum() + torch.view_as_real(self.whole_plane * x).sum()

    def own_gradients(order: int) -> Callable[[nn.Module], None]:
        def change(model: nn.Module) -> None:
            base = torch.arange(9.0).view(3, 3)
            whole = torch.complex(base, base + 1)
            model.real.grad = [base.t(), torch.ones(3, 1).expand(3, 3).clone(), torch._neg_view(base), base[:, [2, 1, 0]]][order]
            model.whole_plane.grad = [whole.t(), whole.conj(), torch._neg_view(whole), whole.mH][order]

        return change

    for options in BUCKETS_AND_VIEWS:
        for order in range(4):
            trial = Trial(rank, Pair, **options)
            for turn in range(2):
                trial.step(loss_itself, whole_numbers(turn, 3, 3))
                trial.change(own_gradients(order))
                trial.step(loss_itself, whole_numbers(turn, 3, 3), zero_grad=False)


@on_two_ranks
def test_parameter_larger_than_a_bucket(rank: RankContext) -> None:
    for options in ({"bucket_cap_mb": 0.001}, {"bucket_cap_mb": 0}, {"bucket_cap_mb_list": [0, 1e-6, 0.0001, 0.01]}):
        trial = Trial(rank, lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 400), nn.Linear(400, 2)), **options)
        for turn in range(3):
            trial.step(squares, whole_numbers(turn, 2, 3, largest=1))
