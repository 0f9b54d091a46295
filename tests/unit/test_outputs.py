"""Tensors found in whatever a forward may return."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, deque, namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpcomm.outputs import find_tensors

T = torch.zeros(1)
U = torch.ones(1)


@dataclasses.dataclass
class Data:
    first: Any
    second: Any = None


@dataclasses.dataclass(slots=True)
class SlottedData:
    first: Any


class Slots:
    __slots__ = ("first", "never_set")

    def __init__(self, first: Any) -> None:
        self.first = first


class MoreSlots(Slots):
    __slots__ = "second"

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__(first)
        self.second = second


class Attributes(dict[str, Any]):
    """A dictionary with an attribute beside its entries."""

    def __init__(self, entry: Any, attribute: Any) -> None:
        super().__init__(entry=entry)
        self.attribute = attribute


class Raising:
    @property
    def value(self) -> Tensor:
        raise ValueError("a property is never asked")


Named = namedtuple("Named", ["first", "second"])


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (T, [T]),
        ([T, (U,)], [T, U]),
        ({"a": {"b": T}, "c": [U]}, [T, U]),
        (OrderedDict(a=T), [T]),
        (UserDict(a=T), [T]),
        (Named(T, U), [T, U]),
        (Data(T, [U]), [T, U]),
        (SlottedData(T), [T]),
        (Slots(T), [T]),
        (MoreSlots(T, U), [T, U]),
        (Attributes(T, U), [T, U]),
        (SimpleNamespace(a=T, b=SimpleNamespace(c=U)), [T, U]),
        ({T}, [T]),
        ([T, T, [T]], [T]),
        (None, []),
        ("text", []),
        (3, []),
        (Raising(), []),
        (iter([T]), []),
        (lambda: T, []),
        (nn.Linear(1, 1), []),
        (Data, []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_found(output: Any, expected: list[Tensor]) -> None:
    found = list(find_tensors(output))
    assert len(found) == len(expected)
    assert {id(tensor) for tensor in found} == {id(tensor) for tensor in expected}


def test_cycles_end() -> None:
    cycle: list[Any] = [T]
    cycle.append(cycle)
    data = Data(cycle)
    data.second = data
    assert list(find_tensors([cycle, data])) == [T]


def test_generators_are_not_consumed() -> None:
    generator = (tensor for tensor in [T])
    list(find_tensors([generator]))
    assert next(generator) is T


def test_a_large_object_is_not_walked_without_end() -> None:
    found = list(find_tensors([U, *([number] for number in range(1_000_000))]))
    assert len(found) <= 1


def test_the_order_of_the_search_does_not_matter_for_deque() -> None:
    assert list(find_tensors({"queue": deque([T])})) in ([T], [])


def test_the_search_changes_nothing() -> None:
    class Counting:
        reads = 0

        def __getattr__(self, name: str) -> Any:
            type(self).reads += 1
            raise AttributeError(name)

    counting = Counting()
    before = dict(counting.__dict__)
    list(find_tensors([counting]))
    assert counting.__dict__ == before
