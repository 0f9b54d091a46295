"""What does the exchange of gradients add to a step, and how much of what torch's DDP adds is that?

    python -m bench.step_time --models mlp8m,convnet --steps 100 --transport process_group

A step is forward, backward and zero_grad; bench/steps.py says how steps are timed. A subject's overhead is the median, over rounds, of its
step less that of the step without any exchange in the same round; its ratio is that over the overhead of torch's best mode for the model.
Gradients are compared with torch's, bit for bit, before anything is timed. Two subjects are floors without overlap: "all-reduce alone",
one all-reduce of as many bytes at the end of backward, and "bare exchange", which also looks at each gradient and copies it in and out, and
checks nothing (bench/floors.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np

from bench.cli import parser, publish
from bench.devices import BACKENDS, CPU, take
from bench.floors import ALONE, BARE
from bench.models import CASES, Case
from bench.report import Table, bar_chart
from bench.rivals import absent, rivals
from bench.rows import Row
from bench.steps import (
    WARM_UP_STEPS,
    Samples,
    added,
    check,
    conditions,
    milliseconds,
    prepare,
    row_maker,
    sizes_of,
    slowest,
    spread,
    step,
    take_turns,
)
from bench.subjects import NONE, TORCH_MODES, wrappers
from tests.ranks import RankContext, RankPool

__all__ = ["check", "main", "plot", "rows_of", "run", "slowest", "step", "tables"]


def measure(context: RankContext, case_name: str, transports: list[str], steps: int, warm_up_steps: int, device: str) -> Samples:
    """Runs on each rank: seconds a step, by subject."""
    subjects = {**wrappers(transports), **rivals(device)}
    return take_turns(prepare(context, CASES[case_name], subjects, warm_up_steps, take(device, context.rank)).steps(), steps)


def rows_of(case: Case, samples: Samples, ranks: int, device: str = CPU) -> list[Row]:
    """Two rows a subject: the step, and what the exchange adds to it."""
    make = row_maker("step_time", case.name, ranks, sizes_of(case), device)
    overheads = {name: added(times, samples[NONE]) for name, times in samples.items()}
    best = min(float(np.median(overheads[name])) for name in TORCH_MODES)
    rows = []
    for name, times in samples.items():
        rows.append(make(name, "step", times))
        if name != NONE:
            ratio = float(np.median(overheads[name])) / best if best > 0 else None  # None: too few rounds to tell
            rows.append(make(name, "overhead", overheads[name], details={"ratio_to_best_torch": ratio}))
    return rows


def run(
    models: list[str], transports: list[str], steps: int, ranks: int, warm_up_steps: int = WARM_UP_STEPS, device: str = CPU
) -> list[Row]:
    rows = []
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns that find_unused_parameters finds none
    with RankPool(ranks, timeout=timedelta(minutes=30), backend=BACKENDS[device]) as pool:
        for name in models:
            found = rows_of(CASES[name], slowest(pool.run(measure, name, transports, steps, warm_up_steps, device)), ranks, device)
            for table in tables(found):
                table.show()
            rows += found
    return rows


def tables(rows: Sequence[Row]) -> list[Table]:
    """One a model."""
    return [table([row for row in rows if row.case == case]) for case in dict.fromkeys(row.case for row in rows)]


def table(rows: Sequence[Row]) -> Table:
    steps = {row.subject: row for row in rows if row.quantity == "step"}
    overheads = {row.subject: row for row in rows if row.quantity == "overhead"}
    lines = []
    for name, row in steps.items():
        line = [name, *spread(row)]
        if overhead := overheads.get(name):
            ratio = overhead.details["ratio_to_best_torch"]
            line += [*milliseconds(overhead.p50), "-" if ratio is None else f"{ratio:.2f}"]
        lines.append(line)
    title = f"{rows[0].case}: {CASES[rows[0].case].stresses}; {conditions(rows[0])}"
    return Table(title, ["subject", "step ms", "p20", "p80", "exchange adds ms", "of torch's best"], lines)


def plot(rows: Sequence[Row], path: Path) -> None:
    ratios: dict[str, dict[str, float]] = {}
    for row in rows:
        if (
            row.quantity == "overhead"
            and row.subject.startswith(("ddpcomm", ALONE, BARE))
            and row.details["ratio_to_best_torch"] is not None
        ):
            ratios.setdefault(row.subject, {})[row.case] = row.details["ratio_to_best_torch"]
    title = (
        f"What the exchange adds to a step on {rows[0].device.upper()}, {rows[0].ranks} ranks (torch DDP's best mode = 1; less is better)"
    )
    bar_chart(ratios, path, title=title, label="overhead / overhead of torch's best mode", reference=1.0)


def main(arguments: list[str] | None = None) -> None:
    made = parser(__doc__, rounds=100, models=",".join(CASES), transports="auto")
    made.add_argument("--device", choices=list(BACKENDS), default=CPU, help="cuda: a GPU for each rank, over NCCL (default: %(default)s)")
    options = made.parse_args(arguments)
    if left_out := absent(options.device):
        sys.stderr.write(f"left out: {left_out}\n")
    steps, warm_up_steps = (min(options.steps, 7), 2) if options.short else (options.steps, WARM_UP_STEPS)
    rows = run(options.models, options.transport, steps, options.ranks, warm_up_steps, options.device)
    publish("step_time", rows, options.output, None, plot)


if __name__ == "__main__":
    main()
