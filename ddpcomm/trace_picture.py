"""Draws a timeline: one typical step, all ranks below each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ddpcomm.pictures import new_figure, save
from ddpcomm.trace import RankTrace
from ddpcomm.trace_events import Event, free_lanes
from ddpcomm.trace_summary import Summary

_COLOURS = {
    "forward": "#c7c7c7",
    "backward": "#aec7e8",
    "exposed": "#ff9896",
    "flatten": "#1f77b4",
    "wait": "#d62728",
    "unflatten": "#9467bd",
    "all_reduce": "#2ca02c",
}


def typical_step(traces: Sequence[RankTrace]) -> int:
    """The step, of those that all ranks recorded, whose exposed time on the first rank is the median one."""
    steps: list[dict[int, int]] = [{e["args"]["step"]: e["dur"] for e in trace.events if e["name"] == "exposed"} for trace in traces]
    common = sorted(set.intersection(*map(set, steps)) or set(steps[0]), key=lambda step: steps[0].get(step, 0))
    return common[len(common) // 2]


def draw(traces: Sequence[RankTrace], summary: Summary, path: Path) -> None:
    """Writes a PNG. Each rank has two lines: what computes, and the all-reduces beside it.

    Raises:
        ConfigurationError: matplotlib is not installed, or doesn't know the file's ending.
        OSError: the file can't be written.
    """
    figure = new_figure(12.0, 1.8 + 0.9 * len(traces))
    from matplotlib.patches import Patch

    step = typical_step(traces)
    events = {trace.rank: [event for event in trace.events if event["args"]["step"] == step] for trace in traces}
    origin = min(event["ts"] for own in events.values() for event in own)
    axes = figure.subplots()
    for line, own in enumerate(events.values()):
        reduces = [event for event in own if event["cat"] == "all_reduce"]
        places = free_lanes([(event["ts"], event["ts"] + event["dur"]) for event in reduces])
        lanes = {id(event): (max(places) + 1, lane) for event, lane in zip(reduces, places, strict=True)}
        for event in (event for event in own if "dur" in event):
            height, place = (0.4, line - 0.4) if event["cat"] == "step" else (0.3, line - 0.35)
            left, width = (event["ts"] - origin) / 1e6, event["dur"] / 1e6
            if event["cat"] == "all_reduce":
                count, lane = lanes[id(event)]
                height = 0.36 / count
                place = line + 0.02 + lane * height
                axes.text(left + width / 2, place + height / 2, str(event["args"]["bucket"]), ha="center", va="center", fontsize=7)
            axes.barh(place, width, height, left, align="edge", color=_COLOURS[_kind(event)], edgecolor="white", linewidth=0.3)
    axes.set_yticks(range(len(events)), [f"rank {rank}" for rank in events])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    device = "CPU ranks" if summary.device == "cpu" else f"device {summary.device}"
    axes.set_title(
        f"Step {step}: {summary.world_size} {device}, {summary.transport}; medians: overlap {summary.overlap_share:.0%}, "
        f"exposed {summary.exposed_ms:.2f} ms",
        fontsize=10,
    )
    kinds = [kind for kind in _COLOURS if any(_kind(event) == kind for own in events.values() for event in own)]
    handles = [Patch(color=_COLOURS[kind], label=kind.replace("_", "-")) for kind in kinds]
    figure.legend(handles=handles, ncols=len(kinds), fontsize=8, loc="outside lower center")
    save(figure, path)


def _kind(event: Event) -> str:
    return str(event["name"] if event["cat"] == "step" else event["cat"])
