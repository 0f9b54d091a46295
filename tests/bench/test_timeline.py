"""bench.timeline: a short run."""

from __future__ import annotations

from pathlib import Path

from bench import timeline
from bench.rows import read_rows
from ddpcomm.trace import read


def test_short_run(tmp_path: Path) -> None:
    timeline.main(["--models", "tensors400", "--transport", "process_group", "--steps", "3", "--output", str(tmp_path)])
    step, added = read_rows(tmp_path / "timeline.jsonl")
    assert (step.quantity, added.quantity, step.count, step.ranks) == ("step", "timeline", 3, 2)
    assert 0 < step.p20 <= step.p50 <= step.p80
    assert (tmp_path / "timeline.png").exists()
    assert [trace.steps for trace in read(tmp_path / "tensors400-process_group.json")] == [timeline.SHOWN_STEPS] * 2
