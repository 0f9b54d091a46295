"""What forward returns: any kind of object, handed on as it is, and gradients right whichever it is."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ddp.models import squares
from tests.ddp.on_ranks import on_two_ranks
from tests.ddp.oracle import BUCKETS_AND_VIEWS, Trial, inner, whole_numbers
from tests.ranks import RankContext


@dataclasses.dataclass
class Answer:
    loss: Tensor
    note: str = ""


@dataclasses.dataclass(frozen=True)
class FrozenAnswer:
    loss: Tensor


class Slots:
    __slots__ = ("loss",)

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Plain:
    def __init__(self, loss: Tensor) -> None:
        self.parts = [{"loss": loss, "itself": self}]


class Output(OrderedDict[str, Tensor]):
    """Like the outputs of Transformers: a dictionary whose entries are attributes too."""

    def __getattr__(self, name: str) -> Tensor:
        return self[name]


class Hidden:
    """What holds the tensor can't be looked into."""

    def __init__(self, loss: Tensor) -> None:
        self.get = lambda: loss


Pair = namedtuple("Pair", ["loss", "rest"])

KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda loss: loss, lambda out: out),
    "tuple": (lambda loss: (None, loss, 3), lambda out: out[1]),
    "nested": (lambda loss: {"a": [(loss,)], "b": "text"}, lambda out: out["a"][0][0]),
    "named tuple": (lambda loss: Pair(loss, 1), lambda out: out.loss),
    "dataclass": (lambda loss: Answer(loss, "n"), lambda out: out.loss),
    "frozen dataclass": (FrozenAnswer, lambda out: out.loss),
    "slots": (Slots, lambda out: out.loss),
    "plain object": (Plain, lambda out: out.parts[0]["loss"]),
    "dictionary with attributes": (lambda loss: Output(loss=loss), lambda out: out.loss),
    "user dictionary": (lambda loss: UserDict(loss=loss), lambda out: out["loss"]),
    "hidden": (Hidden, lambda out: out.get()),
    "function": (lambda loss: lambda: loss, lambda out: out()),
    "generator": (lambda loss: (each for each in [loss]), next),
    "module": (lambda loss: setattr(module := nn.Module(), "loss", loss) or module, lambda out: out.loss),
}


class Returning(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.wrap = KINDS[kind][0]

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.second(self.first(x).relu()).pow(2).sum())


@pytest.mark.parametrize("kind", KINDS)
@on_two_ranks
def test_kind(rank: RankContext, kind: str) -> None:
    for options in (*BUCKETS_AND_VIEWS, {"static_graph": True}, {"find_unused_parameters": True}):
        trial = Trial(rank, lambda: Returning(kind), **options)
        for turn in range(3):
            trial.step(lambda model, x: KINDS[kind][1](model(x)), whole_numbers(turn, 5, 3))


class Labelling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 2)
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        out.label = "mine"
        self.last = out
        return out


@on_two_ranks
def test_the_very_object(rank: RankContext) -> None:
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        trial = Trial(rank, Labelling, **options)
        for turn in range(2):
            batches = whole_numbers(turn, 5, 3)
            out = trial.ddp(batches[rank.rank])
            assert out is trial.module.last
            assert out.label == "mine"
            trial.step(squares, batches)


def changed_in_place(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    out += 1
    return out.pow(2).sum()


def view_changed_in_place(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    out[0].mul_(2)
    return out.pow(2).sum()


def left_in_the_module(model: nn.Module, x: Tensor) -> Tensor:
    model(x)
    return inner(model).last.pow(2).sum()


def detached_and_not(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return (out * out.detach()).sum()


@pytest.mark.parametrize("step", [changed_in_place, view_changed_in_place, left_in_the_module, detached_and_not], ids=lambda s: s.__name__)
@on_two_ranks
def test_use(rank: RankContext, step: Any) -> None:
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Labelling, **options)
        for turn in range(3):
            trial.step(step, whole_numbers(turn, 5, 3))


class PassesOn(nn.Module):
    """Returns its input and its own weight as they are, and something computed."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.other = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, self.body.weight, self.other(x)


@on_two_ranks
def test_inputs_and_parameters_as_outputs(rank: RankContext) -> None:
    def all_three(model: nn.Module, x: Tensor) -> Tensor:
        same, weight, out = model(x.clone().requires_grad_())
        return (same @ weight.t()).pow(2).sum() + out.pow(2).sum()

    def weight_alone(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x)[1] * x[:2]).sum()

    def input_alone(model: nn.Module, x: Tensor) -> Tensor:
        return model(x.clone().requires_grad_())[0].pow(2).sum()

    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, PassesOn, find_unused_parameters=True, **options)
        for turn, step in enumerate((all_three, weight_alone, all_three, input_alone, weight_alone, all_three)):
            trial.step(step, whole_numbers(turn, 5, 3))


@on_two_ranks
def test_stateful_output_of_an_earlier_step(rank: RankContext) -> None:
    """Hidden state carried from step to step, detached, as in a recurrent network."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(6, 3)
            self.state = torch.zeros(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.state = self.cell(torch.cat([x, self.state.detach().sign()], 1)).relu()
            return self.state

    trial = Trial(rank, Cell)
    for turn in range(3):
        trial.step(squares, whole_numbers(turn, 5, 3))
