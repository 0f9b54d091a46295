"""What an implementation of the plans offers, and the implementations: each checks its calls before it writes anything.

"native" is checked in C++, "triton" and "cuda" by the same C++, which reads the tensors' addresses on the way; "torch" in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from ddpcomm import native
from ddpcomm.kernels import plain
from ddpcomm.plan_checks import CallCheck

_PACKAGES = {"triton": "triton", "cuda": "cupy"}
"""Of each implementation for CUDA, the best first, what must be installed."""


class FlattenImplementation(Protocol):
    """`statistics` is two float64 on the plan's device that are overwritten: sum of squares, and number of values that are not finite.

    Raises ValueError and TypeError.
    """

    def flatten(self, tensors: Sequence[Tensor | None], out: Tensor, scale: float, accumulate: bool) -> None: ...
    def unflatten(self, flat: Tensor, tensors: Sequence[Tensor | None], scale: float, statistics: Tensor | None) -> None: ...
    def norm(self, flat: Tensor, statistics: Tensor) -> None: ...


class QuantiseImplementation(Protocol):
    def quantise(self, tensors: Sequence[Tensor | None], codes: Tensor, scales: Tensor, scale: float, residual: Tensor | None) -> None: ...
    def dequantise(self, codes: Tensor, scales: Tensor, tensors: Sequence[Tensor | None], scale: float, accumulate: bool) -> None: ...


def names(device: torch.device) -> tuple[str, ...]:
    """The implementations that can run on `device`, the best first."""
    if device.type == "cpu":
        return ("native", "torch")
    if device.type != "cuda":
        return ("torch",)
    return (*(name for name, package in _PACKAGES.items() if find_spec(package) is not None), "torch")


def flatten_implementation(
    name: str, numels: Sequence[int], offsets: Sequence[int], total_numel: int, dtype: torch.dtype, device: torch.device
) -> FlattenImplementation:
    """
    Raises:
        ValueError: the layout can't be.
    """
    checked = native.FlattenPlan(numels, offsets, total_numel, dtype)
    if name == "native":
        return checked
    if name == "torch":
        return PlainFlattenPlan(numels, offsets, total_numel, dtype)
    kernels = import_module(f"ddpcomm.kernels.{name}_plans")
    return DeviceFlattenPlan(checked, kernels.FlattenPlan(numels, offsets, total_numel, dtype, device), device)


def quantise_implementation(
    name: str, numels: Sequence[int], offsets: Sequence[int], total_numel: int, code: str, device: torch.device
) -> QuantiseImplementation:
    """
    Raises:
        ValueError: the layout can't be.
    """
    checked = native.QuantisePlan(numels, offsets, total_numel, code)
    if name == "native":
        return checked
    if name == "torch":
        return PlainQuantisePlan(numels, offsets, total_numel, code)
    kernels = import_module(f"ddpcomm.kernels.{name}_plans")
    return DeviceQuantisePlan(checked, kernels.QuantisePlan(numels, offsets, total_numel, code, device), device)


class DeviceFlattenPlan:
    """Kernels of ddpcomm.kernels, behind the checks of the native plan, and on their device: Triton launches on whichever is current."""

    def __init__(self, checked: native.FlattenPlan, kernels: Any, device: torch.device) -> None:
        self._checked = checked
        self._kernels = kernels
        self._device = device

    def flatten(self, tensors: Sequence[Tensor | None], out: Tensor, scale: float, accumulate: bool) -> None:
        groups = self._checked.groups(tensors, out, scale, into_buffer=True, accumulate=accumulate)
        with torch.cuda.device(self._device):
            self._kernels.flatten(groups, out, scale, accumulate)

    def unflatten(self, flat: Tensor, tensors: Sequence[Tensor | None], scale: float, statistics: Tensor | None) -> None:
        groups = self._checked.groups(tensors, flat, scale, into_buffer=False, accumulate=False)
        with torch.cuda.device(self._device):
            self._kernels.unflatten(flat, groups, scale, statistics)

    def norm(self, flat: Tensor, statistics: Tensor) -> None:
        self._checked.check_buffer(flat)
        with torch.cuda.device(self._device):
            self._kernels.norm(flat, statistics)


class DeviceQuantisePlan:
    """As `DeviceFlattenPlan`."""

    def __init__(self, checked: native.QuantisePlan, kernels: Any, device: torch.device) -> None:
        self._checked = checked
        self._kernels = kernels
        self._device = device

    def quantise(self, tensors: Sequence[Tensor | None], codes: Tensor, scales: Tensor, scale: float, residual: Tensor | None) -> None:
        groups = self._checked.groups(tensors, codes, scale, into_buffer=True, accumulate=False)
        with torch.cuda.device(self._device):
            self._kernels.quantise(groups, codes, scales, scale, residual)

    def dequantise(self, codes: Tensor, scales: Tensor, tensors: Sequence[Tensor | None], scale: float, accumulate: bool) -> None:
        groups = self._checked.groups(tensors, codes, scale, into_buffer=False, accumulate=accumulate)
        with torch.cuda.device(self._device):
            self._kernels.dequantise(codes, scales, groups, scale, accumulate)


class PlainFlattenPlan:
    """Plain torch, behind checks in Python."""

    def __init__(self, numels: Sequence[int], offsets: Sequence[int], total_numel: int, dtype: torch.dtype) -> None:
        self._plain = plain.FlattenPlan(numels, offsets, total_numel, dtype)
        self._check = CallCheck(numels, offsets, total_numel, dtype)

    def flatten(self, tensors: Sequence[Tensor | None], out: Tensor, scale: float, accumulate: bool) -> None:
        self._check(tensors, out, scale, accumulate)
        self._plain.flatten(tensors, out, scale, accumulate)

    def unflatten(self, flat: Tensor, tensors: Sequence[Tensor | None], scale: float, statistics: Tensor | None) -> None:
        self._check(tensors, flat, scale, False)
        self._plain.unflatten(flat, tensors, scale, statistics)

    def norm(self, flat: Tensor, statistics: Tensor) -> None:
        self._check.buffer(flat)
        self._plain.norm(flat, statistics)


class PlainQuantisePlan:
    """Plain torch, behind checks in Python."""

    def __init__(self, numels: Sequence[int], offsets: Sequence[int], total_numel: int, code: str) -> None:
        self._plain = plain.QuantisePlan(numels, offsets, total_numel, code)
        self._check = CallCheck(numels, offsets, total_numel, torch.float32)

    def quantise(self, tensors: Sequence[Tensor | None], codes: Tensor, scales: Tensor, scale: float, residual: Tensor | None) -> None:
        self._check.tensors(tensors, codes.device, scale, False)
        self._plain.quantise(tensors, codes, scales, scale, residual)

    def dequantise(self, codes: Tensor, scales: Tensor, tensors: Sequence[Tensor | None], scale: float, accumulate: bool) -> None:
        self._check.tensors(tensors, codes.device, scale, accumulate)
        self._plain.dequantise(codes, scales, tensors, scale, accumulate)
