"""bench/diff.py: it compares what two runs have in common, and nothing that can't be compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import diff
from bench.rows import Row, percentiles, write_rows

ROW = Row("step_time", "mlp8m", "torch", "step", "s", 2, "float32", {"bytes": 8}, **percentiles([1.0, 2.0, 3.0]))
FASTER = replace(ROW, p20=0.9, p50=1.0, p80=1.1)


def test_shows_ratios_and_overlaps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows([ROW, replace(ROW, subject="ddpcomm"), replace(ROW, subject="gone")], tmp_path / "first" / "step_time.jsonl")
    write_rows([FASTER, replace(ROW, subject="ddpcomm", p50=2.2), replace(ROW, subject="new")], tmp_path / "second" / "step_time.jsonl")
    diff.main([str(tmp_path / "first"), str(tmp_path / "second" / "step_time.jsonl")])
    lines = {line.split("│")[1].strip(): line for line in capsys.readouterr().out.splitlines() if "mlp8m" in line}
    assert set(lines) == {f"step_time: mlp8m, {name}, step, 2 ranks" for name in ("torch", "ddpcomm")}
    torch, own = lines.values()
    assert "0.500" in torch
    assert "no" in torch.split("│")[-2]
    assert "1.100" in own
    assert "yes" in own.split("│")[-2]


def test_rows_of_different_machines_are_refused(tmp_path: Path) -> None:
    write_rows([ROW], tmp_path / "first.jsonl")
    write_rows([replace(ROW, machine={**ROW.machine, "cpu": "another"})], tmp_path / "second.jsonl")
    with pytest.raises(SystemExit, match="different machines"):
        diff.main([str(tmp_path / "first.jsonl"), str(tmp_path / "second.jsonl")])


def test_one_row_of_another_machine_is_enough() -> None:
    with pytest.raises(diff.NotComparableError, match="another"):
        diff.pairs([ROW, replace(ROW, case="x")], [ROW, replace(ROW, case="x", machine={"cpu": "another"})])


@pytest.mark.parametrize(
    "change",
    [{"case": "convnet"}, {"sizes": {"bytes": 9}}, {"ranks": 3}, {"device": "cuda"}, {"measured": False}, {"quantity": "overhead"}],
)
def test_what_differs_in_kind_is_not_compared(change: dict[str, object]) -> None:
    with pytest.raises(diff.NotComparableError, match="nothing was measured in both"):
        diff.pairs([ROW], [replace(ROW, **change)])  # type: ignore[arg-type]


def test_nothing_to_compare(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(diff.NotComparableError, match="holds no rows"):
            diff.load(path)


def test_of_repeated_rows_the_last_counts() -> None:
    assert diff.pairs([ROW, FASTER], [ROW]) == [(FASTER, ROW)]
