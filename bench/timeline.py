"""What does recording a timeline cost a step?

    python -m bench.timeline --models mlp8m,convnet --steps 200

One pair of processes holds each model once, wrapped by ddpcomm, and runs steps with and without a timeline in turn, whichever of the two is
first taking turns too; a step is forward, backward and zero_grad, and counts as long as the slower rank took. A barrier comes before each.
The cost is the median, over rounds, of the step with a timeline less that without. Gradients are compared bit for bit before anything is
timed. At the end a timeline of some steps is written for each model and transport, to be looked at with `python -m ddpcomm timeline`.
"""

from __future__ import annotations

import argparse
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import ddpcomm
from bench.models import CASES, Case
from bench.report import bar_chart, show_table
from bench.rows import Row, percentiles, write_rows
from bench.subjects import TRANSPORTS, gradients
from ddpcomm.timeline import Timeline
from examples.arguments import at_least, directory, one_of, several
from tests.ranks import RankContext, RankPool

WARM_UP_STEPS = 5
SHOWN_STEPS = 20
BUCKET_MB = 4  # small ones: a timeline costs something a bucket
WITHOUT, WITH = "without", "with a timeline"


def measure(context: RankContext, name: str, transport: str, steps: int, output: Path) -> dict[str, list[float]]:
    """Runs on each rank: seconds a step, by subject."""
    case = CASES[name]
    torch.manual_seed(0)
    ddp = ddpcomm.DistributedDataParallel(case.build(), transport=transport, bucket_cap_mb=BUCKET_MB)
    torch.manual_seed(1 + context.rank)
    batch = case.batch()
    timeline = Timeline(ddp._reducer)
    for _ in range(WARM_UP_STEPS):
        step(case, ddp, batch)
    check(case, ddp, batch, timeline)
    samples: dict[str, list[float]] = {WITHOUT: [], WITH: []}
    for number in range(steps):
        for subject in (WITHOUT, WITH) if number % 2 else (WITH, WITHOUT):
            dist.barrier()
            if subject == WITH:
                timeline.start()
            samples[subject].append(step(case, ddp, batch))
            timeline.stop()
    with ddp.timeline(output / f"{name}-{transport}.json"):
        for _ in range(SHOWN_STEPS):
            step(case, ddp, batch)
    ddp.close()
    return samples


def step(case: Case, ddp: nn.Module, batch: torch.Tensor) -> float:
    started = time.perf_counter()
    case.loss(ddp, batch).backward()
    ddp.zero_grad()
    return time.perf_counter() - started


def check(case: Case, ddp: nn.Module, batch: torch.Tensor, timeline: Timeline) -> None:
    """
    Raises:
        ValueError: gradients differ with a timeline, or it recorded nothing.
    """
    found = []
    for recorded in (False, True):
        if recorded:
            timeline.start()
        case.loss(ddp, batch).backward()
        timeline.stop()
        found.append(gradients(ddp))
        ddp.zero_grad()
    if not all(map(torch.equal, *found)):
        raise ValueError(f"{case.name}: gradients differ with a timeline")
    if timeline.trace().steps != 1:
        raise ValueError(f"{case.name}: the timeline recorded nothing")


def rows_of(case: Case, transport: str, by_rank: list[dict[str, list[float]]]) -> list[Row]:
    """The step without, and what a timeline adds."""
    parameters = list(case.build().parameters())
    sizes = {"tensors": len(parameters), "bytes": sum(p.nbytes for p in parameters)}
    slowest = {subject: np.max([samples[subject] for samples in by_rank], axis=0) for subject in (WITHOUT, WITH)}
    added = np.subtract(slowest[WITH], slowest[WITHOUT])
    common: dict[str, Any] = {
        "bench": "timeline",
        "case": case.name,
        "unit": "s",
        "ranks": len(by_rank),
        "dtype": "float32",
        "sizes": sizes,
    }
    share = float(np.median(added) / np.median(slowest[WITHOUT]))
    return [
        Row(subject=transport, quantity="step", **percentiles(slowest[WITHOUT].tolist()), **common),
        Row(subject=transport, quantity="timeline", details={"share": share}, **percentiles(added.tolist()), **common),
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", type=several(one_of(CASES)), default=",".join(CASES), help="some of %(default)s")
    parser.add_argument(
        "--transport", type=several(one_of(TRANSPORTS)), default="process_group,shared_memory", help="(default: %(default)s)"
    )
    parser.add_argument("--steps", type=at_least(1), default=200, help="rounds to measure (default: %(default)s)")
    parser.add_argument("--ranks", type=at_least(1), default=2)
    parser.add_argument("--short", action="store_true", help="few rounds: shows that it works, says little")
    parser.add_argument("--output", type=directory, default="runs/bench", help="where the rows and the picture go (default: %(default)s)")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    with RankPool(options.ranks, timeout=timedelta(minutes=10)) as pool:
        for name in options.models:
            for transport in options.transport:
                steps = min(options.steps, 10) if options.short else options.steps
                by_rank = pool.run(measure, name, transport, steps, options.output)
                rows += rows_of(CASES[name], transport, by_rank)
    lines, shares = [], dict[str, dict[str, float]]()
    for plain, added in zip(rows[::2], rows[1::2], strict=True):
        share = added.details["share"]
        times = (plain.p50 * 1e3, added.p50 * 1e3, added.p20 * 1e3, added.p80 * 1e3)
        lines.append([f"{plain.case}, {plain.subject}", *(f"{value:.3f}" for value in times), f"{share:.2%}"])
        shares.setdefault(plain.subject, {})[plain.case] = share * 100
    title = f"what a timeline adds to a step; CPU, {options.ranks} ranks, {rows[0].count} rounds"
    show_table(title, ["model, transport", "step ms", "adds ms", "p20", "p80", "of the step"], lines)
    write_rows(rows, options.output / "timeline.jsonl")
    title = f"What a timeline adds to a step (CPU, {options.ranks} ranks)"
    bar_chart(shares, options.output / "timeline.png", title=title, label="% of the step", reference=1.0)


if __name__ == "__main__":
    main()
