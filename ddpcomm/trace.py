"""Trace files: what one rank recorded, or what several did, in Chrome's trace format, which Perfetto (https://ui.perfetto.dev) shows.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("Trace Event Format"). A rank is a process
there ("pid"), a stream a thread ("tid"): 0 is the one that computes, the others are all-reduces. "ts" and "dur" are in microseconds, from
the first event of the file on. Under "otherData" stands what this package needs to lay files of several ranks over each other.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ddpcomm.checkpoint import write_text
from ddpcomm.clock import Pass, clock_offset
from ddpcomm.errors import ConfigurationError
from ddpcomm.trace_events import COMPUTE, Event, free_lanes

FORMAT = 1
_KEY = "ddpcomm"


@dataclass(frozen=True)
class RankTrace:
    """What one rank recorded.

    Args:
        rank, world_size: of the communicator.
        clock: names the clock that the times are of; ranks of one host have the same.
        device, transport: of the communicator.
        steps: how many.
        events: as `trace_events.events_of_step` makes them, times in nanoseconds of that clock.
        barriers: passes of barriers at the start and at the end, where clocks differ.
        clock_error_ns: how far off the times may be beside the first rank's.
    """

    rank: int
    world_size: int
    clock: str
    device: str
    transport: str
    steps: int
    events: list[Event]
    barriers: list[list[Pass]] = field(default_factory=list)
    clock_error_ns: int = 0


def pack(trace: RankTrace) -> bytes:
    """For sending."""
    return zlib.compress(json.dumps(asdict(trace)).encode(), level=1)


def unpack(data: bytes) -> RankTrace:
    """The reverse of `pack`."""
    return RankTrace(**json.loads(zlib.decompress(data)))


def align(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """The traces, by rank, with all times on the first rank's clock.

    Nothing is to be done among ranks of one clock. Others are compared at the barriers that the ranks passed, at the start and at the end,
    and in between the offset is interpolated; without barriers the all-reduces in the traces serve instead, all together.
    """
    ordered = sorted(traces, key=lambda trace: trace.rank)
    return [_on_clock_of(ordered[0], trace) for trace in ordered]


def _on_clock_of(first: RankTrace, trace: RankTrace) -> RankTrace:
    if trace.clock == first.clock:
        return trace
    points: list[tuple[int, int, int]] = []  # own time, offset, error
    for own, reference in zip(trace.barriers, first.barriers, strict=False):
        points.append((own[-1][1], *clock_offset(own, reference)))
    if not points:
        pairs = _common_passes(first, trace)
        if not pairs:
            return trace
        points.append((pairs[0][1][0], *clock_offset([own for _, own in pairs], [reference for reference, _ in pairs])))
    (start, offset_start, error_start), (end, offset_end, error_end) = points[0], points[-1]
    drift = (offset_end - offset_start) / (end - start) if end > start else 0.0

    def shifted(event: Event) -> Event:
        return {**event, "ts": event["ts"] + offset_start + round((event["ts"] - start) * drift)}

    events, error = [shifted(event) for event in trace.events], max(error_start, error_end)
    return replace(trace, events=events, clock=first.clock, barriers=[], clock_error_ns=error)


def _common_passes(first: RankTrace, second: RankTrace) -> list[tuple[Pass, Pass]]:
    """The all-reduces that both recorded."""
    passes = [{_place(e): (e["ts"], e["ts"] + e["dur"]) for e in t.events if e["cat"] == "all_reduce"} for t in (first, second)]
    return [(passes[0][place], passes[1][place]) for place in passes[0] if place in passes[1]]


def _place(event: Event) -> tuple[int, int]:
    return event["args"]["step"], event["args"]["bucket"]


# ---- files ----------------------------------------------------------------------------------------------------------


def write(traces: Sequence[RankTrace], path: Path) -> None:
    """Writes a trace file. Its directory is made where it is missing.

    Raises:
        OSError: it can't be written.
    """
    traces = align(traces)
    origin = min((event["ts"] for trace in traces for event in trace.events), default=0)
    events = [event for trace in traces for event in _chrome_events(trace, origin)]
    ranks = [{key: value for key, value in asdict(trace).items() if key != "events"} | {"origin_ns": origin} for trace in traces]
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(map(json.dumps, events))
    other = json.dumps({_KEY: {"format": FORMAT, "ranks": ranks}})
    write_text(path, f'{{"displayTimeUnit": "ms",\n"otherData": {other},\n"traceEvents": [\n{lines}\n]}}\n')


def _chrome_events(trace: RankTrace, origin: int) -> list[Event]:
    tracks = _tracks(trace.events)
    where = f"{trace.device}, {trace.transport}"
    found: list[Event] = [
        _metadata("process_name", trace.rank, 0, {"name": f"rank {trace.rank} ({where})"}),
        _metadata("process_sort_index", trace.rank, 0, {"sort_index": trace.rank}),
    ]
    for name, number in sorted(set(tracks), key=lambda track: track[1]):
        found.append(_metadata("thread_name", trace.rank, number, {"name": name}))
        found.append(_metadata("thread_sort_index", trace.rank, number, {"sort_index": number}))
    for event, (_, number) in zip(trace.events, tracks, strict=True):
        placed = {**event, "pid": trace.rank, "tid": number, "ts": (event["ts"] - origin) / 1e3}
        if "dur" in event:
            placed["dur"] = event["dur"] / 1e3
        found.append(placed)
    return found


def _metadata(name: str, rank: int, track: int, arguments: Event) -> Event:
    return {"name": name, "ph": "M", "pid": rank, "tid": track, "args": arguments}


def _tracks(events: Sequence[Event]) -> list[tuple[str, int]]:
    """Name and number of each event's track. All-reduces that no stream is known of may overlap one another, but in this format the events
    of a track must nest: they are given as many tracks as it takes."""
    loose = [index for index, event in enumerate(events) if not event["tid"]]
    lanes = free_lanes([(events[index]["ts"], events[index]["ts"] + events[index]["dur"]) for index in loose])
    names: list[str] = [event["tid"] for event in events]
    for index, lane in zip(loose, lanes, strict=True):
        names[index] = f"all-reduce {lane}" if lane else "all-reduce"
    numbers = {name: number for number, name in enumerate(dict.fromkeys([COMPUTE, *sorted(names)]))}
    return [(name, numbers[name]) for name in names]


def read(path: Path) -> list[RankTrace]:
    """The traces of a file that `write` made.

    Raises:
        OSError: there is no such file.
        ConfigurationError: it is no such file.
    """
    try:
        content: Any = json.loads(path.read_text())
        about = content["otherData"][_KEY]
        if about["format"] != FORMAT:
            raise ConfigurationError(f"{path} has format {about['format']}, this version of ddpcomm reads format {FORMAT}; record it again")
        events = content["traceEvents"]
        names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
        return [_rank_trace(rank, events, names) for rank in about["ranks"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"{path} is no timeline of ddpcomm's ({type(error).__name__}: {error})") from error


def _rank_trace(about: dict[str, Any], events: Sequence[Event], names: dict[tuple[int, int], str]) -> RankTrace:
    origin = about.pop("origin_ns")
    own = []
    for event in events:
        if event["pid"] == about["rank"] and event["ph"] != "M":
            name = names[event["pid"], event["tid"]]
            placed = {k: v for k, v in event.items() if k != "pid"} | {"ts": origin + round(event["ts"] * 1e3)}
            placed["tid"] = "" if name.startswith("all-reduce") else name
            own.append(placed | ({"dur": round(event["dur"] * 1e3)} if "dur" in event else {}))
    return RankTrace(**about, events=own)


def merge(paths: Sequence[Path]) -> list[RankTrace]:
    """The traces of several files of one run, aligned.

    Raises:
        OSError, ConfigurationError: as `read`; a rank is in two files; ranks are of different runs.
    """
    traces = [trace for path in paths for trace in read(path)]
    ranks = [trace.rank for trace in traces]
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise ConfigurationError(f"rank {', '.join(map(str, twice))} is in several of the files; give one file for each rank")
    if len({trace.world_size for trace in traces}) > 1:
        raise ConfigurationError("the files are of runs with different numbers of ranks")
    return align(traces)
