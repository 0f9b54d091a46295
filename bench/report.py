"""Tables for the terminal and pictures for the page, the same for every benchmark."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

PAGE_WIDTH = 120  # of a log file


def show_table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """The first column holds names, all others numbers."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
    for line in lines:
        table.add_row(*line)  # a short line leaves its last columns empty
    Console(width=None if sys.stdout.isatty() else PAGE_WIDTH).print(table)


def bar_chart(values: Mapping[str, Mapping[str, float]], path: Path, *, title: str, label: str, reference: float | None = None) -> None:
    """`values[subject][case]`: a group of bars for each case, a colour for each subject, a dashed line at `reference`."""
    cases = list(dict.fromkeys(case for by_case in values.values() for case in by_case))
    width = 0.8 / max(1, len(values))
    figure = Figure(figsize=(2.0 + 1.6 * len(cases), 4.5), layout="constrained")
    axes = figure.subplots()
    for index, (subject, by_case) in enumerate(values.items()):
        places = [cases.index(case) + (index - (len(values) - 1) / 2) * width for case in by_case]
        bars = axes.bar(places, list(by_case.values()), width, label=subject)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    if reference is not None:
        axes.axhline(reference, color="black", linestyle="--", linewidth=1)
    axes.set_xticks(range(len(cases)), cases)
    axes.set_ylabel(label)
    axes.set_title(title, fontsize=10)
    if values:
        axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
