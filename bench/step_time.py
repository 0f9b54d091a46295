"""What does the exchange of gradients add to a step, and how much of what torch's DDP adds is that?

    python -m bench.step_time --models mlp8m,convnet --steps 100 --transport process_group

One pair of processes holds all subjects and runs a step of each in turn, in an order that rotates; a step is forward, backward and
zero_grad, and counts as long as the slower rank took. A barrier comes before each, so that no subject pays for another's lag. A
subject's overhead is the median, over rounds, of its step less that of the step without any exchange in the same round; its ratio is
that over the overhead of torch's best mode for the model. Gradients are compared with torch's, bit for bit, before anything is timed.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from bench.models import CASES, Case
from bench.report import bar_chart, show_table
from bench.rows import Row, percentiles, write_rows
from bench.subjects import NONE, TORCH_MODES, TRANSPORTS, gradients, twin, wrappers
from tests.ranks import RankContext, RankPool

WARM_UP_STEPS = 5  # buckets are laid out anew after the first backward
Samples = dict[str, list[float]]


def measure(context: RankContext, case_name: str, transports: list[str], steps: int) -> Samples:
    """Runs on each rank: seconds a step, by subject."""
    case = CASES[case_name]
    torch.manual_seed(0)
    model = case.build()
    torch.manual_seed(1 + context.rank)
    batch = case.batch()
    subjects = {name: wrap(twin(model)) for name, wrap in wrappers(transports).items()}
    check(case, subjects, batch)
    for _ in range(WARM_UP_STEPS):
        for subject in subjects.values():
            step(case, subject, batch)
    samples: Samples = {name: [] for name in subjects}
    names = list(subjects)
    for number in range(steps):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            samples[name].append(step(case, subjects[name], batch))
    return samples


def step(case: Case, model: nn.Module, batch: torch.Tensor) -> float:
    started = time.perf_counter()
    case.loss(model, batch).backward()
    model.zero_grad()
    return time.perf_counter() - started


def check(case: Case, subjects: dict[str, nn.Module], batch: torch.Tensor) -> None:
    """Every subject's gradients, in the first backwards, have the bits of torch's. Those of the plain model average to nearly the same."""
    for round_number in range(2):  # the second has the buckets in their final order
        found = {}
        for name, subject in subjects.items():
            case.loss(subject, batch).backward()
            found[name] = gradients(subject)
            subject.zero_grad()
        for own in found[NONE]:
            dist.all_reduce(own)
        for name, values in found.items():
            for index, (value, expected) in enumerate(zip(values, found["torch"], strict=True)):
                if name == NONE:
                    torch.testing.assert_close(value / dist.get_world_size(), expected)
                elif not torch.equal(value, expected):
                    raise ValueError(f"backward {round_number + 1}: {name} differs from torch in gradient {index} of {case.name}")


def rows_of(case: Case, samples: Samples, ranks: int) -> list[Row]:
    """Two rows a subject: the step, and what the exchange adds to it."""
    parameters = list(case.build().parameters())
    sizes = {
        "tensors": len(parameters),
        "parameters": sum(p.numel() for p in parameters),
        "bytes": sum(p.numel() * p.element_size() for p in parameters),
    }
    common: dict[str, Any] = {"bench": "step_time", "case": case.name, "unit": "s", "ranks": ranks, "dtype": "float32", "sizes": sizes}
    added = {name: np.subtract(times, samples[NONE]).tolist() for name, times in samples.items()}
    best = min(float(np.median(added[name])) for name in TORCH_MODES)
    rows = []
    for name, times in samples.items():
        rows.append(Row(subject=name, quantity="step", **percentiles(times), **common))
        if name != NONE:
            ratio = float(np.median(added[name])) / best if best > 0 else None  # None: too few rounds to tell
            rows.append(
                Row(subject=name, quantity="overhead", **percentiles(added[name]), details={"ratio_to_best_torch": ratio}, **common)
            )
    return rows


def slowest(by_rank: Sequence[Samples]) -> Samples:
    """The longest of the ranks' times, step by step."""
    return {name: np.max([samples[name] for samples in by_rank], axis=0).tolist() for name in by_rank[0]}


def run(models: list[str], transports: list[str], steps: int, ranks: int) -> list[Row]:
    rows = []
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns that find_unused_parameters finds none
    with RankPool(ranks, timeout=timedelta(minutes=30)) as pool:
        for name in models:
            samples = slowest(pool.run(measure, name, transports, steps))
            rows += rows_of(CASES[name], samples, ranks)
            report(name, rows)
    return rows


def report(case: str, rows: list[Row]) -> None:
    steps = {row.subject: row for row in rows if row.case == case and row.quantity == "step"}
    overheads = {row.subject: row for row in rows if row.case == case and row.quantity == "overhead"}
    lines = []
    for name, row in steps.items():
        line = [name, f"{row.p50 * 1e3:.2f}", f"{row.p20 * 1e3:.2f}", f"{row.p80 * 1e3:.2f}"]
        if added := overheads.get(name):
            ratio = added.details["ratio_to_best_torch"]
            line += [f"{added.p50 * 1e3:.2f}", "-" if ratio is None else f"{ratio:.2f}"]
        lines.append(line)
    title = f"{case}: {CASES[case].stresses}; CPU, {rows[-1].ranks} ranks, {steps[NONE].count} rounds"
    show_table(title, ["subject", "step ms", "p20", "p80", "exchange adds ms", "of torch's best"], lines)


def plot(rows: list[Row], path: Path) -> None:
    ratios: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.quantity == "overhead" and row.subject.startswith("ddpcomm") and row.details["ratio_to_best_torch"] is not None:
            ratios.setdefault(row.subject, {})[row.case] = row.details["ratio_to_best_torch"]
    title = f"What the exchange adds to a step on CPU, {rows[0].ranks} ranks (torch DDP's best mode = 1; less is better)"
    bar_chart(ratios, path, title=title, label="overhead / overhead of torch's best mode", reference=1.0)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(CASES), help="some of %(default)s")
    parser.add_argument("--transport", default="auto", help=f"some of {','.join(TRANSPORTS)}, with commas (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="rounds to measure (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--short", action="store_true", help="few rounds: shows that it works, says little")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="where the rows and the picture go (default: %(default)s)")
    options = parser.parse_args(arguments)
    rows = run(
        options.models.split(","), options.transport.split(","), min(options.steps, 15) if options.short else options.steps, options.ranks
    )
    write_rows(rows, options.output / "step_time.jsonl")
    plot(rows, options.output / "step_time.png")


if __name__ == "__main__":
    main()
