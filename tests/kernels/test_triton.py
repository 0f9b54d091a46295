"""The Triton kernels: run under the interpreter, and compiled for GPUs that are not here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed: pip install ddpcomm[triton]")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from ddpcomm.kernels import flatten, norm, quantise, unflatten  # noqa: E402
from ddpcomm.kernels.numbers import element_of, format_of  # noqa: E402
from ddpcomm.kernels.tiles import COLUMNS, TILE  # noqa: E402

TARGETS = (80, 90, 100)
REGISTERS = 64
"""At most: with 256 threads a program, four programs fit a multiprocessor of 65,536 registers."""
QUANTISE_REGISTERS = 80
"""Three programs."""


@pytest.mark.timeout(300)
def test_under_the_interpreter() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=280", "tests/kernels/interpreted_triton.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=290, check=False)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]


# ---- compiled -------------------------------------------------------------------------------------------------------


def compiled(
    kernel: Any, pointers: list[str], constants: dict[str, Any], target: int, scalars: tuple[str, ...] = (), **options: Any
) -> Any:
    """`kernel` compiled with every pointer aligned to 16 bytes. pointers: "name:type" in the kernel's order."""
    signature = dict(pointer.split(":") for pointer in pointers)
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    signature.update(dict.fromkeys(constants, "constexpr"))
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options={**flatten.OPTIONS, **options})


def widest(ptx: str, access: str) -> int:
    """Bits of the widest access of this kind ("ld.global" or "st.global")."""
    bits = [0]
    for match in re.finditer(re.escape(access) + r"(?:\.\w+)*?(?:\.v(\d))?\.[bfus](\d+)", ptx):
        bits.append(int(match[1] or 1) * int(match[2]))
    return max(bits)


def check_ptx(kernel: Any, *, loads: bool = True, stores: bool = True) -> None:
    ptx = kernel.asm["ptx"]
    if loads:
        assert widest(ptx, "ld.global") == 128, "no 128-bit load on the aligned path"
    if stores:
        assert widest(ptx, "st.global") == 128, "no 128-bit store on the aligned path"
    assert ".local" not in ptx, "local memory: registers are spilled or an array is indexed"
    assert "ld.local" not in ptx


def check_registers(kernel: Any, target: int, tmp_path: Path, limit: int = REGISTERS) -> None:
    from triton.backends.nvidia.compiler import get_ptxas

    assembler = get_ptxas(target)
    path = getattr(assembler, "path", None) or assembler[0]
    (tmp_path / "kernel.ptx").write_text(kernel.asm["ptx"])
    name = re.search(r"\.target (sm_\w+)", kernel.asm["ptx"])
    assert name is not None
    command = [path, "-v", f"--gpu-name={name[1]}", str(tmp_path / "kernel.ptx"), "-o", str(tmp_path / "kernel.cubin")]
    report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stderr
    used = re.search(r"Used (\d+) registers", report)
    assert used is not None, report
    assert int(used[1]) <= limit, report
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert spills is not None, report
    assert spills.groups() == ("0", "0"), report


PAIRS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float32, torch.float8_e4m3fn),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("source", "result"), PAIRS)
def test_flatten(source: torch.dtype, result: torch.dtype, target: int, tmp_path: Path) -> None:
    pointers = ["addresses:*i64", "tiles:*i64", "factor_pointer:*fp64", "out:*u8"]
    for scale in (1.0, 0.5):
        kernel = compiled(flatten.flatten_kernel, pointers, flatten.conversion(source, result, scale, False), target)
        check_ptx(kernel)
        check_registers(kernel, target, tmp_path)


def test_a_product_is_rounded_before_it_is_added() -> None:
    pointers = ["addresses:*i64", "tiles:*i64", "factor_pointer:*fp64", "out:*u8"]
    constants = flatten.conversion(torch.float32, torch.float32, 0.5, True)
    assert "fma." not in compiled(flatten.flatten_kernel, pointers, constants, 90).asm["ptx"]
    assert "fma." in compiled(flatten.flatten_kernel, pointers, constants, 90, enable_fp_fusion=True).asm["ptx"], "it can be told"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("source", "result"), PAIRS[:-1])
def test_unflatten_with_norm(source: torch.dtype, result: torch.dtype, target: int, tmp_path: Path) -> None:
    pointers = ["addresses:*i64", "tiles:*i64", "factor_pointer:*fp64", "flat:*u8", "partials:*fp64"]
    constants = {**flatten.conversion(source, result, 1.0, False, copy_bits=False), "NORM": True}
    kernel = compiled(unflatten.unflatten_kernel, pointers, constants, target)
    check_ptx(kernel)
    check_registers(kernel, target, tmp_path)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm(dtype: torch.dtype, target: int, tmp_path: Path) -> None:
    constants = {
        "FORMAT": format_of(dtype),
        "ELEMENT": element_of(dtype, format_of(dtype)),
        "BYTES": dtype.itemsize,
        "COMPUTE": tl.float32,
        "COLUMNS": COLUMNS,
        "TILE": TILE,
    }
    kernel = compiled(norm.norm_kernel, ["tiles:*i64", "flat:*u8", "partials:*fp64"], constants, target)
    check_ptx(kernel, stores=False)
    check_registers(kernel, target, tmp_path)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("code", ["int8", "float8_e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantise(dtype: torch.dtype, code: str, target: int, tmp_path: Path) -> None:
    kind = format_of(dtype)
    shared = {"CODE": code, "COLUMNS": COLUMNS, "TILE": TILE, "BLOCK": 256}
    tables = ["addresses:*i64", "tiles:*i64", "factor_pointer:*fp64"]
    source = {"SOURCE": kind, "SOURCE_ELEMENT": element_of(dtype, kind), "SOURCE_BYTES": dtype.itemsize, "FEEDBACK": True}
    pointers = [*tables, "residual:*fp32", "codes:*u8", "scales:*fp32", "reciprocal_of_largest_pointer:*fp32"]
    kernel = compiled(quantise.quantise_kernel, pointers, {**source, **shared}, target)
    check_ptx(kernel)
    check_registers(kernel, target, tmp_path, QUANTISE_REGISTERS)

    result = {"RESULT": kind, "RESULT_ELEMENT": element_of(dtype, kind), "RESULT_BYTES": dtype.itemsize, "ACCUMULATE": False}
    kernel = compiled(quantise.dequantise_kernel, [*tables, "codes:*u8", "scales:*fp32"], {**result, **shared}, target)
    check_ptx(kernel, loads=False)
    check_registers(kernel, target, tmp_path, QUANTISE_REGISTERS)


# ---- the check itself -----------------------------------------------------------------------------------------------


@triton.jit
def naive_kernel(addresses, out, TILE: tl.constexpr):
    """A copy from an address in a table, without a word about its alignment."""
    source = tl.load(addresses).to(tl.pointer_type(tl.float32))
    places = tl.arange(0, TILE)
    tl.store(out + places, tl.load(source + places))


def test_the_check_catches_a_naive_kernel() -> None:
    kernel = compiled(naive_kernel, ["addresses:*i64", "out:*fp32"], {"TILE": TILE}, 90)
    with pytest.raises(AssertionError, match="no 128-bit load"):
        check_ptx(kernel)
