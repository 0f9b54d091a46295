"""Trace files: written, read, merged and summarised."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpcomm.clock import HostClock
from ddpcomm.errors import ConfigurationError
from ddpcomm.recording import ALL, BucketFacts, Point, StepRecording
from ddpcomm.trace import RankTrace, align, merge, pack, read, unpack, write
from ddpcomm.trace_events import events_of_step
from ddpcomm.trace_summary import summarize

MS = 1_000_000
BUCKETS = [BucketFacts(8_000_000, "2.weight, 2.bias"), BucketFacts(4_000_000, "0.weight")]

# One step of a rank, in ms: forward 0 to 10, backward to 40, and what the buckets do.
STEP: list[tuple[Point, int, float]] = [
    ("forward", ALL, 0),
    ("backward", ALL, 10),
    ("ready", 0, 20),
    ("flatten", 0, 21),
    ("all_reduce", 0, 22),
    ("sent", 0, 23),
    ("complete", ALL, 40),
    ("flatten", 1, 41),
    ("all_reduce", 1, 42),
    ("sent", 1, 43),
    ("wait", 0, 44),
    ("done", 0, 45),
    ("waited", 0, 46),
    ("wait", 1, 47),
    ("waited", 1, 50),
    ("unflatten", 0, 50),
    ("unflattened", 0, 52),
    ("in_place", ALL, 54),
]


def events(number: int, start_ms: float, marks: Sequence[tuple[Point, int, float]] = STEP) -> list[dict[str, Any]]:
    recording = StepRecording(HostClock(), BUCKETS, None, watches_work=True)
    recording.marks = [(point, bucket, None) for point, bucket, _ in marks]
    return list(events_of_step(number, recording, [round((start_ms + ms) * MS) for _, _, ms in marks], world_size=2))


def trace(rank: int, *, late_ms: float = 0.0, offset_ms: float = 0.0, clock: str = "host a", steps: int = 3) -> RankTrace:
    found = [event for number in range(steps) for event in events(number, 100 * number + late_ms + offset_ms + 1000)]
    return RankTrace(rank, 2, clock, "cpu", "shared_memory", steps, found)


def spans(found: list[dict[str, Any]], category: str) -> dict[str, tuple[float, float]]:
    return {event["name"]: (event["ts"] / MS, (event["ts"] + event["dur"]) / MS) for event in found if event["cat"] == category}


def test_marks_become_spans() -> None:
    found = events(0, 0)
    assert spans(found, "step") == {"forward": (0, 10), "backward": (10, 40), "exposed": (40, 54)}
    assert spans(found, "flatten") == {"flatten 0": (21, 22), "flatten 1": (41, 42)}
    assert spans(found, "all_reduce") == {"all-reduce 0": (22, 45), "all-reduce 1": (42, 50)}  # seen done; only waited for
    assert spans(found, "wait") == {"wait 0": (44, 46), "wait 1": (47, 50)}
    assert spans(found, "unflatten") == {"unflatten 0": (50, 52)}
    assert {event["name"]: event["ts"] / MS for event in found if event["cat"] == "ready"} == {"bucket 0 ready": 20, "bucket 1 ready": 40}
    reduce = next(event for event in found if event["name"] == "all-reduce 0")
    assert reduce["args"]["bytes"] == 8_000_000
    assert reduce["args"]["busbw_bytes_per_second"] == round(8_000_000 / 0.023)  # with two ranks 2 (n - 1) / n is 1


def test_times_of_a_device_win() -> None:
    marks: list[tuple[Point, int, float]] = [*STEP, ("begun", 0, 25), ("done", 1, 48)]
    recording = StepRecording(HostClock(), BUCKETS, None, watches_work=False)
    recording.marks = [(point, bucket, None) for point, bucket, _ in marks]
    recording.lanes = {0: 7}
    found = list(events_of_step(0, recording, [round(ms * MS) for _, _, ms in marks], world_size=2))
    assert spans(found, "all_reduce") == {"all-reduce 0": (25, 45), "all-reduce 1": (42, 48)}
    assert [event["tid"] for event in found if event["cat"] == "all_reduce"] == ["stream 7", ""]


def test_file_is_a_chrome_trace(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"
    write([trace(1), trace(0)], path)
    content = json.loads(path.read_text())
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in content["traceEvents"]:
        by_kind.setdefault(event["ph"], []).append(event)
    assert set(by_kind) == {"M", "X", "i"}
    assert {e["pid"]: e["args"]["name"] for e in by_kind["M"] if e["name"] == "process_name"} == {
        0: "rank 0 (cpu, shared_memory)",
        1: "rank 1 (cpu, shared_memory)",
    }
    assert {e["args"]["name"] for e in by_kind["M"] if e["name"] == "thread_name"} == {"compute", "all-reduce", "all-reduce 1"}
    assert min(event["ts"] for event in by_kind["X"]) == 0.0
    for track in {(event["pid"], event["tid"]) for event in by_kind["X"]}:
        assert nests([event for event in by_kind["X"] if (event["pid"], event["tid"]) == track])


def nests(found: list[dict[str, Any]]) -> bool:
    """Whether any two events lie apart or one within the other."""
    limits = [(event["ts"], event["ts"] + event["dur"]) for event in found]
    return all(b <= c or d <= a or (a <= c and d <= b) or (c <= a and b <= d) for a, b in limits for c, d in limits)


def test_read_returns_what_was_written(tmp_path: Path) -> None:
    traces = [trace(0), trace(1, late_ms=2)]
    write(traces, tmp_path / "trace.json")
    assert read(tmp_path / "trace.json") == traces
    assert [unpack(pack(each)) for each in traces] == traces


def test_files_of_one_clock_are_merged_as_they_are(tmp_path: Path) -> None:
    traces = [trace(0), trace(1, late_ms=3)]
    paths = [tmp_path / f"{each.rank}.json" for each in traces]
    for each, path in zip(traces, paths, strict=True):
        write([each], path)
    assert merge(paths[::-1]) == traces


def begins(found: RankTrace) -> list[float]:
    return [event["ts"] / MS for event in found.events if event["name"] == "all-reduce 0"]


def test_clocks_are_compared_by_all_reduces() -> None:
    first, second = align([trace(0), trace(1, late_ms=1, offset_ms=5000, clock="host b")])
    error_ms = second.clock_error_ns / MS
    assert 0 < error_ms < 8.1  # half of the shortest all-reduce, and something for the lateness
    assert all(abs(b - a - 1) <= error_ms for a, b in zip(begins(first), begins(second), strict=True))


def test_clocks_are_compared_by_barriers_and_drift_is_taken_out() -> None:
    def moved(event: dict[str, Any]) -> dict[str, Any]:  # 5 s ahead, and a part in a thousand too fast
        return {**event, "ts": 5000 * MS + round(event["ts"] * 1.001), "dur": round(event.get("dur", 0) * 1.001)}

    own, reference = [], []
    for now in (900 * MS, 1400 * MS):
        reference.append([(now, now + 1000)])
        own.append([(5000 * MS + round(now * 1.001), 5000 * MS + round((now + 1000) * 1.001))])
    plain = trace(1)
    other = replace(plain, clock="host b", barriers=own, events=[moved(event) for event in plain.events])
    first, second = align([replace(trace(0), barriers=reference), other])
    assert begins(second) == pytest.approx(begins(first), abs=0.01)
    assert align([first, second]) == [first, second]  # they are on one clock now


def test_summary() -> None:
    summary = summarize([trace(0), trace(1, late_ms=2)])
    first, second = summary.ranks
    assert (first.backward_ms, first.exposed_ms, first.wait_ms, first.communication_ms) == (30, 14, 5, 28)
    assert first.overlap_share == pytest.approx(18 / 28)
    assert (first.lateness_ms, second.lateness_ms, second.last_share) == (0, 2, 1)
    assert summary.straggler == second
    assert summary.exposed_ms == 14
    bucket, other = summary.buckets
    assert summary.slowest_bucket == bucket
    assert (bucket.all_reduce_ms, other.all_reduce_ms) == (23, 8)  # from the late rank's begin to its end
    assert (bucket.ready_ms, bucket.flatten_ms, bucket.unflatten_ms, other.unflatten_ms) == (10, 1, 2, 0)
    assert bucket.busbw_bytes_per_second == pytest.approx(8_000_000 / 0.023)


def test_one_rank_has_no_straggler() -> None:
    assert summarize([trace(0)]).straggler is None


def test_what_can_not_be_read_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"traceEvents": []}')
    with pytest.raises(ConfigurationError, match="is no timeline of ddpcomm's"):
        read(other)
    newer = tmp_path / "newer.json"
    write([trace(0)], newer)
    newer.write_text(newer.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ConfigurationError, match="format 2"):
        read(newer)
    write([trace(0)], tmp_path / "one.json")
    with pytest.raises(ConfigurationError, match="rank 0 is in several"):
        merge([tmp_path / "one.json", tmp_path / "one.json"])
    write([replace(trace(1), world_size=3)], tmp_path / "two.json")
    with pytest.raises(ConfigurationError, match="different numbers of ranks"):
        merge([tmp_path / "one.json", tmp_path / "two.json"])
    with pytest.raises(ConfigurationError, match="holds no backward"):
        summarize([replace(trace(0), steps=0, events=[])])
