"""The row that every benchmark writes, one JSON object a line.

A row holds one subject's distribution of one quantity in one case, and everything that it may depend on: versions, machine, commit.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch

SCHEMA = 1
PACKAGES = ("ddpcomm", "torch", "numpy", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "mpi4py")


@cache
def machine() -> dict[str, Any]:
    """What speeds depend on. Rows of different machines must not be compared."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


@cache
def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@cache
def commit() -> str:
    """Of the working tree, with a + where it holds changes of its own; "unknown" outside of a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return "unknown"
    return answer.stdout.strip() or "unknown"


@dataclass(frozen=True)
class Row:
    """Times are in seconds, sizes in bytes, rates in bytes per second: `unit` says which.

    Args:
        bench: the script, by its name.
        case: what was worked on, such as a model or a list of shapes.
        subject: what did the work: ddpcomm or a rival, with its options.
        quantity: what was measured, such as "step" or "overhead".
        ranks: how many took part.
        dtype: of the tensors.
        sizes: such as {"parameters": 8_400_000, "bytes": 33_600_000, "tensors": 8}.
        count: how many samples the percentiles are of.
        measured: False for what was computed from a model and not observed.
        details: whatever else the case needs.
    """

    bench: str
    case: str
    subject: str
    quantity: str
    unit: str
    ranks: int
    dtype: str
    sizes: Mapping[str, int]
    count: int
    p20: float
    p50: float
    p80: float
    p99: float
    measured: bool = True
    details: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    machine: Mapping[str, Any] = field(default_factory=machine)
    versions: Mapping[str, str] = field(default_factory=versions)
    commit: str = field(default_factory=commit)
    time: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    schema: int = SCHEMA


class Percentiles(TypedDict):
    """Of a row."""

    count: int
    p20: float
    p50: float
    p80: float
    p99: float


def percentiles(samples: Sequence[float]) -> Percentiles:
    """Linearly interpolated."""
    p20, p50, p80, p99 = map(float, np.percentile(np.asarray(samples, dtype=np.float64), [20, 50, 80, 99]))
    return {"count": len(samples), "p20": p20, "p50": p50, "p80": p80, "p99": p99}


def write_rows(rows: Iterable[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


def read_rows(path: Path) -> list[Row]:
    """
    Raises:
        ValueError: a row of another schema.
    """
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    for row in rows:
        if row.get("schema") != SCHEMA:
            raise ValueError(f"{path} holds a row of schema {row.get('schema')}, expected {SCHEMA}; measure again")
    return [Row(**row) for row in rows]
