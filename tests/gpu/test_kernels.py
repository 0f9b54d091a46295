"""The Triton and CUDA kernels on a GPU: bit for bit as kernels/reference.py, and as fast as the memory.

What is measured is written as JSON rows to runs/gpu and printed; a share of the copy bandwidth below the target is reported, not failed:
a GPU that others use proves nothing.
"""

from __future__ import annotations

import itertools
from importlib import import_module
from pathlib import Path

import pytest
import torch

from bench import kernels
from bench.rows import read_rows
from ddpcomm import ops
from tests.kernels import device_cases
from tests.kernels.cases import FLOATS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

OUTPUT = Path("runs/gpu")
IMPLEMENTATIONS = ("triton", "cuda")
TARGET_SHARE = 0.92
TARGET_LAUNCH_SECONDS = 15e-6


def flatten_plan(name: str) -> device_cases.FlattenFactory:
    if name not in ops.implementations("flatten", "cuda"):
        pytest.skip(f"{name} is not installed")
    return import_module(f"ddpcomm.kernels.{name}_plans").FlattenPlan


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize(("source", "result"), list(itertools.product(device_cases.DTYPES, device_cases.DTYPES)))
def test_flatten_and_unflatten(source: torch.dtype, result: torch.dtype, name: str) -> None:
    device_cases.check_flatten(flatten_plan(name), source, result, "cuda")
    device_cases.check_unflatten(flatten_plan(name), source, result, "cuda")


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_norm(name: str) -> None:
    for dtype in FLOATS:
        device_cases.check_norm(flatten_plan(name), dtype, "cuda")


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("count", [1, 700, 5000])
def test_many_tensors(count: int, name: str) -> None:
    device_cases.check_many_tensors(flatten_plan(name), "cuda", count)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("code", ["int8", "float8_e4m3", "float8_e5m2"])
def test_quantise(code: str, name: str) -> None:
    flatten_plan(name)  # skips
    plan = import_module(f"ddpcomm.kernels.{name}_plans").QuantisePlan
    for source in FLOATS:
        device_cases.check_quantise(plan, code, source, "cuda")


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_changing_addresses_do_not_overtake_a_launch(name: str) -> None:
    """Many calls in a row with other tensors each time: no call may see the next one's addresses."""
    if name not in ops.implementations("flatten", "cuda"):
        pytest.skip(f"{name} is not installed")
    sets = [[torch.full((4096,), float(turn), device="cuda") for _ in range(64)] for turn in range(20)]
    plan = ops.FlattenPlan([4096] * 64, [4096 * i for i in range(64)], 4096 * 64, torch.float32, "cuda", name)
    outs = [torch.empty(4096 * 64, device="cuda") for _ in sets]
    for tensors, out in zip(sets, outs, strict=True):
        plan.flatten(tensors, out)
    for turn, out in enumerate(outs):
        assert (out == turn).all()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shapes", ["resnet50,tiny10000", "bert_large,llama7b_block", "gpt2_xl"])
def test_speed_is_reported(shapes: str, dtype: str) -> None:
    if torch.cuda.mem_get_info()[0] < 40 << 30 and "gpt2_xl" in shapes:
        pytest.skip("GPT-2 XL needs 40 GB")
    output = OUTPUT / f"kernels-{shapes.split(',')[0]}-{dtype}"
    kernels.main(
        ["flatten", "unflatten", "unflatten_norm", "--shapes", shapes, "--dtype", dtype, "--repeats", "20", "--output", str(output)]
    )
    for row in read_rows(output / "kernels.jsonl"):
        if not row.subject.startswith("ddpcomm") or row.subject == "ddpcomm torch":
            continue
        if row.quantity == "time" and row.sizes["bytes_moved"] >= 50 << 20 and row.details["share_of_copy"] < TARGET_SHARE:
            print(f"{row.case} by {row.subject}: {row.details['share_of_copy']:.2f} of the copy bandwidth, target {TARGET_SHARE}")
        if row.quantity == "launch" and row.p50 > TARGET_LAUNCH_SECONDS:
            print(f"{row.case} by {row.subject}: a launch takes the CPU {row.p50 * 1e6:.0f} us, target {TARGET_LAUNCH_SECONDS * 1e6:.0f}")
