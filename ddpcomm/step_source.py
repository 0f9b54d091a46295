"""Recorded steps as input of a forecast: a timeline's trace, or a plain description, both JSON.

A description:

    {"parameters": [{"numel": 1000, "ready_seconds": 0.01, "element_bytes": 4}, ...],     in the order of registration
     "backward_seconds": 0.02, "rest_seconds": 0.01,                                      rest: forward and optimizer
     "all_reduce": [[0, 1e-5], [1048576, 2e-4]]}                                          bytes and seconds, if measured

A trace is in Chrome's format, as `DistributedDataParallel` writes its timeline. It knows buckets and not parameters: the gradients of a
bucket are taken to have come evenly between the last moment of the bucket before and its own.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ddpcomm.cost_model import MeasuredCost
from ddpcomm.errors import ConfigurationError
from ddpcomm.layout import ParameterSize
from ddpcomm.simulate import StepProfile

PIECES_OF_A_BUCKET = 16
_MICROSECONDS = 1e-6
_Event = Mapping[str, Any]


@dataclass(frozen=True)
class StepSource:
    """A step without exchange, and what all-reduces cost where it was recorded (None: not known)."""

    profile: StepProfile
    cost: MeasuredCost | None


def read_step(path: Path) -> StepSource:
    """Reads either kind of file.

    Raises:
        ConfigurationError: the file can't be read, or lacks what a forecast needs.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, list):
            content = {"traceEvents": content}
        return _from_trace(content["traceEvents"]) if "traceEvents" in content else _from_description(content)
    except (OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigurationError(f"{path} can't be used for a forecast: {what}") from error


def _from_description(content: _Event) -> StepSource:
    parameters = content["parameters"]
    if not parameters:
        raise ConfigurationError("a step without parameters has nothing to exchange")
    profile = StepProfile(
        sizes=tuple(ParameterSize(int(p["numel"]), int(p.get("element_bytes", 4)), str(p.get("kind", "gradients"))) for p in parameters),
        ready_seconds=tuple(float(p["ready_seconds"]) for p in parameters),
        backward_seconds=float(content["backward_seconds"]),
        rest_seconds=float(content.get("rest_seconds", 0.0)),
    )
    cost = MeasuredCost.from_json({"points": content["all_reduce"]}) if content.get("all_reduce") else None
    return StepSource(profile, cost)


def _from_trace(events: list[_Event]) -> StepSource:
    backwards = {_step(event): event for event in events if event.get("cat") == "step" and event.get("name") == "backward"}
    if not backwards:
        raise ConfigurationError("the trace holds no backward")
    forwards = [float(event["dur"]) for event in events if event.get("cat") == "step" and event.get("name") == "forward"]
    flattened: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "flatten":
            flattened[_step(event)].append((float(event["ts"]), float(event["dur"])))
    ready: dict[int, list[float]] = defaultdict(list)
    all_reduces: dict[tuple[int, int], list[float]] = defaultdict(list)
    sizes: dict[int, int] = {}
    for event in events:
        if event.get("cat") not in ("ready", "all_reduce") or "bucket" not in event.get("args", {}) or _step(event) not in backwards:
            continue
        bucket = int(event["args"]["bucket"])
        sizes[bucket] = int(event["args"]["bytes"])
        if event["cat"] == "all_reduce":
            all_reduces[bucket, _step(event)[1]].append(float(event["dur"]))
            continue
        began = float(event["ts"])
        copying = sum(length for start, length in flattened[_step(event)] if start < began)
        ready[bucket].append(max(began - float(backwards[_step(event)]["ts"]) - copying, 0.0))
    if not ready:
        raise ConfigurationError("the trace holds no bucket that became ready")
    lengths = [
        float(event["dur"])
        - sum(length for start, length in flattened[step] if start < float(event["ts"]) + float(event["dur"]) and start >= event["ts"])
        for step, event in backwards.items()
    ]
    backward = median(lengths) * _MICROSECONDS
    return StepSource(
        _evenly(
            {bucket: median(times) * _MICROSECONDS for bucket, times in ready.items()},
            sizes,
            backward,
            median(forwards) * _MICROSECONDS if forwards else 0.0,
        ),
        _cost(sizes, all_reduces),
    )


def _step(event: _Event) -> tuple[int, int]:
    """Rank and step of an event."""
    return int(event.get("pid", 0)), int(event.get("args", {}).get("step", 0))


def _evenly(ready: Mapping[int, float], sizes_bytes: Mapping[int, int], backward: float, rest: float) -> StepProfile:
    sizes: list[ParameterSize] = []
    times: list[float] = []
    before = 0.0
    for bucket in sorted(ready):
        until = min(max(ready[bucket], before), backward)
        numel = sizes_bytes[bucket] // 4
        pieces = max(1, min(PIECES_OF_A_BUCKET, numel))
        for piece in range(1, pieces + 1):
            share = numel * piece // pieces - numel * (piece - 1) // pieces
            sizes.append(ParameterSize(share, 4, "gradients"))
            times.append(before + (until - before) * piece / pieces)
        before = until
    return StepProfile(tuple(sizes), tuple(times), backward, rest)


def _cost(sizes: Mapping[int, int], all_reduces: Mapping[tuple[int, int], list[float]]) -> MeasuredCost | None:
    """The shortest of the ranks' times is that of the rank that came last and waited for nobody; the median of it over steps."""
    by_size: dict[int, list[float]] = defaultdict(list)
    for (bucket, _), times in all_reduces.items():
        by_size[sizes[bucket]].append(min(times) * _MICROSECONDS)
    points = tuple((size, median(times)) for size, times in sorted(by_size.items()) if median(times) > 0)
    return MeasuredCost(points) if len(points) > 1 else None
