"""The CUDA kernels: the same sources run as host C++, and compiled for GPUs that are not here."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from ddpcomm.kernels import cuda_launch, cuda_plans
from tests.kernels import device_cases
from tests.kernels.cases import FLOATS
from tests.kernels.cuda_host import HostLauncher

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc: install the CUDA toolkit")

# Every format on both sides, every pair that gradients meet.
PAIRS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float64, torch.bfloat16),
    (torch.float16, torch.float64),
    (torch.float32, torch.float8_e4m3fn),
    (torch.bfloat16, torch.float8_e5m2),
    (torch.float8_e4m3fn, torch.float32),
    (torch.float8_e5m2, torch.bfloat16),
]


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostLauncher]:
    return HostLauncher(tmp_path_factory.mktemp("cuda"))


@needs_compiler
@pytest.mark.parametrize(("source", "result"), PAIRS)
def test_flatten_on_the_host(source: torch.dtype, result: torch.dtype, launcher: HostLauncher) -> None:
    device_cases.check_flatten(partial(cuda_plans.FlattenPlan, launcher=launcher), source, result, "cpu")


@needs_compiler
@pytest.mark.parametrize(("source", "result"), PAIRS)
def test_unflatten_on_the_host(source: torch.dtype, result: torch.dtype, launcher: HostLauncher) -> None:
    device_cases.check_unflatten(partial(cuda_plans.FlattenPlan, launcher=launcher), source, result, "cpu")


@needs_compiler
@pytest.mark.parametrize("dtype", FLOATS)
def test_norm_on_the_host(dtype: torch.dtype, launcher: HostLauncher) -> None:
    device_cases.check_norm(partial(cuda_plans.FlattenPlan, launcher=launcher), dtype, "cpu")


@needs_compiler
@pytest.mark.parametrize("count", [1, 700, 5000])  # addresses: 4 KB and 32 KB of argument, and a table
def test_many_tensors_on_the_host(count: int, launcher: HostLauncher) -> None:
    device_cases.check_many_tensors(partial(cuda_plans.FlattenPlan, launcher=launcher), "cpu", count)


@needs_compiler
@pytest.mark.parametrize(
    ("code", "source"), [("int8", d) for d in FLOATS] + [("float8_e4m3", torch.float32), ("float8_e5m2", torch.bfloat16)]
)
def test_quantise_on_the_host(code: str, source: torch.dtype, launcher: HostLauncher) -> None:
    device_cases.check_quantise(partial(cuda_plans.QuantisePlan, launcher=launcher), code, source, "cpu")


# ---- compiled -------------------------------------------------------------------------------------------------------

REGISTERS = 64
"""At most: with 256 threads a block, four blocks fit a multiprocessor of 65,536 registers."""

CONVERSION = {"COPY": 0, "ACCUMULATE": 0, "POINTERS": 480}
KERNELS = {
    "flatten float32": ("flatten.cu", {**CONVERSION, "SOURCE": "Float32", "RESULT": "Float32"}),
    "flatten to bfloat16": ("flatten.cu", {**CONVERSION, "SOURCE": "Float32", "RESULT": "BFloat16"}),
    "flatten copy": ("flatten.cu", {**CONVERSION, "SOURCE": "Bits16", "RESULT": "Bits16", "COPY": 1}),
    "flatten to float8": ("flatten.cu", {**CONVERSION, "SOURCE": "BFloat16", "RESULT": "Float8E4M3"}),
    "flatten accumulate, 32 KB": (
        "flatten.cu",
        {**CONVERSION, "SOURCE": "BFloat16", "RESULT": "Float32", "ACCUMULATE": 1, "POINTERS": 4000},
    ),
    "unflatten": ("unflatten.cu", {**CONVERSION, "SOURCE": "BFloat16", "RESULT": "Float32", "NORM": 0}),
    "unflatten with norm": ("unflatten.cu", {**CONVERSION, "SOURCE": "Float32", "RESULT": "BFloat16", "NORM": 1, "POINTERS": 0}),
    "norm": ("norm.cu", {"SOURCE": "Float16", "POINTERS": 0}),
    "quantise": ("quantise.cu", {"SOURCE": "Float32", "CODE": "Int8", "FEEDBACK": 1, "POINTERS": 480}),
    "quantise to float8": ("quantise.cu", {"SOURCE": "Float32", "CODE": "Float8E4M3", "FEEDBACK": 1, "POINTERS": 480}),
    "dequantise": ("dequantise.cu", {"RESULT": "Float32", "CODE": "Int8", "ACCUMULATE": 0, "POINTERS": 480}),
}


def compile_ptx(text: str, macros: dict[str, str | int], target: int, directory: Path) -> tuple[str, str]:
    """The PTX, and what ptxas says of it. CuPy adds -ftz=true to the options of whoever compiles through it."""
    (directory / "kernel.cu").write_text(text)
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    options = [*cuda_launch.OPTIONS, "-ftz=true", f"-arch=sm_{target}", "-Xptxas", "-v", "--keep", f"--keep-dir={directory}", "-cubin"]
    command = ["nvcc", *options, *defines, "kernel.cu", "-o", "kernel.cubin"]
    run = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return (directory / "kernel.ptx").read_text(), run.stderr


def check_compiled(ptx: str, report: str, *, loads: bool = True, stores: bool = True) -> None:
    if loads:
        assert re.search(r"ld\.global(\.\w+)*\.v4\.[bfus]32", ptx), "no 128-bit load on the aligned path"
    if stores:
        assert re.search(r"st\.global(\.\w+)*\.v4\.[bfus]32", ptx), "no 128-bit store on the aligned path"
    flushed = re.findall(r"(?:(?:add|sub|mul|fma)\.rn|cvt(?:\.rn)?)\.ftz\S*", ptx)
    assert not flushed, f"subnormal numbers are taken for zeros by {flushed}"
    for used in re.findall(r"Used (\d+) registers", report):
        assert int(used) <= REGISTERS, report
    assert re.findall(r"(\d+) bytes spill", report), report
    assert not re.search(r"[1-9]\d* bytes (stack frame|spill)", report), f"local memory is used:\n{report}"


@needs_nvcc
@pytest.mark.parametrize("target", [80, 90, 100])
@pytest.mark.parametrize("name", KERNELS)
def test_compiled(name: str, target: int, tmp_path: Path) -> None:
    file, macros = KERNELS[name]
    ptx, report = compile_ptx(cuda_launch.source(file), macros, target, tmp_path)
    check_compiled(ptx, report, loads=file != "dequantise.cu", stores=file != "norm.cu")  # 4 codes are 32 bits; a norm writes none


@needs_nvcc
def test_the_check_catches_a_naive_kernel(tmp_path: Path) -> None:
    naive = """extern "C" __global__ void copy(const float* from, float* to, int count) {
        for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i] * 0.5f;
    }"""
    with pytest.raises(AssertionError, match="no 128-bit load"):
        check_compiled(*compile_ptx(naive, {}, 90, tmp_path))
    flushing = """extern "C" __global__ void scale(const float4* from, float4* to) { to->x = from->x * 0.5f; }"""
    with pytest.raises(AssertionError, match=r"taken for zeros by \['mul.rn.ftz.f32'\]"):
        check_compiled(*compile_ptx(flushing, {}, 90, tmp_path), loads=False, stores=False)
    spilling = """extern "C" __global__ void shuffle(const uint4* from, uint4* to, int n) {
        unsigned values[64];
        for (int i = 0; i < 16; ++i) *reinterpret_cast<uint4*>(values + 4 * i) = from[i];
        for (int i = 0; i < n; ++i) values[values[i] % 64] += i;
        for (int i = 0; i < 16; ++i) to[i] = *reinterpret_cast<uint4*>(values + 4 * i);
    }"""
    with pytest.raises(AssertionError, match="local memory"):
        check_compiled(*compile_ptx(spilling, {}, 90, tmp_path))


@pytest.mark.filterwarnings("error")
def test_cupy_is_given_torch_s_stream_without_a_warning() -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    for number in (0, 0x57):
        assert cuda_launch._stream(number, 0).ptr == number


def test_every_source_is_whole_once_its_includes_are_in_place() -> None:
    for file in ("flatten.cu", "unflatten.cu", "norm.cu", "quantise.cu", "dequantise.cu"):
        text = cuda_launch.source(file)
        assert "#include" not in text, "NVRTC has no files to include"
        assert text.count("struct Tile {") == 1


def test_conversions_cover_what_the_plans_accept() -> None:
    for source, result in itertools.product(cuda_plans._TYPES, cuda_plans._TYPES):
        macros = cuda_plans._conversion(source, result, 0.5, False)
        assert macros["COPY"] == 0
        assert macros["SOURCE"] in cuda_launch.source("flatten.cu")
    for dtype in (torch.int8, torch.bool, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128):
        assert str(cuda_plans._conversion(dtype, dtype, 1.0, False)["SOURCE"]).startswith("Bits")
