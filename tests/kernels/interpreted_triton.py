"""Every Triton kernel under Triton's interpreter. Run by test_triton.py, in a process of its own with TRITON_INTERPRET=1."""

from __future__ import annotations

import itertools
import os
import warnings

import pytest
import torch

from ddpcomm.kernels import triton_plans
from ddpcomm.kernels.addresses import group
from tests.kernels import device_cases
from tests.kernels.cases import FLOATS

assert os.environ.get("TRITON_INTERPRET") == "1", "run by test_triton.py"
warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")  # numpy's, where casts overflow as they should


# Both directions of every conversion by one of the two; each pair in both would take minutes.
PAIRS = list(itertools.product(device_cases.DTYPES, device_cases.DTYPES))


@pytest.mark.parametrize(("source", "result"), [(s, r) for s, r in PAIRS if s in FLOATS])
def test_flatten(source: torch.dtype, result: torch.dtype) -> None:
    device_cases.check_flatten(triton_plans.FlattenPlan, source, result, "cpu")


@pytest.mark.parametrize(("source", "result"), [(s, r) for s, r in PAIRS if s == r or s not in FLOATS or torch.float32 in (s, r)])
def test_unflatten(source: torch.dtype, result: torch.dtype) -> None:
    device_cases.check_unflatten(triton_plans.FlattenPlan, source, result, "cpu")


@pytest.mark.parametrize("dtype", FLOATS)
def test_norm(dtype: torch.dtype) -> None:
    device_cases.check_norm(triton_plans.FlattenPlan, dtype, "cpu")


@pytest.mark.parametrize("count", [1, 700])
def test_many_tensors(count: int) -> None:
    device_cases.check_many_tensors(triton_plans.FlattenPlan, "cpu", count)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128])
def test_bits_are_copied(dtype: torch.dtype) -> None:
    source = torch.arange(0, 256, dtype=torch.uint8).view(dtype) if dtype != torch.bool else torch.arange(256) % 3 == 0
    out = torch.zeros(source.numel() + 3, dtype=dtype)
    plan = triton_plans.FlattenPlan([source.numel()], [2], out.numel(), dtype, torch.device("cpu"))
    plan.flatten(group([source], dtype), out, 1.0, False)
    assert torch.equal(out[2:-1].view(torch.uint8), source.view(torch.uint8))
    restored = torch.zeros_like(source)
    plan.unflatten(out, group([restored], dtype), 1.0, None)
    assert torch.equal(restored.view(torch.uint8), source.view(torch.uint8))


def test_complex_is_scaled() -> None:
    source = torch.randn(5000, dtype=torch.complex64)
    out = torch.empty(5000, dtype=torch.complex64)
    triton_plans.FlattenPlan([5000], [0], 5000, source.dtype, torch.device("cpu")).flatten(group([source], source.dtype), out, 0.5, False)
    assert torch.equal(out, source * 0.5)


@pytest.mark.parametrize("code", ["int8", "float8_e4m3", "float8_e5m2"])
@pytest.mark.parametrize("source", FLOATS)
def test_quantise(code: str, source: torch.dtype) -> None:
    device_cases.check_quantise(triton_plans.QuantisePlan, code, source, "cpu")
