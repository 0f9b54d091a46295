"""Pictures of a forecast: the scaling curve, and one step's buckets over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddpcomm.forecast import Forecast
from ddpcomm.pictures import new_figure, save
from ddpcomm.simulate import Prediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(curves: Mapping[str, Sequence[Forecast]], steps: Mapping[str, Prediction], path: Path, title: str) -> None:
    """Writes one picture: efficiency over ranks for each curve, and for each step a row a bucket.

    Args:
        curves: by name, forecasts for several numbers of ranks.
        steps: by name, predictions whose buckets are drawn.
        path: a file whose ending matplotlib knows. Its directory is made.
        title: above all.

    Raises:
        ConfigurationError: matplotlib is not installed (it comes with the extra `plot`), or doesn't know the file's ending.
    """
    figure = new_figure(7 + 6 * len(steps), 5)
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(1, 1 + len(steps), squeeze=False)[0]
    for name, curve in curves.items():
        axes[0].plot([point.ranks for point in curve], [100 * point.efficiency for point in curve], marker="o", label=name)
    axes[0].set_xscale("log")
    axes[0].set_ylim(0, 105)
    axes[0].set_xlabel("GPUs")
    axes[0].set_ylabel("scaling efficiency, %")
    axes[0].set_title("predicted: one GPU's step over this one's", fontsize=10)
    axes[0].legend(fontsize=8)
    for panel, (name, prediction) in zip(axes[1:], steps.items(), strict=True):
        _gantt(panel, name, prediction)
    save(figure, path)


def _gantt(axes: Axes, name: str, prediction: Prediction) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.barh(-1, 1e3 * prediction.computed_seconds, color="tab:gray", label="backward's own work")
    for index, bucket in enumerate(prediction.buckets):
        waited = 1e3 * (bucket.started_seconds - bucket.ready_seconds)
        axes.barh(index, waited, left=1e3 * bucket.ready_seconds, color="tab:orange", label="full, waits" if index == 0 else None)
        moved = 1e3 * (bucket.ended_seconds - bucket.started_seconds)
        axes.barh(index, moved, left=1e3 * bucket.started_seconds, color="tab:blue", label="all-reduce" if index == 0 else None)
    axes.axvline(1e3 * prediction.computed_seconds, color="black", linewidth=1, linestyle="--")
    axes.set_ylim(len(prediction.buckets), -2)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("ms since the start of backward")
    axes.set_ylabel("bucket")
    axes.set_title(name, fontsize=10)
    axes.legend(fontsize=8)
