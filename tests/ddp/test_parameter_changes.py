"""Parameters frozen, unfrozen, replaced, cast, added, removed after wrapping: they go on being averaged, or all ranks refuse."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpcomm.errors import RankMismatchError
from tests.ddp.models import Fork, both_arms, loss_itself, squares
from tests.ddp.on_ranks import on_two_ranks
from tests.ddp.oracle import BUCKETS_AND_VIEWS, Trial, inner, raises_everywhere, run, whole_numbers
from tests.ranks import RankContext

Change = Callable[[Any], Any]


def freeze_trunk(model: Fork) -> None:
    model.trunk.requires_grad_(False)


def unfreeze_trunk(model: Fork) -> None:
    model.trunk.requires_grad_(True)


def load_by_assignment(model: Fork) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def replace_weight(model: Fork) -> None:
    model.left.weight = nn.Parameter(model.left.weight.detach() + 1)


def replace_arm(model: Fork) -> None:
    model.left = nn.Linear(4, 3)
    with torch.no_grad():
        model.left.weight.fill_(2)
        model.left.bias.fill_(1)


def add_bias_to_an_arm(model: Fork) -> None:
    arm = nn.Linear(4, 2)
    arm.weight = model.right.weight
    with torch.no_grad():
        arm.bias.fill_(1)
    model.right = arm


def put_an_adapter_in(model: Fork) -> None:
    adapter = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        adapter.weight.fill_(1)
    model.left = nn.Sequential(adapter, model.left)


def remove_bias(model: Fork) -> None:
    model.left.bias = None


def tie_arms(model: Fork) -> None:
    model.left.weight = model.right.weight


def cast_to_double(model: Fork) -> None:
    model.double()


def cast_back(model: Fork) -> None:
    model.float()


def cast_trunk(model: Fork) -> None:
    model.trunk.bfloat16()


def resize_in_place(model: Fork) -> None:
    """The same Parameter objects, over other memory."""
    with torch.no_grad():
        model.left.weight.data = torch.ones(3, 4)
        model.left.bias.data = torch.ones(3)
    model.left.weight.grad = model.left.bias.grad = None


def transpose_in_place(model: Fork) -> None:
    model.trunk.weight.data = model.trunk.weight.data.t().contiguous().t()


def move_to_other_memory(model: Fork) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def channels_last(model: Fork) -> None:
    """Exchanges the memory of the gradients too, beneath the same tensors."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.data.t().contiguous().t()


def move_gradients_too(model: Fork) -> None:
    move_to_other_memory(model)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data = parameter.grad.data.clone()


def low_rank_then_merged(model: Fork) -> None:
    """As with a parametrisation that is put on and taken off."""
    nn.utils.parametrize.register_parametrization(model.left, "weight", Doubled())


def merge(model: Fork) -> None:
    nn.utils.parametrize.remove_parametrizations(model.left, "weight")


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((2, 4), 2.0))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.factor


SEQUENCES: dict[str, list[Change]] = {
    "frozen": [freeze_trunk],
    "unfrozen": [freeze_trunk, unfreeze_trunk],
    "loaded by assignment": [load_by_assignment, load_by_assignment],
    "weight replaced": [replace_weight],
    "submodule replaced": [replace_arm],
    "bias added": [remove_bias, add_bias_to_an_arm],
    "submodule put in": [put_an_adapter_in],
    "bias removed": [remove_bias],
    "weights tied": [tie_arms],
    "cast": [cast_to_double, cast_back],
    "one layer cast": [cast_trunk],
    "resized": [resize_in_place],
    "transposed": [transpose_in_place],
    "moved": [move_to_other_memory],
    "moved with gradients": [move_gradients_too, move_gradients_too],
    "memory order": [channels_last, move_gradients_too],
    "parametrised": [low_rank_then_merged, merge],
    "several": [freeze_trunk, replace_weight, unfreeze_trunk, cast_to_double, tie_arms],
}


def in_the_trunks_dtype(model: nn.Module, x: Tensor) -> Tensor:
    module = inner(model)
    arms = [(arm, next(arm.parameters()).dtype) for arm in (module.left, module.right)]
    x = x.to(module.trunk.weight.dtype)
    if len({dtype for _, dtype in arms} | {x.dtype}) == 1:
        return both_arms(model, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return both_arms(model, x)


@pytest.mark.parametrize("name", SEQUENCES)
@on_two_ranks
def test_change_on_all_ranks(rank: RankContext, name: str) -> None:
    for options in BUCKETS_AND_VIEWS:
        for steps_before in (0, 1, 3):
            trial = Trial(rank, Fork, **options)
            for turn in range(steps_before):
                trial.step(in_the_trunks_dtype, whole_numbers(turn, 5, 3))
            for number, change in enumerate(SEQUENCES[name]):
                trial.change(change)
                for turn in range(2):
                    trial.step(in_the_trunks_dtype, whole_numbers(10 * number + turn, 5, 3))


UPON_GRADIENTS = ["frozen", "unfrozen", "weight replaced", "moved", "moved with gradients", "memory order", "cast"]


@pytest.mark.parametrize("name", UPON_GRADIENTS)
@on_two_ranks
def test_change_upon_gradients(rank: RankContext, name: str) -> None:
    """The gradients that are there are accumulated into."""
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Fork, **options)
        for turn in range(2):
            trial.step(in_the_trunks_dtype, whole_numbers(turn, 5, 3))
        for number, change in enumerate(SEQUENCES[name]):
            trial.change(change)
            for turn in range(2):
                trial.step(in_the_trunks_dtype, whole_numbers(10 * number + turn, 5, 3), zero_grad=False)


ONE_SIDED: dict[str, tuple[Change, str]] = {
    "frozen": (freeze_trunk, "trunk.weight"),
    "submodule replaced": (replace_arm, "left.weight"),
    "submodule put in": (put_an_adapter_in, "left.0.weight"),
    "bias removed": (remove_bias, "left.bias"),
    "cast": (cast_to_double, "trunk.weight"),
    "resized": (resize_in_place, "left.weight"),
}


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("name", ONE_SIDED)
@on_two_ranks
def test_change_on_one_rank(rank: RankContext, name: str, where: int) -> None:
    """An error on both, at every step until the ranks agree again."""
    change, word = ONE_SIDED[name]
    for options in BUCKETS_AND_VIEWS:
        for steps_before in (0, 2):
            trial = Trial(rank, Fork, **options)
            for turn in range(steps_before):
                trial.step(in_the_trunks_dtype, whole_numbers(turn, 5, 3))
            former = copy.deepcopy(trial.module)
            if rank.rank == where:
                change(trial.module)
            for turn in range(2):
                trial.module.zero_grad()
                with raises_everywhere(RankMismatchError, word, "rank 1"):
                    run(in_the_trunks_dtype, trial.ddp, whole_numbers(turn, 5, 3)[rank.rank])
            trial.ddp.module.__dict__.update(former.__dict__)
            for turn in range(2):
                trial.step(in_the_trunks_dtype, whole_numbers(10 + turn, 5, 3))


@pytest.mark.parametrize("change", [load_by_assignment, replace_weight, move_to_other_memory], ids=lambda change: change.__name__)
@on_two_ranks
def test_replaced_on_one_rank(rank: RankContext, change: Change) -> None:
    """By another of the same shape. Averaged all the same, or refused once, where the gradient's memory had gone out: never local."""
    for options, set_to_none in itertools.product(BUCKETS_AND_VIEWS, (True, False)):
        trial = Trial(rank, Fork, **options)
        trial.step(both_arms, whole_numbers(1, 5, 3))
        if rank.rank == 1:
            change(trial.module)
            trial.oracle.replicas[1].load_state_dict(trial.module.state_dict())
        else:
            theirs = copy.deepcopy(trial.oracle.replicas[1])
            change(theirs)
            trial.oracle.replicas[1].load_state_dict(theirs.state_dict())
        trial.change(lambda model, set_to_none=set_to_none: model.zero_grad(set_to_none))
        if options["gradient_as_bucket_view"] and not set_to_none and change is not move_to_other_memory:
            with raises_everywhere(RankMismatchError, "left.weight"):
                run(both_arms, trial.ddp, whole_numbers(2, 5, 3)[rank.rank])
        for turn in range(2):
            trial.step(both_arms, whole_numbers(2 + turn, 5, 3))


@on_two_ranks
def test_all_frozen_for_a_while(rank: RankContext) -> None:
    def everything(requires_grad: bool) -> Change:
        return lambda model: model.requires_grad_(requires_grad)

    def with_outside_leaf(model: nn.Module, x: Tensor) -> Tensor:
        return squares(model, x * torch.ones(3, requires_grad=True))

    trial = Trial(rank, lambda: nn.Linear(3, 2))
    for turn, requires_grad in enumerate((True, False, True, True)):
        trial.change(everything(requires_grad))
        trial.step(with_outside_leaf, whole_numbers(turn, 5, 3))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


@on_two_ranks
def test_staged_unfreezing(rank: RankContext) -> None:
    def stage(number: int) -> Change:
        return lambda model: [layer.requires_grad_(index >= 3 - number) for index, layer in enumerate(model.layers)]

    def first_stage() -> nn.Module:
        model = Layers()
        stage(0)(model)
        return model

    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, first_stage, **options)
        for number in range(4):
            trial.change(stage(number))
            for turn in range(2):
                trial.step(loss_itself, whole_numbers(turn, 5, 3, largest=1))


@on_two_ranks
def test_frozen_on_alternate_ranks_is_refused(rank: RankContext) -> None:
    trial = Trial(rank, Layers)
    trial.step(loss_itself, whole_numbers(1, 5, 3, largest=1))
    trial.module.layers[rank.rank].requires_grad_(False)
    with raises_everywhere(RankMismatchError, "layers.0.weight", "layers.1.weight"):
        run(loss_itself, trial.ddp, whole_numbers(2, 5, 3, largest=1)[rank.rank])
