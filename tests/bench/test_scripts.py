"""The scripts that time steps of training: each runs, with tiny sizes, and leaves rows and a picture from which its tables can be made."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from bench import results
from bench.rows import Row, read_rows

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("borrowed_pools")]

COMMON = ["--models", "tensors400", "--steps", "2", "--transport", "process_group,shared_memory"]
ENGINES = {"torch", "ddpcomm process_group", "ddpcomm shared_memory"}


def run(name: str, directory: Path, *arguments: str) -> list[Row]:
    """The rows of a run; its page holds every subject."""
    importlib.import_module(f"bench.{name}").main([*COMMON, *arguments, "--output", str(directory)])
    rows = read_rows(directory / f"{name}.jsonl")
    assert all(row.bench == name and row.measured and row.dtype == "float32" and row.sizes["parameters"] > 0 for row in rows)
    assert all(row.p20 <= row.p50 <= row.p80 <= row.p99 and row.count >= 1 for row in rows)
    picture = (directory / f"{name}.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 100_000
    page = results.write_page(directory, "a test").read_text()
    assert all(row.subject in page for row in rows)
    assert f"]({name}.png)" in page
    return rows


def test_bucket_size(tmp_path: Path) -> None:
    rows = run("bucket_size", tmp_path, "--mib", "0.1,25")
    found = {(row.subject, row.quantity, row.sizes.get("bucket_bytes")) for row in rows}
    sizes = (int(0.1 * 2**20), 25 * 2**20)
    assert found == {("none", "step", None)} | {(name, what, size) for name in ENGINES for what in ("step", "overhead") for size in sizes}


def test_breakdown(tmp_path: Path) -> None:
    rows = run("breakdown", tmp_path)
    parts = {"forward", "backward", "exchange", "optimizer", "step"}
    subjects = {"none", "process_group, no overlap", "shared_memory, no overlap"} | ENGINES
    assert {(row.subject, row.quantity) for row in rows} == {(name, part) for name in subjects for part in parts}
    exchange = {row.subject: row for row in rows if row.quantity == "exchange"}
    assert exchange["none"].p99 == 0
    assert exchange["process_group, no overlap"].p20 > 0, "an exchange after backward is timed by itself"
    assert {name for name, row in exchange.items() if row.details["overlaps"]} == ENGINES


def test_accumulation(tmp_path: Path) -> None:
    rows = run("accumulation", tmp_path, "--every", "1,3", "--training-steps", "6")
    quantities = {(row.subject, row.quantity, row.sizes["every"]) for row in rows}
    assert quantities == {(name, what, every) for name in ENGINES for what in ("step", "loss") for every in (1, 3)}
    losses = {(row.subject, row.sizes["every"]): row for row in rows if row.quantity == "loss"}
    assert losses["torch", 1].details["curve"] != losses["torch", 3].details["curve"]
    assert losses["torch", 3].details == losses["ddpcomm shared_memory", 3].details
    assert losses["torch", 1].unit == "nats/byte"


def test_communicators(tmp_path: Path) -> None:
    rows = run("communicators", tmp_path, "--counts", "1,3", "--mib", "0.2")
    steps = {(row.subject, row.sizes.get("communicators")) for row in rows if row.quantity == "step"}
    assert steps == {("none", None), ("torch", 1)} | {(f"ddpcomm {name}", n) for name in ("process_group", "shared_memory") for n in (1, 3)}


def test_scaling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.scaling.simulated_rows", lambda bench: [])
    rows = run("scaling", tmp_path, "--ranks", "2,3")
    assert {(row.subject, row.ranks) for row in rows if row.quantity == "step"} == {(n, r) for n in {"none"} | ENGINES for r in (2, 3)}
