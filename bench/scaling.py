"""How does a step grow with the number of ranks? (Figure 9 of the paper, arXiv 2006.15704.)

    python -m bench.scaling --ranks 1,2,4,8 --models transformer7m

Measured on CPU ranks of this machine: where there are more ranks than cores, they share these, and the plain model's step grows with them;
so the step without any exchange is shown beside the others. Each rank has a batch of its own, of the same size whatever the number of
ranks. Subjects take turns in the same processes (bench/steps.py), after their gradients were checked. What goes beyond is simulated, where
ddpcomm has its simulator, and marked so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from bench.cli import parser, publish
from bench.floors import Wrap
from bench.models import CASES
from bench.report import SIMULATED, Line, Table, line_chart
from bench.rows import Row
from bench.simulated import simulated_rows
from bench.steps import Samples, added, conditions, line_of, milliseconds, prepare, row_maker, sizes_of, slowest, spread, take_turns
from bench.subjects import NONE, engines, plain
from examples.arguments import at_least, several
from tests.ranks import RankContext, RankPool


def measure(context: RankContext, case_name: str, transports: list[str], rounds: int) -> Samples:
    """Runs on each rank: seconds a step, by subject."""
    subjects: dict[str, Wrap] = {NONE: plain, **{name: wrap() for name, wrap in engines(transports).items()}}
    return take_turns(prepare(context, CASES[case_name], subjects, warm_up_steps=2).steps(), rounds)


def rows_of(case_name: str, samples: Samples, ranks: int) -> list[Row]:
    make = row_maker("scaling", case_name, ranks, sizes_of(CASES[case_name]))
    rows = []
    for name, times in samples.items():
        rows.append(make(name, "step", times))
        if name != NONE:
            rows.append(make(name, "overhead", added(times, samples[NONE])))
    return rows


def tables(rows: Sequence[Row]) -> list[Table]:
    """One for each model."""
    found = []
    overheads = {(row.case, row.ranks, row.subject): row for row in rows if row.quantity == "overhead"}
    for case in dict.fromkeys(row.case for row in rows):
        chosen = [row for row in rows if row.case == case and row.quantity == "step"]
        lines = []
        for row in chosen:
            overhead = overheads.get((case, row.ranks, row.subject))
            lines.append([f"{row.ranks}, {row.subject}", *spread(row), *(milliseconds(overhead.p50) if overhead else [])])
        how = f"up to {conditions(chosen[-1])}" if chosen[0].measured else f"{SIMULATED} for {chosen[0].device}, not measured"
        found.append(Table(f"{case}; {how}", ["ranks, subject", "step ms", "p20", "p80", "exchange adds ms"], lines))
    return found


def plot(rows: Sequence[Row], path: Path) -> None:
    panels: dict[str, list[Line]] = {}
    steps = [row for row in rows if row.quantity == "step"]
    for case, subject, measured in dict.fromkeys((row.case, row.subject, row.measured) for row in steps):
        chosen = [row for row in steps if (row.case, row.subject, row.measured) == (case, subject, measured)]
        panels.setdefault(case, []).append(line_of(subject, [row.ranks for row in chosen], chosen))
    simulated = "; dashed: simulated, on GPUs" if any(not row.measured for row in rows) else ""
    title = f"Step over the number of CPU ranks, which share {rows[0].machine['cores']} cores (median, p20 to p80){simulated}"
    line_chart(panels, path, title=title, x_label="ranks", y_label="step, ms", xscale="log", from_zero=True)


def main(arguments: list[str] | None = None) -> None:
    made = parser(__doc__, rounds=30, models="convnet,transformer7m", transports="process_group,shared_memory", ranks=None)
    made.add_argument("--ranks", type=several(at_least(1)), default="1,2,4,8", help="numbers of ranks, with commas (default: %(default)s)")
    options = made.parse_args(arguments)
    rounds = min(options.steps, 5) if options.short else options.steps
    rows: list[Row] = []
    for ranks in options.ranks:
        with RankPool(ranks, timeout=timedelta(minutes=30)) as pool:
            for name in options.models:
                rows += rows_of(name, slowest(pool.run(measure, name, options.transport, rounds)), ranks)
    beyond = simulated_rows("scaling")
    if not beyond:
        sys.stderr.write("measured only: this version of ddpcomm has no simulator\n")
    rows += beyond
    publish("scaling", rows, options.output, tables, plot)


if __name__ == "__main__":
    main()
