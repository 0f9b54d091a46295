"""The clocks of a timeline: the host's, or a CUDA device's read by events; and how clocks of different hosts are laid over each other.

All times end as nanoseconds of `time.perf_counter_ns`, which on Linux is CLOCK_MONOTONIC: one clock for all processes of a host.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from ddpcomm.comm.base import Communicator
from ddpcomm.comm.cuda_runtime import CudaRuntime, Stream

Instant: TypeAlias = Any
"""A point in time: nanoseconds, or an event that stands for them until the device has passed it."""

Pass: TypeAlias = tuple[int, int]
"""When a rank entered a collective, and when it left, in nanoseconds of its own clock."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE = Path("/proc/self/ns/time")
_BARRIERS = 20
_ANCHORS = 5


class Clock(Protocol):
    """Where the instants of a timeline come from."""

    def start(self) -> None:
        """Called before the first instant. May block, never within a step."""

    def now(self) -> Instant:
        """The present; on a device, the point that its current stream has been given work up to. Never blocks."""

    def on(self, stream: Stream) -> Instant:
        """The same for another stream."""

    def finish(self) -> None:
        """Called after the last instant, before `host_times`. May block."""

    def host_times(self, series: Sequence[Sequence[Instant]]) -> list[list[int]]:
        """All instants in nanoseconds of the host's clock. Those of one series are close together, its first one the earliest, and the
        series follow one another."""


class HostClock:
    """`time.perf_counter_ns`."""

    def start(self) -> None:
        return None

    def now(self) -> int:
        return time.perf_counter_ns()

    def on(self, stream: Stream) -> int:
        del stream
        return time.perf_counter_ns()

    def finish(self) -> None:
        return None

    def host_times(self, series: Sequence[Sequence[Instant]]) -> list[list[int]]:
        return [list(instants) for instants in series]


class DeviceClock:
    """A device's own clock, by events. CUDA tells the time between two events in milliseconds as a float, half a microsecond at best: so
    times are taken between neighbours and added up.

    `start` and `finish` wait until the device is idle and note what the host's clock says then; times in between are interpolated, so
    that the two clocks may run at different speeds.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._anchors: list[tuple[Instant, int]] = []

    def start(self) -> None:
        self._anchors = [self._anchor()]

    def now(self) -> Instant:
        return self._runtime.timestamp(self._runtime.current_stream())

    def on(self, stream: Stream) -> Instant:
        return self._runtime.timestamp(stream)

    def finish(self) -> None:
        self._anchors.append(self._anchor())

    def host_times(self, series: Sequence[Sequence[Instant]]) -> list[list[int]]:
        (reference, host_start), (end, host_end) = self._anchors[0], self._anchors[-1]
        elapsed = 0.0
        found: list[list[float]] = []
        for instants in [*series, [end]]:
            if instants:
                elapsed += self._runtime.seconds_between(reference, instants[0])
                reference = instants[0]
            found.append([elapsed + self._runtime.seconds_between(reference, instant) for instant in instants])
        whole = found.pop()[0]
        speed = (host_end - host_start) / whole if whole > 0 else 1e9  # the host's nanoseconds in a second of the device's
        return [[host_start + round(seconds * speed) for seconds in each] for each in found]

    def _anchor(self) -> tuple[Instant, int]:
        """An event and the host's time of it: of several attempts the one that took the host the least."""
        best: tuple[int, Instant, int] | None = None
        for _ in range(_ANCHORS):
            self._runtime.synchronize()
            before = time.perf_counter_ns()
            event = self.now()
            self._runtime.synchronize()
            after = time.perf_counter_ns()
            if best is None or after - before < best[0]:
                best = after - before, event, (before + after) // 2
        return (None, 0) if best is None else best[1:]


def host_clock_name() -> str:
    """Names the clock behind `time.perf_counter_ns`: processes for which it is the same read the same clock."""
    try:
        return f"{_BOOT_ID.read_text().strip()} {os.readlink(_TIME_NAMESPACE)}"
    except OSError:  # no such file: not Linux, or an old kernel. Then each process counts as a host of its own
        return f"{socket.gethostname()} {os.getpid()}"


def pass_barriers(communicator: Communicator) -> list[Pass]:
    """Passes some barriers, blocking, from which `clock_offset` can tell how this rank's clock differs from others'. Collective."""
    passes = []
    for _ in range(_BARRIERS):
        entered = time.perf_counter_ns()
        communicator.barrier().wait()
        passes.append((entered, time.perf_counter_ns()))
    return passes


def clock_offset(own: Sequence[Pass], reference: Sequence[Pass]) -> tuple[int, int]:
    """What to add to a rank's times to have them on the reference rank's clock, and how far off that may be; in nanoseconds.

    No rank leaves a collective that synchronises (a barrier, an all-reduce) before every rank has entered it. So each one bounds the offset
    from both sides: own entry + offset <= reference exit, and reference entry <= own exit + offset. What is returned is the middle of what
    all of them leave, and half its width. (The same bounds as Cristian's, "Probabilistic clock synchronization", 1989, without a server.)

    Args:
        own, reference: the passes of the same collectives, in the same order; at least one.
    """
    pairs = list(zip(own, reference, strict=True))
    lowest = max(there[0] - here[1] for here, there in pairs)
    highest = min(there[1] - here[0] for here, there in pairs)
    return (lowest + highest) // 2, abs(highest - lowest) // 2
