"""Finds the tensors in whatever a forward returned."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Set
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_LEAVES = (str, bytes, bytearray, int, float, complex, bool, type, torch.dtype, torch.device, torch.Size, ModuleType)
_MOST_OBJECTS = 100_000  # an output that holds on to a data set must not be walked without end


def find_tensors(output: Any) -> Iterator[Tensor]:
    """Every tensor in `output`, once: in containers, dataclasses and plain objects with attributes (`__dict__`, `__slots__`), at any depth.

    Modules and optimizers are not entered. The search never changes what it finds.
    """
    if isinstance(output, Tensor):
        yield output
        return
    seen: set[int] = set()
    pending = [output]
    while pending and len(seen) < _MOST_OBJECTS:
        value = pending.pop()
        if value is None or isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        else:
            pending.extend(_children(value))


def _children(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value.values(), *_attributes(value)]
    if isinstance(value, (list, tuple, Set)):
        return [*value, *_attributes(value)]
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)) or callable(value):
        return []
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)] + _attributes(value)
    if type(value).__name__ == "PyRRef" or type(value).__name__ == "RRef":
        return [value.local_value()] if value.is_owner() else []
    return _attributes(value)


def _attributes(value: Any) -> list[Any]:
    found = list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        found += [getattr(value, name, None) for name in ((slots,) if isinstance(slots, str) else slots)]
    return found
