"""Does a process hold more and more, step by step, or wrap by wrap?

    python -m bench.soak --steps 20000 --transport shared_memory,process_group

A small model is trained in each way that a step can go: gradients copied and as views, accumulated under `no_sync`, with a timeline on and
off, in `join` with uneven inputs, with steps that are skipped because of an inf. What the process holds is looked at after the warm-up and
then `--looks` times; the growth is from the first look to the last. Then a module is wrapped and unwrapped, `--wraps` times. Python's
collector is off between the looks, so that objects in cycles can be counted. Exits with what has grown.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from bench import cli
from bench.report import Line, Table, line_chart
from bench.rows import Row, percentiles
from examples.arguments import at_least, one_of, several
from tests.faults.resources import WAYS, Usage, soak, wrap_and_unwrap
from tests.ranks import RankPool

WRAPS = "wrap and unwrap"
UNITS = {"rss_bytes": "B", "shared_bytes": "B"}
MOST_GROWTH = {"rss_bytes": 8 << 20, "shared_bytes": 0, "python_blocks": 2000}
"""What may be more in the end; of everything else nothing may. Python's and the C library's allocators never give everything back."""


def rows_of(way: str, transport: str, count: int, by_rank: Sequence[Sequence[Usage]]) -> list[Row]:
    """A row for each thing that is held, of the rank on which it grew most."""
    rows = []
    for name in asdict(by_rank[0][0]):
        looks = max(([getattr(usage, name) for usage in usages] for usages in by_rank), key=lambda values: values[-1] - values[0])
        if name == "garbage":
            looks[0] = 0  # the warm-up's: torch imports some of its parts late
        details: dict[str, Any] = {"looks": looks, "growth": looks[-1] - looks[0], "steps": count}
        unit, ranks = UNITS.get(name, "objects"), len(by_rank)
        rows.append(Row("soak", way, f"ddpcomm {transport}", name, unit, ranks, "float32", {}, **percentiles(looks), details=details))
        if name == "rss_bytes":
            sys.stderr.write(f"{way}, ddpcomm {transport}: resident memory grew by {details['growth']} bytes in {count}\n")
    return rows


def grown(rows: Sequence[Row]) -> list[str]:
    """What has grown beyond what it may."""
    return [
        f"{row.case}, {row.subject}: {row.quantity} grew by {row.details['growth']} in {row.details['steps']}"
        for row in rows
        if row.details["growth"] > MOST_GROWTH.get(row.quantity, 0)
    ]


def tables(rows: Sequence[Row]) -> list[Table]:
    names = list(dict.fromkeys(row.quantity for row in rows))
    lines = []
    for case, subject in dict.fromkeys((row.case, row.subject) for row in rows):
        own = {row.quantity: row for row in rows if (row.case, row.subject) == (case, subject)}
        count = str(own[names[0]].details["steps"])
        lines.append(
            [f"{case}, {subject}", count, *(f"{own[name].details['looks'][0]}, {own[name].details['growth']:+d}" for name in names)]
        )
    title = f"What a process holds after the warm-up, and its growth until the end; {rows[0].ranks} CPU ranks, the worse one"
    return [Table(title, ["", "times", *(name.replace("_", " ") for name in names)], lines)]


def plot(rows: Sequence[Row], path: Path) -> None:
    panels: dict[str, list[Line]] = {}
    for row in rows:
        if row.quantity == "rss_bytes":
            looks = row.details["looks"]
            x = [row.details["steps"] * index / (len(looks) - 1) for index in range(len(looks))]
            panels.setdefault(row.subject, []).append(Line(row.case, x, [(value - looks[0]) / 2**20 for value in looks]))
    line_chart(panels, path, title="Growth of resident memory (CPU ranks)", x_label="steps, or wraps", y_label="MiB")


def main(arguments: list[str] | None = None) -> None:
    parser = cli.parser(__doc__, rounds=20000, transports="shared_memory,process_group")
    parser.add_argument(
        "--ways", type=several(one_of(WAYS), least=0), default=",".join(WAYS), help="of training, some of %(default)s; none is fine, too"
    )
    parser.add_argument("--wraps", type=at_least(1), default=1000, help="how often to wrap and unwrap (default: %(default)s)")
    parser.add_argument("--looks", type=at_least(1), default=10, help="at what is held, after the first (default: %(default)s)")
    options = parser.parse_args(arguments)
    steps, wraps, looks = (400, 40, 2) if options.short else (options.steps, options.wraps, options.looks)
    warm_up, limit = max(steps // 10, 100), timedelta(hours=2)
    rows: list[Row] = []
    with RankPool(options.ranks, timeout=limit) as pool:
        for transport in options.transport:
            for way in options.ways:
                rows += rows_of(way, transport, steps, pool.run(soak, transport, way, warm_up, steps, looks))
            rows += rows_of(WRAPS, transport, wraps, pool.run(wrap_and_unwrap, transport, max(wraps // 10, 8), wraps, looks))
    cli.publish("soak", rows, options.output, tables, plot)
    found = grown(rows)
    sys.exit("\n".join(found) if found else 0)


if __name__ == "__main__":
    main()
