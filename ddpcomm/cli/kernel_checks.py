"""Whether a kernel of this machine gives the results of plain torch, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from ddpcomm import ops
from ddpcomm.errors import DDPCommError
from ddpcomm.kernels import reference
from ddpcomm.native import FlattenPlan

_SIZES = (1, 7, 64, 4097, 30_011)  # odd ones, so that vectors leave remainders
_OFFSETS = [sum(_SIZES[:index]) for index in range(len(_SIZES))]
_SCALE = 0.37


def problem_of_implementation(device: torch.device, name: str) -> str:
    """What is wrong with an implementation of flatten and unflatten on a device; "" if nothing is."""
    try:
        for dtype in (torch.float32, torch.bfloat16):
            tensors = _tensors(device)
            flat, expected = (torch.empty(sum(_SIZES), dtype=dtype, device=device) for _ in range(2))
            ops.flatten(tensors, flat, _SCALE, implementation=name)
            reference.flatten(tensors, _OFFSETS, expected, _SCALE)
            if not torch.equal(flat, expected):
                return f"flatten gives other {dtype} than plain torch"
            ops.unflatten(flat, tensors, implementation=name)
            parts = [flat[start : start + size].float() for start, size in zip(_OFFSETS, _SIZES, strict=True)]
            if not all(map(torch.equal, tensors, parts)):
                return f"unflatten gives other values than plain torch from {dtype}"
    except (DDPCommError, RuntimeError, ValueError, TypeError, ImportError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def problem_of_instruction_set(instruction_set: str) -> str:
    """The same for the native kernels of one instruction set."""
    tensors = _tensors(torch.device("cpu"))
    plan = FlattenPlan(_SIZES, _OFFSETS, sum(_SIZES), torch.bfloat16, instruction_set)
    flat, expected = (torch.empty(sum(_SIZES), dtype=torch.bfloat16) for _ in range(2))
    plan.flatten(tensors, flat, _SCALE, False)
    reference.flatten(tensors, _OFFSETS, expected, _SCALE)
    return "" if torch.equal(flat, expected) else "flatten gives other values than plain torch"


def _tensors(device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(device) for size in _SIZES]
