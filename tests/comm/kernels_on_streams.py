"""Writes down every kernel that torch and this package would launch, where CPU tensors stand for CUDA ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddpcomm.ops import FlattenPlan
from tests.comm.recorder import Recorder


class KernelMode(TorchDispatchMode):
    """Puts an entry for each operation of torch's on the current stream; operations that only make views are none."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        result = function(*arguments, **keywords)
        schema = function._schema
        if any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns):
            return result
        given = [*zip(schema.arguments, arguments, strict=False), *((a, keywords[a.name]) for a in schema.arguments if a.name in keywords)]
        reads, writes = [], [leaf for leaf in tree_leaves(result) if _in_memory(leaf)]
        for argument, value in given:
            leaves = [leaf for leaf in tree_leaves(value) if _in_memory(leaf)]
            reads += leaves
            if argument.alias_info is not None and argument.alias_info.is_write:
                writes += leaves
        self._recorder.kernel(str(function), reads=reads, writes=writes)
        return result


def _in_memory(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.device.type == "cpu"


@contextlib.contextmanager
def kernels_written_down(recorder: Recorder) -> Iterator[None]:
    """Within it, torch's operations, flatten, unflatten, and copies to the host are in the trace."""
    flatten, unflatten = FlattenPlan.flatten, FlattenPlan.unflatten

    def recorded_flatten(self: FlattenPlan, tensors: Any, out: Tensor, scale: float = 1.0) -> None:
        recorder.kernel("flatten", reads=[tensor for tensor in tensors if tensor is not None], writes=[out])
        flatten(self, tensors, out, scale)

    def recorded_unflatten(self: FlattenPlan, flat: Tensor, tensors: Any, scale: float = 1.0, statistics: Tensor | None = None) -> None:
        written = [tensor for tensor in [*tensors, statistics] if tensor is not None]
        recorder.kernel("unflatten", reads=[flat], writes=written)
        unflatten(self, flat, tensors, scale, statistics=statistics)

    with pytest.MonkeyPatch.context() as patch, KernelMode(recorder):
        patch.setattr(FlattenPlan, "flatten", recorded_flatten)
        patch.setattr(FlattenPlan, "unflatten", recorded_unflatten)
        for name in ("tolist", "numpy"):
            patch.setattr(Tensor, name, _copying_to_the_host(recorder, getattr(Tensor, name)))
        yield


def _copying_to_the_host(recorder: Recorder, method: Callable[..., Any]) -> Callable[..., Any]:
    def recorded(self: Tensor, *arguments: Any, **keywords: Any) -> Any:
        recorder.kernel("copy to the host", reads=[self])
        return method(self, *arguments, **keywords)

    return recorded
