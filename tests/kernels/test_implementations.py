"""How implementations are chosen for devices, and that those for CUDA get checked calls and the right addresses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from ddpcomm import implementations, native, ops
from ddpcomm.kernels import addresses

DEVICE = torch.device("cuda", 1)
current: list[torch.device] = []
"""The device that is made the current one, at present."""


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    current.append(device)
    yield
    current.pop()


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", on_device)


class Kernels:
    """Takes down what it is called with, which must be on the plan's device: Triton and events go by the current one."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> None:
            assert current == [DEVICE]
            self.calls.append((name, *arguments))

        return call


TENSORS: list[Tensor | None] = [
    torch.ones(3, dtype=torch.bfloat16),
    None,
    torch.ones(4),
    torch.ones(0, dtype=torch.float64),
    torch.ones(2, 3, dtype=torch.bfloat16).t(),
    None,
]
NUMELS, OFFSETS = [3, 5, 4, 0, 6, 1], [0, 256, 512, 768, 768, 1024]


def test_flatten_is_given_groups_of_addresses() -> None:
    kernels, out = Kernels(), torch.zeros(2048)
    plan = implementations.DeviceFlattenPlan(native.FlattenPlan(NUMELS, OFFSETS, 2048, torch.float32), kernels, DEVICE)
    plan.flatten(TENSORS, out, 0.5, False)
    plan.unflatten(out, TENSORS, 0.5, None)
    plan.norm(out, torch.zeros(2, dtype=torch.float64))
    groups = addresses.group(TENSORS, torch.float32)
    assert [dtype for dtype, _ in groups] == [torch.bfloat16, torch.float32]
    assert kernels.calls[0][0] == "flatten"
    assert kernels.calls[0][1] == groups
    assert kernels.calls[1][0] == "unflatten"
    assert kernels.calls[1][2] == groups
    nothing: list[Tensor | None] = [None] * 6
    plan.flatten(nothing, out, 0.5, False)
    assert kernels.calls[3][1] == addresses.group(nothing, torch.float32) == [(torch.float32, [0] * 6)]


def test_quantise_is_given_groups_of_addresses() -> None:
    kernels, codes, scales = Kernels(), torch.zeros(2048, dtype=torch.uint8), torch.zeros(8)
    plan = implementations.DeviceQuantisePlan(native.QuantisePlan(NUMELS, OFFSETS, 2048, "int8"), kernels, DEVICE)
    plan.quantise(TENSORS, codes, scales, 1.0, None)
    plan.dequantise(codes, scales, TENSORS, 1.0, True)
    assert kernels.calls[0][1] == kernels.calls[1][3] == addresses.group(TENSORS, torch.float32)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"tensors": TENSORS[:-1]}, ValueError),
        ({"tensors": [torch.ones(4), *TENSORS[1:]]}, ValueError),
        ({"tensors": [torch.ones(3, dtype=torch.int32), *TENSORS[1:]]}, TypeError),
        ({"tensors": [torch.ones(6)[::2], *TENSORS[1:]]}, ValueError),
        ({"tensors": ["abc", *TENSORS[1:]]}, TypeError),
        ({"out": torch.zeros(2047)}, ValueError),
        ({"out": torch.zeros(2048, dtype=torch.float64)}, TypeError),
    ],
)
def test_a_wrong_call_reaches_no_kernel(change: dict[str, Any], error: type[Exception]) -> None:
    kernels = Kernels()
    plan = implementations.DeviceFlattenPlan(native.FlattenPlan(NUMELS, OFFSETS, 2048, torch.float32), kernels, DEVICE)
    arguments = {"tensors": TENSORS, "out": torch.zeros(2048), **change}
    with pytest.raises(error):
        plan.flatten(arguments["tensors"], arguments["out"], 0.5, False)
    with pytest.raises(error):
        plan.unflatten(arguments["out"], arguments["tensors"], 0.5, None)
    if "out" in change:
        with pytest.raises(error):
            plan.norm(arguments["out"], torch.zeros(2, dtype=torch.float64))
    assert kernels.calls == []


def test_choice_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ops.implementations("norm", "cpu") == ("native", "torch")
    assert ops.implementations("quantise", "meta") == ("torch",)
    for installed, expected in (
        ({"triton", "cupy"}, ("triton", "cuda", "torch")),
        ({"cupy"}, ("cuda", "torch")),
        (set(), ("torch",)),
    ):
        monkeypatch.setattr(implementations, "find_spec", lambda package, installed=installed: package in installed or None)
        assert ops.implementations("flatten", torch.device("cuda", 1)) == expected
