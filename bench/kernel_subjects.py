"""What bench.kernels compares: the implementations of ddpcomm.ops, and how the same is done with torch alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ddpcomm import ops
from ddpcomm.kernels import reference

ALIGNMENT = 64
"""Bytes: of each tensor's place in the buffer, as ddpcomm.layout has it."""


@dataclass(frozen=True)
class Problem:
    """Tensors, a buffer, and a factor. Whoever changes the tensors or the buffer writes the same each time."""

    sizes: list[int]
    dtype: torch.dtype
    buffer_dtype: torch.dtype
    scale: float
    device: torch.device

    @cached_property
    def tensors(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(size, generator=generator).to(self.dtype).to(self.device) for size in self.sizes]

    @cached_property
    def offsets(self) -> list[int]:
        unit = max(1, ALIGNMENT // self.buffer_dtype.itemsize)
        offsets, end = [], 0
        for size in self.sizes:
            offsets.append(end)
            end += -(-size // unit) * unit
        return offsets

    @cached_property
    def buffer(self) -> Tensor:
        buffer = torch.zeros(self.offsets[-1] + self.sizes[-1], dtype=self.buffer_dtype, device=self.device)
        reference.flatten(self.tensors, self.offsets, buffer, self.scale)
        return buffer

    @cached_property
    def packed(self) -> Tensor:
        return torch.empty(sum(self.sizes), dtype=self.buffer_dtype, device=self.device)

    @cached_property
    def views(self) -> list[Tensor]:
        return [self.buffer[offset : offset + size] for offset, size in zip(self.offsets, self.sizes, strict=True)]

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    def bytes_moved(self, operation: str) -> int:
        """What must be read and written once."""
        tensors, buffer = self.numel * self.dtype.itemsize, self.numel * self.buffer_dtype.itemsize
        codes = self.numel + self.numel // 64  # a float32 for each 256
        by_operation = {
            "flatten": tensors + buffer,
            "unflatten": tensors + buffer,
            "unflatten_norm": tensors + buffer,
            "norm": buffer,
            "quantise": tensors + 8 * self.numel + codes,  # the residual is read and written
            "dequantise": codes + tensors,
        }
        return by_operation[operation]


Call = Callable[[], object]
OPERATIONS = ("flatten", "unflatten", "unflatten_norm", "norm", "quantise", "dequantise")


def implementation_call(operation: str, name: str, problem: Problem) -> Call:
    """One call of an implementation of ddpcomm.ops, with its plan made beforehand as the reducer does."""
    sizes, device = problem.sizes, problem.device
    if operation in ("quantise", "dequantise"):
        return _quantise_call(operation, name, problem)
    plan = ops.FlattenPlan(sizes, problem.offsets, problem.buffer.numel(), problem.buffer_dtype, device, name)
    statistics = torch.empty(2, dtype=torch.float64, device=device)
    tensors, buffer, scale = problem.tensors, problem.buffer, problem.scale
    calls: dict[str, Call] = {
        "flatten": lambda: plan.flatten(tensors, buffer, scale),
        "unflatten": lambda: plan.unflatten(buffer, tensors, 1.0 / scale),
        "unflatten_norm": lambda: plan.unflatten(buffer, tensors, 1.0 / scale, statistics),
        "norm": lambda: plan.norm(buffer, statistics),
    }
    return calls[operation]


def _quantise_call(operation: str, name: str, problem: Problem) -> Call:
    offsets, end = [], 0
    for size in problem.sizes:
        offsets.append(end)
        end += -(-size // 256) * 256
    plan = ops.QuantisePlan(problem.sizes, offsets, end, problem.device, "int8", name)
    codes = torch.zeros(end, dtype=torch.uint8, device=problem.device)
    scales = torch.zeros(end // 256, device=problem.device)
    residual = torch.zeros(end, device=problem.device)
    if operation == "quantise":
        return lambda: plan.quantise(problem.tensors, codes, scales, 1.0, residual)
    return lambda: plan.dequantise(codes, scales, problem.tensors)


def rivals(operation: str, problem: Problem) -> dict[str, Call]:
    """The same with torch alone, as DDP and other libraries do it."""
    tensors, views, scale = problem.tensors, problem.views, problem.scale
    same = problem.dtype == problem.buffer_dtype

    def each() -> None:
        for tensor, view in zip(tensors, views, strict=True):
            torch.mul(tensor, scale, out=view)

    def each_back() -> None:
        for tensor, view in zip(tensors, views, strict=True):
            torch.mul(view, 1.0 / scale, out=tensor)

    def foreach() -> None:
        torch._foreach_copy_(views, tensors)
        torch._foreach_mul_(views, scale)

    def foreach_back() -> None:
        torch._foreach_copy_(tensors, views)
        torch._foreach_mul_(tensors, 1.0 / scale)

    def cat() -> None:
        torch.cat(tensors, out=problem.packed).mul_(scale)

    def flatten_dense() -> Tensor:
        return _flatten_dense_tensors(tensors).mul_(scale)

    def unflatten_dense() -> None:
        torch._foreach_copy_(tensors, _unflatten_dense_tensors(problem.packed, tensors))

    def vector_norm() -> Tensor:
        return torch.linalg.vector_norm(problem.buffer)

    def norms() -> Tensor:
        foreach_back()
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))

    found: dict[str, dict[str, Call]] = {
        "flatten": {"torch.mul each": each, "torch._foreach": foreach},
        "unflatten": {"torch.mul each": each_back, "torch._foreach": foreach_back},
        "unflatten_norm": {"torch._foreach, then norms": norms},
        "norm": {"torch.linalg.vector_norm": vector_norm},
    }
    if same and operation == "flatten":
        found["flatten"].update({"torch.cat": cat, "_flatten_dense_tensors": flatten_dense})
    if same and operation == "unflatten":
        found["unflatten"]["_unflatten_dense_tensors"] = unflatten_dense
    apex = _apex(operation, problem)
    return {**found.get(operation, {}), **({"apex": apex} if apex else {})}


def _apex(operation: str, problem: Problem) -> Call | None:
    """apex's multi_tensor_scale, where it is installed and there is a GPU."""
    if operation not in ("flatten", "unflatten") or problem.device.type != "cuda":
        return None
    try:
        import amp_C
        from apex.multi_tensor_apply import multi_tensor_applier
    except ImportError:
        return None
    overflow = torch.zeros(1, dtype=torch.int32, device=problem.device)
    into = [problem.tensors, problem.views] if operation == "flatten" else [problem.views, problem.tensors]
    factor = problem.scale if operation == "flatten" else 1.0 / problem.scale
    return lambda: multi_tensor_applier(amp_C.multi_tensor_scale, overflow, into, factor)
