"""The single checks of `ddpcomm doctor`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from ddpcomm import _native, env, ops
from ddpcomm.cli.kernel_checks import problem_of_implementation, problem_of_instruction_set
from ddpcomm.comm.factory import environment_transport
from ddpcomm.comm.probe import try_transports
from ddpcomm.comm.segments import allocate, available_bytes
from ddpcomm.errors import DDPCommError

State = Literal["ok", "missing", "failed", ""]
_PACKAGES = ("ddpcomm", "torch", "numpy", "matplotlib")
_GPU_PACKAGES = (
    "triton",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "cuda-bindings",
    "nccl4py",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
_TRIED_BYTES = 64 << 20
_COMMAND_SECONDS = 30


@dataclass(frozen=True)
class Check:
    """What was looked at, how it is ("" for a plain fact), and whether training needs it."""

    area: str
    what: str
    state: State
    detail: str
    required: bool = False


def gpu_count() -> int:
    """How many GPUs torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _devices() -> list[torch.device]:
    return [torch.device("cpu"), *([torch.device("cuda", 0)] if gpu_count() else [])]


def versions() -> Iterator[Check]:
    """What is installed."""
    yield Check("installed", "python", "", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in _PACKAGES + _GPU_PACKAGES:
        version = _version(package)
        if version:
            yield Check("installed", package, "", version)
    absent = [package for package in _GPU_PACKAGES if not _version(package)]
    if gpu_count() and absent:
        yield Check("installed", "for GPUs", "missing", f"{', '.join(absent)}; pip install 'ddpcomm[cu13]' or [cu12] brings what fits")
    try:
        transport, implementation = environment_transport(), env.read().implementation
        yield Check("settings", "transport, implementation", "", f"{transport}, {implementation or 'best for the device'}")
        known = {name for device in _devices() for name in ops.implementations("flatten", device)}
        if implementation is not None and implementation not in known:
            detail = f"DDPCOMM_IMPLEMENTATION is {implementation!r}; here there are {', '.join(sorted(known))}"
            yield Check("settings", "implementation", "failed", detail, required=True)
    except DDPCommError as error:
        yield Check("settings", "environment variables", "failed", str(error), required=True)


def hardware() -> Iterator[Check]:
    """Processor and GPUs."""
    sets = ", ".join(_native.instruction_sets())
    yield Check("machine", "processor", "", f"{len(os.sched_getaffinity(0))} cores; instruction sets used here, best first: {sets}")
    for index in range(gpu_count()):
        facts = torch.cuda.get_device_properties(index)
        detail = f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, compute capability {facts.major}.{facts.minor}"
        yield Check("machine", f"GPU {index}", "", detail)
    if not gpu_count():
        yield Check("machine", "GPU", "missing", "torch sees none" + ("" if torch.version.cuda else "; it is built for the CPU alone"))


def shared_memory() -> Iterator[Check]:
    """Its limits, and whether a rank's segment can be made."""
    available = available_bytes()
    limit = "unknown" if available is None else f"{available / 2**30:.1f} GiB"
    yield Check("shared memory", "available to this container", "", limit)
    try:
        facts = os.statvfs("/dev/shm")
        detail = f"{facts.f_bavail * facts.f_frsize / 2**30:.1f} GiB free of {facts.f_blocks * facts.f_frsize / 2**30:.1f}"
        yield Check("shared memory", "/dev/shm", "", f"{detail} (NCCL's and torch's; ddpcomm's own segments are not there)")
    except OSError as error:
        yield Check("shared memory", "/dev/shm", "missing", str(error))
    try:
        arena = _native.SharedMemoryArena(_TRIED_BYTES)
        tensor = torch.frombuffer(allocate(arena, _TRIED_BYTES // 2), dtype=torch.uint8)
        works = bool((tensor.fill_(7) == 7).all())
        yield Check("shared memory", "segment", "ok" if works else "failed", f"{_TRIED_BYTES >> 20} MiB made, half of it written")
    except (OSError, RuntimeError) as error:  # RuntimeError is what a std::system_error becomes
        yield Check("shared memory", "segment", "failed", str(error))


def kernels() -> Iterator[Check]:
    """Every implementation of flatten and unflatten for every device here, and every instruction set, against plain torch."""
    for device in _devices():
        for name in ops.implementations("flatten", device):
            yield _kernel(f"{name} on {device.type}", problem_of_implementation(device, name))
    for instruction_set in _native.instruction_sets():
        yield _kernel(f"native, {instruction_set}", problem_of_instruction_set(instruction_set))
    if not gpu_count() and _version("triton"):
        yield Check("kernel", "triton on cuda", "missing", "installed; runs on a GPU alone")


def nccl() -> Iterator[Check]:
    """Whether libnccl can be loaded, and which it is."""
    try:
        from ddpcomm.comm.nccl_library import Nccl4pyLibrary, dotted

        yield Check("nccl", "libnccl", "ok", f"version {dotted(Nccl4pyLibrary().version)}, through nccl4py {_version('nccl4py')}")
    except (ImportError, OSError, DDPCommError) as error:
        state: State = "failed" if gpu_count() else "missing"
        yield Check("nccl", "libnccl", state, f"{error}; without it GPUs use torch's process groups")


def transports() -> Iterator[Check]:
    """Each one between two processes."""
    for transport, problem in try_transports(("process_group", "shared_memory", "hierarchical"), "cpu").items():
        detail = problem or "two CPU ranks, all-reduce and broadcast with right results"
        yield Check("transport", transport, "failed" if problem else "ok", detail, required=transport == "process_group")
    if not gpu_count():
        yield Check("transport", "nccl", "missing", "needs GPUs")
        return
    ranks = min(gpu_count(), 2)
    problem = try_transports(("nccl",), "cuda", ranks)["nccl"]
    detail = problem or f"{ranks} rank{'s' if ranks > 1 else ''} with a GPU each, all-reduce and broadcast with right results"
    yield Check("transport", "nccl", "failed" if problem else "ok", detail)


def gpu_topology() -> str:
    """How the GPUs are connected, by nvidia-smi; empty where there is none."""
    if not shutil.which("nvidia-smi"):
        return ""
    try:
        answer = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


def _kernel(what: str, problem: str) -> Check:
    return Check("kernel", what, "failed" if problem else "ok", problem or "flatten and unflatten as plain torch", required=True)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
