"""How does the size of the buckets change a step? (Figures 7 and 8 of the paper, arXiv 2006.15704.)

    python -m bench.bucket_size --models transformer7m --mib 1,5,10,25,50

Every size of torch's DDP and of ddpcomm takes turns in the same processes (bench/steps.py), after their gradients were compared bit for
bit. 0 MiB is a bucket for each parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from bench.cli import parser, publish
from bench.models import CASES
from bench.report import Line, Table, line_chart
from bench.rows import Row
from bench.steps import Samples, added, conditions, line_of, milliseconds, prepare, row_maker, sizes_of, slowest, spread, take_turns
from bench.subjects import NONE, TORCH, engines, plain
from ddpcomm.layout import BYTES_PER_MB
from examples.arguments import positive, several
from tests.ranks import RankContext, RankPool

SIZES_MIB = "0,1,5,10,25,50"
SMALLEST_MIB = 1 / BYTES_PER_MB
"""A byte, which no parameter shares."""


def subject_name(engine: str, mib: float) -> str:
    return f"{engine}, {mib:g} MiB"


def measure(context: RankContext, case_name: str, transports: list[str], sizes_mib: list[float], rounds: int) -> Samples:
    """Runs on each rank: seconds a step, by subject."""
    found = engines(transports)
    subjects = {NONE: plain, TORCH: found[TORCH]()}
    for engine, wrap in found.items():
        for mib in sizes_mib:
            subjects[subject_name(engine, mib)] = wrap(bucket_cap_mb=max(mib, SMALLEST_MIB))
    return take_turns(prepare(context, CASES[case_name], subjects).steps(), rounds)


def rows_of(case_name: str, samples: Samples, transports: list[str], sizes_mib: list[float], ranks: int) -> list[Row]:
    """For each subject the step and, but for the plain model, what the exchange adds to it."""
    make = row_maker("bucket_size", case_name, ranks, sizes_of(CASES[case_name]))
    rows = [make(NONE, "step", samples[NONE])]
    for engine in engines(transports):
        for mib in sizes_mib:
            times = samples[subject_name(engine, mib)]
            common: dict[str, Any] = {"more_sizes": {"bucket_bytes": int(mib * BYTES_PER_MB)}}
            rows += [make(engine, "step", times, **common), make(engine, "overhead", added(times, samples[NONE]), **common)]
    return rows


def tables(rows: Sequence[Row]) -> list[Table]:
    found = []
    for case in dict.fromkeys(row.case for row in rows):
        chosen = [row for row in rows if row.case == case]
        overheads = {key(row): row for row in chosen if row.quantity == "overhead"}
        lines = []
        for row in chosen:
            if row.quantity == "step":
                name = row.subject if row.subject == NONE else subject_name(row.subject, row.sizes["bucket_bytes"] / BYTES_PER_MB)
                lines.append([name, *spread(row), *([*milliseconds(overheads[key(row)].p50)] if key(row) in overheads else [])])
        title = f"{case}, {chosen[0].sizes['bytes'] / BYTES_PER_MB:.0f} MiB of gradients; {conditions(chosen[0])}"
        found.append(Table(title, ["subject, size of a bucket", "step ms", "p20", "p80", "exchange adds ms"], lines))
    return found


def key(row: Row) -> tuple[str, int | None]:
    return row.subject, row.sizes.get("bucket_bytes")


def plot(rows: Sequence[Row], path: Path) -> None:
    panels: dict[str, list[Line]] = {}
    steps = [row for row in rows if row.quantity == "step"]
    for case, subject in dict.fromkeys((row.case, row.subject) for row in steps):
        chosen = [row for row in steps if (row.case, row.subject) == (case, subject)]
        places = [float(row.sizes["bucket_bytes"] // BYTES_PER_MB) for row in chosen if "bucket_bytes" in row.sizes]
        if subject == NONE:  # a line across
            sizes = [row.sizes["bucket_bytes"] / BYTES_PER_MB for row in steps if row.case == case and "bucket_bytes" in row.sizes]
            places, chosen = [min(sizes), max(sizes)], chosen * 2
        panels.setdefault(case, []).append(line_of(subject, places, chosen))
    title = f"Step over the size of a bucket, {rows[0].ranks} CPU ranks (median, p20 to p80)"
    line_chart(
        panels, path, title=title, x_label="bucket, MiB (0: one for each parameter)", y_label="step, ms", xscale="symlog", from_zero=True
    )


def main(arguments: list[str] | None = None) -> None:
    made = parser(__doc__, rounds=60, models="transformer7m,mlp8m", transports="process_group,shared_memory")
    made.add_argument("--mib", type=several(positive), default=SIZES_MIB, help="sizes of a bucket, with commas (default: %(default)s)")
    options = made.parse_args(arguments)
    rounds = min(options.steps, 6) if options.short else options.steps
    transports, sizes_mib = options.transport, options.mib
    rows: list[Row] = []
    with RankPool(options.ranks, timeout=timedelta(minutes=30)) as pool:
        for name in options.models:
            samples = slowest(pool.run(measure, name, transports, sizes_mib, rounds))
            rows += rows_of(name, samples, transports, sizes_mib, options.ranks)
    publish("bucket_size", rows, options.output, tables, plot)


if __name__ == "__main__":
    main()
