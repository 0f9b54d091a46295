"""Where does a step's time go, with and without overlap? (Figure 6 of the paper, arXiv 2006.15704.)

    python -m bench.breakdown --models transformer7m --steps 60

A step is forward, backward, and the optimizer's step (SGD with momentum, at a rate of 0: weights stay as they are). Subjects take turns in
the same processes (bench/steps.py), after their gradients were compared bit for bit. Without overlap the exchange begins when backward has
ended, and is timed by itself. With overlap only what it adds to backward can be seen: backward less that of the plain model in the same
round. All parts of a step are those of the rank that took longest for it; the step also has zero_grad.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.cli import parser, publish
from bench.floors import Wrap
from bench.models import CASES, Case
from bench.report import Table, stacked_bars
from bench.rows import Row
from bench.steps import conditions, milliseconds, prepare, row_maker, sizes_of, take_turns
from bench.subjects import NONE, AfterBackward, engines, plain
from tests.ranks import RankContext, RankPool

FORWARD, BACKWARD, EXCHANGE, OPTIMIZER, STEP = PARTS = ("forward", "backward", "exchange", "optimizer", "step")
NO_OVERLAP = "no overlap"
Parts = dict[str, float]


class Clock:
    """The begin and the end of the last exchange after a backward."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def __call__(self) -> None:
        self._marks.append(time.perf_counter())

    def take(self) -> float:
        """Seconds between the marks, which are forgotten; 0 if there are none."""
        seconds = self._marks[-1] - self._marks[-2] if self._marks else 0.0
        self._marks.clear()
        return seconds


def timed_step(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, clock: Clock, batch: Tensor) -> Parts:
    clock.take()
    marks = [time.perf_counter()]
    loss = case.loss(model, batch)
    marks.append(time.perf_counter())
    loss.backward()
    marks.append(time.perf_counter())
    optimizer.step()
    marks.append(time.perf_counter())
    optimizer.zero_grad()
    exchange = clock.take()
    forward, backward, optimizer_step = (end - begin for begin, end in pairwise(marks))
    return {
        FORWARD: forward,
        BACKWARD: backward - exchange,
        EXCHANGE: exchange,
        OPTIMIZER: optimizer_step,
        STEP: time.perf_counter() - marks[0],
    }


def measure(context: RankContext, case_name: str, transports: list[str], rounds: int) -> dict[str, list[Parts]]:
    """Runs on each rank: the parts of each step, by subject."""
    case = CASES[case_name]
    clocks: dict[str, Clock] = {}
    subjects: dict[str, Wrap] = {NONE: plain}
    for engine, wrap in engines(transports).items():
        subjects[engine] = wrap()
    for transport in transports:
        clock = clocks[f"{transport}, {NO_OVERLAP}"] = Clock()
        subjects[f"{transport}, {NO_OVERLAP}"] = partial(AfterBackward, transport=transport, exchanged=clock)
    replicas = prepare(context, case, subjects)
    actions: dict[str, Callable[[], Parts]] = {}
    for name, model in replicas.models.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        actions[name] = partial(timed_step, case, model, optimizer, clocks.get(name, Clock()), replicas.batch)
    take_turns(actions, 2)  # momentum is made in the first step
    return take_turns(actions, rounds)


def of_slowest(by_rank: Sequence[dict[str, list[Parts]]]) -> dict[str, list[Parts]]:
    """Round by round, the parts of the rank whose step took longest."""
    return {
        name: [max(parts, key=lambda each: each[STEP]) for parts in zip(*[samples[name] for samples in by_rank], strict=True)]
        for name in by_rank[0]
    }


def rows_of(case_name: str, samples: dict[str, list[Parts]], ranks: int) -> list[Row]:
    """A row for each part of each subject's step. With overlap, exchange is what it adds to backward."""
    make = row_maker("breakdown", case_name, ranks, sizes_of(CASES[case_name]))
    rows = []
    for name, steps in samples.items():
        overlaps = name != NONE and NO_OVERLAP not in name
        for part in PARTS:
            values = [parts[part] for parts in steps]
            if overlaps and part in (BACKWARD, EXCHANGE):
                without = [parts[BACKWARD] for parts in samples[NONE]]
                whole = [parts[BACKWARD] for parts in steps]
                values = without if part == BACKWARD else [a - b for a, b in zip(whole, without, strict=True)]
            rows.append(make(name, part, values, details={"overlaps": overlaps}))
    return rows


def tables(rows: Sequence[Row]) -> list[Table]:
    found = []
    for case in dict.fromkeys(row.case for row in rows):
        medians = {(row.subject, row.quantity): row.p50 for row in rows if row.case == case}
        lines = [[name, *milliseconds(*(medians[name, part] for part in PARTS))] for name in dict.fromkeys(name for name, _ in medians)]
        title = f"{case}: medians in ms; exchange: the part that is not hidden behind backward; {conditions(rows[0])}"
        found.append(Table(title, ["subject", *PARTS], lines))
    return found


def plot(rows: Sequence[Row], path: Path) -> None:
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        if row.quantity != STEP:
            panels.setdefault(row.case, {}).setdefault(row.subject, {})[row.quantity] = max(row.p50 * 1e3, 0.0)
    title = f"Parts of a step, {rows[0].ranks} CPU ranks (medians; exchange: what backward does not hide)"
    stacked_bars(panels, path, title=title, label="ms")


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, rounds=60, models="transformer7m,mlp8m", transports="process_group,shared_memory").parse_args(arguments)
    rounds = min(options.steps, 12) if options.short else options.steps
    rows: list[Row] = []
    with RankPool(options.ranks, timeout=timedelta(minutes=30)) as pool:
        for name in options.models:
            rows += rows_of(name, of_slowest(pool.run(measure, name, options.transport, rounds)), options.ranks)
    publish("breakdown", rows, options.output, tables, plot)


if __name__ == "__main__":
    main()
