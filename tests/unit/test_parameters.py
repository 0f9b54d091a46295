"""The parameters that are looked after, and the cheap look whether they are still the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ddpcomm.parameters import ParameterSet


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.tied = nn.Linear(3, 2)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.table = nn.Embedding(4, 2, sparse=True)
        self.plane = nn.Parameter(torch.zeros(3, dtype=torch.complex64))


def test_which() -> None:
    """Trainable ones, once each, by the first of their names."""
    found = ParameterSet(Model(), ignored=["tied.bias"], sparse=["first.bias"])
    assert found.names == ["plane", "first.weight", "first.bias", "table.weight"]
    assert [m.sparse for m in found.managed] == [False, False, True, True]


def test_sizes() -> None:
    by_name = {m.name: m for m in ParameterSet(Model()).managed}
    assert (by_name["first.weight"].size().numel, by_name["first.weight"].size().element_bytes) == (6, 4)
    assert (by_name["plane"].size().numel, by_name["plane"].size().element_bytes) == (6, 4)  # pairs of reals
    assert by_name["first.weight"].size(torch.bfloat16).element_bytes == 2
    assert by_name["plane"].size(torch.bfloat16).element_bytes == 4
    assert by_name["plane"].size().kind != by_name["first.weight"].size().kind


def unfreeze(model: Model) -> None:
    model.frozen.weight.requires_grad_(True)


def replace(model: Model) -> None:
    model.first.weight = nn.Parameter(model.first.weight.detach().clone())


def add_module(model: Model) -> None:
    model.extra = nn.Linear(1, 1)


def add_parameter(model: Model) -> None:
    model.first.register_parameter("scale", nn.Parameter(torch.zeros(1)))


def remove(model: Model) -> None:
    del model.table


def to_none(model: Model) -> None:
    model.first.bias = None


def load_by_assignment(model: Model) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


CHANGES = [unfreeze, replace, add_module, add_parameter, remove, to_none, load_by_assignment]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_are_noticed(change: Callable[[Model], None]) -> None:
    model = Model()
    parameters = ParameterSet(model)
    assert not parameters.replaced_or_unfrozen()
    change(model)
    assert parameters.replaced_or_unfrozen()
    assert not ParameterSet(model).replaced_or_unfrozen()


def test_what_is_no_change() -> None:
    model = Model()
    parameters = ParameterSet(model)
    model.load_state_dict(model.state_dict())
    model.train().eval()
    model.zero_grad()
    with torch.no_grad():
        model.first.weight += 1
    model.first.register_buffer("later", torch.zeros(1))
    assert not parameters.replaced_or_unfrozen()


def test_newcomers() -> None:
    """What has no place in the former layout: other objects, dtypes, shapes, strides, another kind of gradient."""
    model = Model()
    former = ParameterSet(model)
    assert ParameterSet(model).newcomers(former.managed) == []
    replace(model)
    model.table.double()
    model.plane.data = torch.zeros(5, dtype=torch.complex64)
    model.first.bias.requires_grad_(False)
    present = ParameterSet(model, sparse=["tied.bias"])
    assert {present.names[index] for index in present.newcomers(former.managed)} == {"first.weight", "tied.bias", "table.weight", "plane"}


def test_the_layout_remembers_how_a_parameter_was() -> None:
    model = Model()
    managed = next(m for m in ParameterSet(model).managed if m.name == "first.weight")
    model.double()
    model.first.weight.data = torch.zeros(2, 5, dtype=torch.float64).t()
    assert (managed.dtype, managed.shape, managed.strides) == (torch.float32, (2, 3), (3, 1))
    assert managed.bucket_dtype is torch.float32
