"""What does it save, and what does it cost in loss, to synchronise every n-th step only? (Figures 10 and 11 of arXiv 2006.15704.)

    python -m bench.accumulation --every 1,2,4,8 --training-steps 400

Time: n forwards and backwards, all but the last under `no_sync`, as one cycle; a row says how long one of its steps takes, on average.
Cycles take turns in the same processes (bench/steps.py), after the gradients of each were compared with torch's bit for bit. Loss: a small
GPT is trained on the standard library's source, each n on the same batches, its optimizer stepping after every cycle; ddpcomm's losses and
torch's must be the same bits.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.cli import parser, publish
from bench.floors import Wrap
from bench.models import CASES, Case
from bench.report import Line, Table, line_chart
from bench.rows import Row
from bench.steps import Samples, conditions, line_of, prepare, row_maker, sizes_of, slowest, spread, take_turns
from bench.subjects import NONE, TORCH, engines, gradients, plain
from examples.arguments import at_least, several
from examples.corpus import Corpus, Windows, load_corpus
from examples.model import GPT, GPTConfig
from examples.training import Settings, batches
from tests.ranks import RankContext, RankPool

CONFIG = GPTConfig(context=64, width=64, heads=2, layers=2)
SETTINGS = Settings(batch_size=8, learning_rate=3e-3)
TRAINING = "gpt on the standard library"
WINDOW = 32
"""Steps over which the curve of losses is averaged."""
Losses = dict[tuple[str, int], list[float]]


def cycle(model: nn.Module, loss: Callable[[int], Tensor], every: int) -> float:
    """`every` forwards and backwards, of which the last synchronises; seconds of one."""
    started = time.perf_counter()
    for number in range(every):
        local = model.no_sync() if number < every - 1 and isinstance(model, nn.parallel.DistributedDataParallel) else nullcontext()
        with local:
            (loss(number) / every).backward()
    return (time.perf_counter() - started) / every


def timed_cycle(case: Case, model: nn.Module, batch: Tensor, every: int) -> float:
    seconds = cycle(model, lambda _: case.loss(model, batch), every)
    model.zero_grad()
    return seconds


def check(case: Case, models: dict[str, nn.Module], batch: Tensor, every: int) -> None:
    """
    Raises:
        ValueError: what a subject has after a cycle differs from what torch's DDP has.
    """
    found = {}
    for name, model in models.items():
        cycle(model, partial(lambda model, _: case.loss(model, batch), model), every)
        found[name] = gradients(model)
        model.zero_grad()
    for name, values in found.items():
        if not all(torch.equal(value, expected) for value, expected in zip(values, found[TORCH], strict=True)):
            raise ValueError(f"{name} differs from torch when it synchronises every {every} steps")


def measure(context: RankContext, case_name: str, transports: list[str], everies: list[int], rounds: int) -> Samples:
    """Runs on each rank: seconds a step, by subject."""
    case = CASES[case_name]
    subjects: dict[str, Wrap] = {NONE: plain, **{name: wrap() for name, wrap in engines(transports).items()}}
    replicas = prepare(context, case, subjects)
    synchronizing = {name: model for name, model in replicas.models.items() if name != NONE}
    actions = {}
    for every in everies:
        check(case, synchronizing, replicas.batch, every)
        for name, model in synchronizing.items():
            actions[subject_name(name, every)] = partial(timed_cycle, case, model, replicas.batch, every)
    return take_turns(actions, rounds)


def train(context: RankContext, transports: list[str], everies: list[int], steps: int) -> Losses:
    """Runs on each rank: the mean over ranks of each step's loss, by subject and n."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    source = batches(Windows(corpus().training, CONFIG.context), SETTINGS)
    batch_of_step = [next(source) for _ in range(steps)]
    return {
        (name, every): train_one(wrap()(copy.deepcopy(model)), batch_of_step, every)
        for every in everies
        for name, wrap in engines(transports).items()
    }


def train_one(model: nn.Module, batch_of_step: Sequence[Tensor], every: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=SETTINGS.learning_rate)
    losses: list[Tensor] = []

    def loss(batch: Tensor) -> Tensor:
        value: Tensor = model(batch[:, :-1], batch[:, 1:])
        losses.append(value.detach())
        return value

    for start in range(0, len(batch_of_step) - every + 1, every):
        cycle(model, lambda number, start=start: loss(batch_of_step[start + number]), every)  # type: ignore[misc]
        optimizer.step()
        optimizer.zero_grad()
    means = torch.stack(losses)
    dist.all_reduce(means)
    return (means / dist.get_world_size()).tolist()


@cache
def corpus() -> Corpus:
    return load_corpus()


def subject_name(engine: str, every: int) -> str:
    return f"{engine}, every {every}"


def time_rows(case_name: str, samples: Samples, transports: list[str], everies: list[int], ranks: int) -> list[Row]:
    make = row_maker("accumulation", case_name, ranks, sizes_of(CASES[case_name]))
    return [
        make(name, "step", samples[subject_name(name, every)], more_sizes={"every": every})
        for name in engines(transports)
        for every in everies
    ]


def loss_rows(losses: Losses, ranks: int) -> list[Row]:
    """The losses of the last quarter of a training, with the whole curve in `details`.

    Raises:
        ValueError: ddpcomm's losses are not those of torch's DDP.
    """
    make = row_maker("accumulation", TRAINING, ranks, {"parameters": sum(p.numel() for p in GPT(CONFIG).parameters())})
    rows = []
    for (name, every), values in losses.items():
        if values != losses[TORCH, every]:
            raise ValueError(f"{name}, synchronising every {every} steps, has other losses than torch")
        details = {"curve": smooth(values), "window": WINDOW}
        common: dict[str, Any] = {"unit": "nats/byte", "more_sizes": {"every": every}, "details": details}
        rows.append(make(name, "loss", values[-max(1, len(values) // 4) :], **common))
    return rows


def smooth(values: Sequence[float]) -> list[float]:
    """Means of a window each."""
    return [round(float(np.mean(values[start : start + WINDOW])), 4) for start in range(0, len(values), WINDOW)]


def tables(rows: Sequence[Row]) -> list[Table]:
    found = []
    for case in dict.fromkeys(row.case for row in rows):
        chosen = [row for row in rows if row.case == case]
        loss = chosen[0].quantity == "loss"
        lines = []
        for row in chosen:
            shown = [f"{row.p50:.3f}", f"{row.p20:.3f}", f"{row.p80:.3f}"] if loss else spread(row)
            lines.append([subject_name(row.subject, row.sizes["every"]), *shown])
        what = "loss in the last quarter of training" if loss else "time of a step"
        found.append(Table(f"{case}: {what}; {conditions(chosen[0])}", ["subject", "nats/byte" if loss else "ms", "p20", "p80"], lines))
    return found


def plot(rows: Sequence[Row], path: Path) -> None:
    panels: dict[str, list[Line]] = {}
    for case, subject in dict.fromkeys((row.case, row.subject) for row in rows if row.quantity == "step"):
        chosen = [row for row in rows if (row.case, row.subject) == (case, subject)]
        panels.setdefault(f"{case}: ms over n", []).append(line_of(subject, [row.sizes["every"] for row in chosen], chosen))
    for row in rows:
        if row.quantity == "loss" and row.subject == TORCH:  # the others have the same
            curve, window = row.details["curve"], row.details["window"]
            line = Line(f"n = {row.sizes['every']}", [(index + 0.5) * window for index in range(len(curve))], curve)
            panels.setdefault(f"{TRAINING}: nats/byte over steps", []).append(line)
    title = f"Synchronising every n-th step, {rows[0].ranks} CPU ranks"
    line_chart(panels, path, title=title, x_label="", y_label="")


def main(arguments: list[str] | None = None) -> None:
    made = parser(__doc__, rounds=30, models="transformer7m,mlp8m", transports="process_group,shared_memory")
    made.add_argument("--every", type=several(at_least(1)), default="1,2,4,8", help="values of n, with commas (default: %(default)s)")
    made.add_argument("--training-steps", type=at_least(0), default=1024, help="forwards of each training; 0: none (default: %(default)s)")
    options = made.parse_args(arguments)
    rounds = min(options.steps, 4) if options.short else options.steps
    training_steps = min(options.training_steps, 160) if options.short else options.training_steps
    transports, everies = options.transport, options.every
    rows: list[Row] = []
    with RankPool(options.ranks, timeout=timedelta(minutes=30)) as pool:
        for name in options.models:
            rows += time_rows(name, slowest(pool.run(measure, name, transports, everies, rounds)), transports, everies, options.ranks)
        if training_steps:
            rows += loss_rows(pool.run(train, transports, everies, training_steps)[0], options.ranks)
    publish("accumulation", rows, options.output, tables, plot)


if __name__ == "__main__":
    main()
