"""Finds accesses to memory that nothing orders, in a trace of what was put on streams.

Every stream, and the host, has a vector clock. Putting work on a stream ticks it; recording an event copies its clock; a wait joins the
event's clock into the waiting stream's. An access must come after each earlier one to the same bytes, unless both only read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

HOST = "host"
Kind = Literal["work", "record", "wait", "host_wait", "synchronize", "time"]


@dataclass(frozen=True)
class Range:
    """Bytes of memory."""

    start: int
    end: int

    def overlaps(self, other: Range) -> bool:
        return self.start < other.end and other.start < self.end


@dataclass(frozen=True)
class Entry:
    """One thing put on a stream, or done by the host, in the order in which it happened on the host.

    `event` is what a record or a wait is about.
    """

    kind: Kind
    stream: str
    label: str
    reads: tuple[Range, ...] = ()
    writes: tuple[Range, ...] = ()
    event: int = -1

    def __str__(self) -> str:
        return f"{self.stream}: {self.label}"


@dataclass
class _Access:
    entry: Entry
    range: Range
    writes: bool
    tick: int


@dataclass
class _Clocks:
    streams: dict[str, dict[str, int]] = field(default_factory=dict)
    events: dict[int, dict[str, int]] = field(default_factory=dict)

    def of(self, stream: str) -> dict[str, int]:
        return self.streams.setdefault(stream, {})

    def join(self, stream: str, other: dict[str, int]) -> None:
        mine = self.of(stream)
        for name, tick in other.items():
            mine[name] = max(mine.get(name, 0), tick)


def find_hazards(trace: list[Entry]) -> list[str]:
    """One line for each pair of accesses that nothing orders."""
    clocks = _Clocks()
    accesses: list[_Access] = []
    found: list[str] = []
    for entry in trace:
        stream = entry.stream
        if entry.kind == "record":
            clocks.events[entry.event] = dict(clocks.of(stream))
        elif entry.kind == "wait":
            clocks.join(stream, clocks.events.get(entry.event, {}))
        elif entry.kind == "host_wait":
            clocks.join(HOST, clocks.events.get(entry.event, {}))
        elif entry.kind == "synchronize":
            for other in list(clocks.streams.values()):
                clocks.join(HOST, other)
        elif entry.kind == "work":
            clocks.join(stream, clocks.of(HOST))
            clock = clocks.of(stream)
            clock[stream] = clock.get(stream, 0) + 1
            for touched, writes in [(each, False) for each in entry.reads] + [(each, True) for each in entry.writes]:
                for earlier in accesses:
                    ordered = clock.get(earlier.entry.stream, 0) >= earlier.tick
                    if not ordered and (writes or earlier.writes) and touched.overlaps(earlier.range):
                        found.append(f"'{entry}' is not ordered after '{earlier.entry}'")
                accesses.append(_Access(entry, touched, writes, clock[stream]))
    return found


def without_each_order(trace: list[Entry]) -> list[tuple[Entry, list[Entry]]]:
    """Every trace that lacks one record or one wait, beside what it lacks."""
    return [(entry, trace[:place] + trace[place + 1 :]) for place, entry in enumerate(trace) if entry.kind in ("record", "wait")]
