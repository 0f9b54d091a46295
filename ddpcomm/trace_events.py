"""Events in Chrome's trace format, made from the marks of one backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ddpcomm.recording import ALL, Point, StepRecording

Event = dict[str, Any]
COMPUTE = "compute"
"""The track of the thread, or stream, that runs forward and backward."""
_ENDS: tuple[Point, ...] = ("done", "waited")  # the end of the wait is the latest that an all-reduce can have ended


def bus_bytes(nbytes: int, world_size: int) -> float:
    """What an all-reduce of `nbytes` must bring through each rank's link: 2 (n - 1) / n times the size, whatever the algorithm.

    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, "Bus bandwidth".
    """
    return nbytes * 2 * (world_size - 1) / world_size


def events_of_step(number: int, recording: StepRecording, instants: Sequence[int], world_size: int) -> Iterator[Event]:
    """The events of one backward, in nanoseconds ("ts", "dur"), without "pid"; "tid" is the track's name, "" an all-reduce's.

    Args:
        number: of the step, from 0.
        recording: of the step, which has ended well.
        instants: the times of its marks.
        world_size: how many ranks there are.
    """
    times: dict[tuple[Point, int], int] = {}
    for (point, marked, _), time in zip(recording.marks, instants, strict=False):  # one of torch's threads may have added a last one
        times[point, marked] = min(times.get((point, marked), time), time)
    step = {"step": number}
    start, complete, end = times["backward", ALL], times["complete", ALL], times["in_place", ALL]
    if ("forward", ALL) in times:
        yield _span("forward", "step", times["forward", ALL], start, step)
    yield _span("backward", "step", start, complete, step)
    yield _span("exposed", "step", complete, end, step)
    for bucket, facts in enumerate(recording.buckets):
        if ("all_reduce", bucket) not in times:
            continue  # it stayed at home
        own: Event = {**step, "bucket": bucket, "bytes": facts.nbytes}
        ready = min(times.get(("ready", bucket), complete), times["flatten", bucket])
        yield {"name": f"bucket {bucket} ready", "cat": "ready", "ph": "i", "s": "t", "ts": ready, "tid": COMPUTE, "args": own}
        yield _span(f"flatten {bucket}", "flatten", times["flatten", bucket], times["all_reduce", bucket], own)
        if ("wait", bucket) in times:
            yield _span(f"wait {bucket}", "wait", times["wait", bucket], times["waited", bucket], own)
        if ("unflattened", bucket) in times:
            yield _span(f"unflatten {bucket}", "unflatten", times["unflatten", bucket], times["unflattened", bucket], own)
        begun = times.get(("begun", bucket), times["all_reduce", bucket])
        ends = [times[point, bucket] for point in _ENDS if (point, bucket) in times]
        done = min(ends, default=end)
        seconds = max(done - begun, 1) / 1e9
        about = own | {"busbw_bytes_per_second": round(bus_bytes(facts.nbytes, world_size) / seconds), "parameters": facts.parameters}
        track = f"stream {recording.lanes[bucket]}" if bucket in recording.lanes else ""
        yield _span(f"all-reduce {bucket}", "all_reduce", begun, done, about, track)


def free_lanes(spans: Sequence[tuple[int, int]]) -> list[int]:
    """For each span the first lane, from 0, that is free when it begins, so that the spans of a lane don't overlap."""
    free_at: list[int] = []
    lanes = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda index: spans[index]):
        start, end = spans[index]
        lane = next((lane for lane, free in enumerate(free_at) if free <= start), len(free_at))
        free_at[lane : lane + 1] = [end]
        lanes[index] = lane
    return lanes


def _span(name: str, category: str, start: int, end: int, arguments: Event, track: str = COMPUTE) -> Event:
    return {"name": name, "cat": category, "ph": "X", "ts": start, "dur": max(end - start, 0), "tid": track, "args": arguments}
