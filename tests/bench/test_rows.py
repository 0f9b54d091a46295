"""The row that all benchmarks share."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.rows import Row, commit, machine, percentiles, read_rows, versions, write_rows

ROW = Row("step_time", "mlp8m", "torch", "step", "s", 2, "float32", {"bytes": 8}, details={"a": 1}, **percentiles([1.0, 2.0, 3.0]))


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    rows = [ROW, replace(ROW, subject="ddpcomm", measured=False)]
    write_rows(rows, path)
    assert read_rows(path) == rows
    assert len(path.read_text().splitlines()) == 2


def test_rows_of_another_schema_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows([replace(ROW, schema=0)], path)
    with pytest.raises(ValueError, match="schema 0, expected"):
        read_rows(path)


def test_percentiles() -> None:
    assert percentiles([float(value) for value in range(101)]) == {"count": 101, "p20": 20.0, "p50": 50.0, "p80": 80.0, "p99": 99.0}
    assert percentiles([4.0])["p99"] == 4.0


def test_a_row_says_what_it_depends_on() -> None:
    assert machine()["cores"] >= 1
    assert machine()["cpu"]
    assert versions()["torch"] == torch.__version__
    assert re.fullmatch(r"unknown|[0-9a-f]{12}\+?", commit())
    json.dumps(machine())
