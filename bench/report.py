"""Tables for the terminal and for Markdown, and pictures, the same for every benchmark."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from PIL import Image
from rich.console import Console
from rich.table import Table as RichTable

PAGE_WIDTH = 120  # of a log file
DPI = 100
COLOURS = 256  # of a picture: keeps its file small
MOST_TICKS = 12
SIMULATED = "simulated"


@dataclass(frozen=True)
class Table:
    """The first column holds names, all others numbers. A short line leaves its last columns empty."""

    title: str
    columns: Sequence[str]
    lines: Sequence[Sequence[str]]

    def show(self) -> None:
        table = RichTable(title=self.title, title_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
        for line in self.lines:
            table.add_row(*line)
        Console(width=None if sys.stdout.isatty() else PAGE_WIDTH).print(table)

    def markdown(self) -> str:
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        padded = [[*line, *[""] * (len(self.columns) - len(line))] for line in self.lines]
        body = "\n".join(f"| {' | '.join(cells)} |" for cells in (self.columns, rule, *padded))
        return f"{self.title}\n\n{body}\n"


def show_table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    Table(title, columns, lines).show()


@dataclass(frozen=True)
class Line:
    """Medians and the range from p20 to p80 over x. What was not measured is dashed, and named so."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    measured: bool = True


def bar_chart(values: Mapping[str, Mapping[str, float]], path: Path, *, title: str, label: str, reference: float | None = None) -> None:
    """`values[subject][case]`: a group of bars for each case, a colour for each subject, a dashed line at `reference`."""
    cases = list(dict.fromkeys(case for by_case in values.values() for case in by_case))
    width = 0.8 / max(1, len(values))
    figure = Figure(figsize=(2.0 + 1.6 * len(cases), 4.5), layout="constrained")
    axes = figure.subplots()
    for index, (subject, by_case) in enumerate(values.items()):
        places = [cases.index(case) + (index - (len(values) - 1) / 2) * width for case in by_case]
        label_shown = f" {subject}"  # matplotlib leaves labels out of a legend that begin with an underscore
        bars = axes.bar(places, list(by_case.values()), width, label=label_shown)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    if reference is not None:
        axes.axhline(reference, color="black", linestyle="--", linewidth=1)
    axes.set_xticks(range(len(cases)), cases)
    axes.set_ylabel(label)
    axes.set_title(title, fontsize=10)
    if values:
        figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    save(figure, path)


def stacked_bars(panels: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path, *, title: str, label: str) -> None:
    """`panels[case][subject][part]`: a panel for each case, a bar for each subject, made of its parts from the bottom up."""
    figure = Figure(figsize=(3.0 + 3.6 * len(panels), 4.5), layout="constrained")
    grid = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
    for axes, (case, subjects) in zip(grid, panels.items(), strict=False):
        bottoms = dict.fromkeys(subjects, 0.0)
        for part in dict.fromkeys(part for parts in subjects.values() for part in parts):
            heights = [parts.get(part, 0.0) for parts in subjects.values()]
            axes.bar(list(subjects), heights, 0.7, bottom=list(bottoms.values()), label=part)
            bottoms = {subject: bottoms[subject] + height for subject, height in zip(subjects, heights, strict=True)}
        axes.set_title(case, fontsize=10)
        axes.tick_params(axis="x", rotation=40, labelsize=8)
        for tick in axes.get_xticklabels():
            tick.set_horizontalalignment("right")
    grid[0].set_ylabel(label)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8, reverse=True)
    figure.suptitle(title, fontsize=11)
    save(figure, path)


def line_chart(
    panels: Mapping[str, Sequence[Line]],
    path: Path,
    *,
    title: str,
    x_label: str,
    y_label: str,
    from_zero: bool = False,
    xscale: str = "linear",
) -> None:
    """A panel for each case, a line for each subject with its spread."""
    figure = Figure(figsize=(max(6.5, 1.0 + 3.8 * len(panels)), 4.2), layout="constrained")
    grid = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
    shown: list[str] = []
    for axes, (case, lines) in zip(grid, panels.items(), strict=False):
        colours: dict[str, Any] = {}
        for line in lines:
            style, name = ("-", line.label) if line.measured else ("--", f"{line.label} ({SIMULATED})")
            marker = "o" if len(line.x) <= MOST_TICKS else ""
            (drawn,) = axes.plot(line.x, line.y, style, marker=marker, markersize=4, label=name, color=colours.get(line.label))
            colours[line.label] = drawn.get_color()
            if line.low and line.high:
                axes.fill_between(line.x, line.low, line.high, color=drawn.get_color(), alpha=0.15, linewidth=0)
        axes.set_xscale(xscale)
        if from_zero:
            axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
        places = sorted({x for line in lines for x in line.x})
        if len(places) <= MOST_TICKS:
            axes.set_xticks(places, [f"{place:g}" for place in places])
            axes.xaxis.set_minor_locator(NullLocator())
        axes.set_title(case, fontsize=10)
        axes.set_xlabel(x_label)
        labels = [line.label for line in lines]
        if axes is grid[0] or labels != shown:
            axes.legend(fontsize=8)
        shown = labels
    grid[0].set_ylabel(y_label)
    figure.suptitle(title, fontsize=11)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    with Image.open(path) as picture:
        reduced = picture.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE)
    reduced.save(path, optimize=True)
