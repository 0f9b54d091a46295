"""Do several communicators, which take the buckets in turn, shorten a step? (Figure 12 of the paper, arXiv 2006.15704: 1, 3 and 5.)

    python -m bench.communicators --counts 1,3,5 --mib 1

On CPU ranks: each communicator over a Gloo group of its own, whose threads exchange at the same time, or over shared memory of its own,
which only the caller's thread moves on. (On GPUs the nccl transport has them built in: option `communicators`.) Small buckets, so that
several are under way. All subjects take turns in the same processes (bench/steps.py), after their gradients were compared with torch's bit
for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch import nn

import ddpcomm
from bench.cli import parser, publish
from bench.floors import Wrap
from bench.models import CASES
from bench.report import Line, Table, line_chart
from bench.round_robin import RoundRobin, use
from bench.rows import Row
from bench.steps import Samples, added, conditions, line_of, milliseconds, prepare, row_maker, sizes_of, slowest, spread, take_turns
from bench.subjects import NONE, TORCH, plain, torch_ddp
from ddpcomm.layout import BYTES_PER_MB
from examples.arguments import at_least, positive, several
from tests.ranks import RankContext, RankPool


def subject_name(transport: str, count: int) -> str:
    return f"ddpcomm {transport} x {count}"


def wrap_with(module: nn.Module, transport: str, groups: Sequence[dist.ProcessGroup], mib: float) -> nn.Module:
    model = ddpcomm.DistributedDataParallel(module, transport=transport, bucket_cap_mb=mib)
    use(model, RoundRobin([ddpcomm.create_communicator(group, "cpu", transport) for group in groups]))
    return model


def measure(context: RankContext, case_name: str, transports: list[str], counts: list[int], mib: float, rounds: int) -> Samples:
    """Runs on each rank: seconds a step, by subject."""
    groups = [dist.new_group(backend="gloo") for _ in range(max(counts))]
    subjects: dict[str, Wrap] = {NONE: plain, TORCH: torch_ddp(bucket_cap_mb=mib)}
    for transport in transports:
        for count in counts:
            subjects[subject_name(transport, count)] = partial(wrap_with, transport=transport, groups=groups[:count], mib=mib)
    return take_turns(prepare(context, CASES[case_name], subjects).steps(), rounds)


def rows_of(case_name: str, samples: Samples, transports: list[str], counts: list[int], mib: float, ranks: int) -> list[Row]:
    make = row_maker("communicators", case_name, ranks, {**sizes_of(CASES[case_name]), "bucket_bytes": int(mib * BYTES_PER_MB)})
    of_subject = {TORCH: (TORCH, 1)} | {subject_name(t, count): (f"ddpcomm {t}", count) for t in transports for count in counts}
    rows = [make(NONE, "step", samples[NONE])]
    for name, (subject, count) in of_subject.items():
        sizes = {"communicators": count}
        rows.append(make(subject, "step", samples[name], more_sizes=sizes))
        rows.append(make(subject, "overhead", added(samples[name], samples[NONE]), more_sizes=sizes))
    return rows


def tables(rows: Sequence[Row]) -> list[Table]:
    found = []
    for case in dict.fromkeys(row.case for row in rows):
        chosen = [row for row in rows if row.case == case]
        overheads = {(row.subject, row.sizes["communicators"]): row for row in chosen if row.quantity == "overhead"}
        plain_step = next(row for row in chosen if row.subject == NONE)
        lines = [[NONE, *spread(plain_step)]]
        for row in chosen:
            if row.quantity == "step" and row.subject != NONE:
                count = row.sizes["communicators"]
                lines.append([f"{row.subject} x {count}", *spread(row), *milliseconds(overheads[row.subject, count].p50)])
        title = f"{case}, buckets of {chosen[0].sizes['bucket_bytes'] / BYTES_PER_MB:g} MiB; {conditions(chosen[0])}"
        found.append(Table(title, ["subject x communicators", "step ms", "p20", "p80", "exchange adds ms"], lines))
    return found


def plot(rows: Sequence[Row], path: Path) -> None:
    panels: dict[str, list[Line]] = {}
    steps = [row for row in rows if row.quantity == "step" and row.subject != NONE]
    counts = [row.sizes["communicators"] for row in steps]
    for case, subject in dict.fromkeys((row.case, row.subject) for row in steps):
        chosen = [row for row in steps if (row.case, row.subject) == (case, subject)]
        places = [row.sizes["communicators"] for row in chosen]
        if subject == TORCH:  # it has one: a line across
            places, chosen = [min(counts), max(counts)], chosen * 2
        panels.setdefault(case, []).append(line_of(subject, places, chosen))
    title = f"Step over the number of communicators, {rows[0].ranks} CPU ranks (median, p20 to p80)"
    line_chart(panels, path, title=title, x_label="communicators", y_label="step, ms", from_zero=True)


def main(arguments: list[str] | None = None) -> None:
    made = parser(__doc__, rounds=60, models="transformer7m,mlp8m", transports="process_group,shared_memory")
    made.add_argument(
        "--counts", type=several(at_least(1)), default="1,3,5", help="numbers of communicators, with commas (default: %(default)s)"
    )
    made.add_argument("--mib", type=positive, default=1.0, help="size of a bucket (default: %(default)s)")
    options = made.parse_args(arguments)
    rounds = min(options.steps, 8) if options.short else options.steps
    transports, counts = options.transport, options.counts
    rows: list[Row] = []
    with RankPool(options.ranks, timeout=timedelta(minutes=30)) as pool:
        for name in options.models:
            samples = slowest(pool.run(measure, name, transports, counts, options.mib, rounds))
            rows += rows_of(name, samples, transports, counts, options.mib, options.ranks)
    publish("communicators", rows, options.output, tables, plot)


if __name__ == "__main__":
    main()
