"""Gradients of every dtype and memory format, mixed in one model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ddp.models import MixedTypes
from tests.ddp.on_ranks import on_two_ranks
from tests.ddp.oracle import BUCKETS_AND_VIEWS, Trial, whole_numbers
from tests.ranks import RankContext


def output(model: Any, x: Tensor) -> Tensor:
    return model(x)


@on_two_ranks
def test_each_in_its_own_dtype(rank: RankContext) -> None:
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, MixedTypes, **options)
        for turn in range(3):
            trial.step(lambda model, x: model(x).sum(), whole_numbers(turn, 3, 2, largest=1))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.zeros(0))
        self.line = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        product = self.line(x) * self.wave.conj()
        return product.imag.sum() + product.real.sum() + self.empty.sum()


@pytest.mark.parametrize("zero", [True, False])
@on_two_ranks
def test_complex_and_empty_parameters(rank: RankContext, zero: bool) -> None:
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Complex, **options)
        for turn in range(3):
            trial.step(output, whole_numbers(turn, 5, 3), zero_grad=zero)


class NegBit(nn.Module):
    """The gradient of `imaginary` arrives with torch's lazy sign bit set."""

    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Parameter(torch.zeros(3))
        self.imaginary = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.complex(self.real, self.imaginary).conj() * x).imag.sum()


@on_two_ranks
def test_gradients_that_are_negated_lazily(rank: RankContext) -> None:
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, NegBit, **options)
        for turn in range(3):
            trial.step(output, whole_numbers(turn, 5, 3))


@on_two_ranks
def test_channels_last(rank: RankContext) -> None:
    def convolution() -> nn.Module:
        return nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)

    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, convolution, **options)
        for turn in range(3):
            trial.step(lambda model, x: model(x).sum(), whole_numbers(turn, 2, 2, 4, 4))
