"""What all scripts that time steps of training share: replicas of one model that take turns, the check before, the rows after.

One set of processes holds all subjects and runs a step of each in turn, in an order that rotates; a step counts as long as the slowest
rank took. A barrier comes before each, so that no subject pays for another's lag.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.data_parallel import DataParallel
from bench.floors import AllReduceAlone, Wrap
from bench.models import Case
from bench.report import SIMULATED, Line
from bench.rows import Row, percentiles
from bench.subjects import NONE, TORCH, OwnBackward, gradients, twin
from ddpcomm.all_reduce_times import synchronize
from tests.ranks import RankContext

WARM_UP_STEPS = 5  # buckets are laid out anew after the first backward
Samples = dict[str, list[float]]
_CPU = torch.device("cpu")
Sample = TypeVar("Sample")


@dataclass(frozen=True)
class Replicas:
    """Subjects by name: the same model behind one wrapper each, and this rank's batch."""

    case: Case
    models: dict[str, nn.Module]
    batch: Tensor

    def steps(self) -> dict[str, Callable[[], float]]:
        return {name: partial(step, self.case, model, self.batch) for name, model in self.models.items()}


def prepare(
    context: RankContext, case: Case, wraps: Mapping[str, Wrap], warm_up_steps: int = WARM_UP_STEPS, device: torch.device = _CPU
) -> Replicas:
    """Makes, checks and warms up the subjects. Collective.

    Raises:
        ValueError: a subject's gradients are wrong.
    """
    torch.manual_seed(0)
    model = case.build().to(device)
    torch.manual_seed(1 + context.rank)
    batch = case.batch().to(device)
    replicas = Replicas(case, {name: wrap(twin(model)) for name, wrap in wraps.items()}, batch)
    check(case, replicas.models, replicas.batch)
    for _ in range(warm_up_steps):
        for run in replicas.steps().values():
            run()
    return replicas


def step(case: Case, model: nn.Module, batch: Tensor) -> float:
    """Seconds of forward, backward and zero_grad, until the device is done with them."""
    started = time.perf_counter()
    backward(model, case.loss(model, batch))
    model.zero_grad()
    synchronize(batch.device)
    return time.perf_counter() - started


def backward(model: nn.Module, loss: Tensor) -> None:
    if isinstance(model, OwnBackward):
        model.backward(loss)
    else:
        loss.backward()


def check(case: Case, subjects: Mapping[str, nn.Module], batch: Tensor) -> None:
    """Every subject's gradients, in the first two backwards, are those of torch's DDP: bit for bit on two ranks. On more, where the order
    of a sum is free, they have the same bits on all ranks, and lie within the rounding of such a sum from the average of the plain
    model's. `subjects` holds NONE and TORCH. Collective.

    What only plays an exchange (`AllReduceAlone`) averages nothing: its gradients are to be the plain model's own. Where one process works
    for all (`DataParallel`), it alone has gradients, of a batch as large as all ranks' together: they are close to the average.

    Raises:
        ValueError: a subject's gradients are wrong on some rank; on all ranks.
    """
    for number in range(2):  # in the second the buckets have their final order
        found = {}
        for name, subject in subjects.items():
            backward(subject, case.loss(subject, batch))
            found[name] = gradients(subject) if not isinstance(subject, DataParallel) or subject.works else []
            subject.zero_grad()
        own = found.pop(NONE)
        averages, bounds = zip(*[average_and_bound(gradient) for gradient in own], strict=True)
        verdicts: dict[tuple[str, int], bool] = {}
        for name, values in found.items():
            for index, value in enumerate(values):
                if isinstance(subjects[name], DataParallel):
                    verdicts[name, index] = torch.allclose(
                        value, averages[index], rtol=1e-3, atol=float(averages[index].abs().max()) * 1e-5
                    )
                elif isinstance(subjects[name], AllReduceAlone):
                    verdicts[name, index] = torch.equal(value, own[index])
                else:
                    close = bool(((value - averages[index]).abs() <= bounds[index]).all())
                    verdicts[name, index] = is_exact(value, found[TORCH][index]) and close
        if wrong := first_wrong(verdicts):
            raise ValueError(f"backward {number + 1}: {wrong[0]} differs from torch in gradient {wrong[1]} of {case.name}")


def first_wrong(verdicts: Mapping[tuple[str, int], bool]) -> tuple[str, int] | None:
    """The first that is False on any rank: the same on all ranks, so that they stop together. Collective."""
    by_rank: list[tuple[str, int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, next((key for key, right in verdicts.items() if not right), None))
    return next((key for key in by_rank if key is not None), None)


def average_and_bound(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The average over the ranks, and how far rounding can take a sum in another order from it: an ulp of the sum of magnitudes for each
    addition (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). Collective."""
    ranks = dist.get_world_size()
    average, magnitude = gradient.clone(), gradient.abs()
    dist.all_reduce(average)
    dist.all_reduce(magnitude)
    limits = torch.finfo(gradient.dtype)
    return average.div_(ranks), magnitude.mul_(limits.eps).add_(limits.tiny)


def is_exact(value: Tensor, expected: Tensor) -> bool:
    """On two ranks: has the bits of torch's. On more: has the same bits on all ranks. Collective on more than two."""
    if dist.get_world_size() <= 2:
        return torch.equal(value, expected)
    first = value.clone()
    dist.broadcast(first, 0)
    return torch.equal(value, first)


def take_turns(actions: Mapping[str, Callable[[], Sample]], rounds: int) -> dict[str, list[Sample]]:
    """Calls each action once a round, in an order that rotates; what it returned, by name. Collective."""
    names = list(actions)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            samples[name].append(actions[name]())
    return samples


def slowest(by_rank: Sequence[Samples]) -> Samples:
    """The longest of the ranks' times, round by round."""
    return {name: np.max([samples[name] for samples in by_rank], axis=0).tolist() for name in by_rank[0]}


def added(times: Sequence[float], without: Sequence[float]) -> list[float]:
    """A step less that of the same round without any exchange."""
    result: list[float] = np.subtract(times, without).tolist()
    return result


def sizes_of(case: Case) -> dict[str, int]:
    parameters = list(case.build().parameters())
    return {
        "tensors": len(parameters),
        "parameters": sum(p.numel() for p in parameters),
        "bytes": sum(p.numel() * p.element_size() for p in parameters),
    }


def row_maker(bench: str, case: str, ranks: int, sizes: Mapping[str, int], device: str = "cpu") -> Callable[..., Row]:
    """make(subject, quantity, samples, unit="s", more_sizes={}, **fields): a row of percentiles; its sizes add to those here."""

    def make(
        subject: str, quantity: str, samples: Sequence[float], unit: str = "s", more_sizes: Mapping[str, int] | None = None, **fields: Any
    ) -> Row:
        all_sizes = {**sizes, **(more_sizes or {})}
        return Row(bench, case, subject, quantity, unit, ranks, "float32", all_sizes, **percentiles(samples), device=device, **fields)

    return make


def milliseconds(*values: float) -> list[str]:
    """From seconds."""
    return [f"{value * 1e3:.2f}" for value in values]


def spread(row: Row) -> list[str]:
    """Median, p20 and p80 in milliseconds. What was not measured is marked, and has no spread."""
    median, low, high = milliseconds(row.p50, row.p20, row.p80)
    return [median, low, high] if row.measured else [f"{median} ({SIMULATED})", "", ""]


def conditions(row: Row) -> str:
    """Under which a row was measured, for titles."""
    cores = "" if row.ranks <= row.machine["cores"] else f" on {row.machine['cores']} cores"
    return f"{'CPU' if row.device == 'cpu' else row.device}, {row.ranks} rank{'s' if row.ranks > 1 else ''}{cores}, {row.count} rounds"


def line_of(label: str, x: Sequence[float], rows: Sequence[Row]) -> Line:
    """A line of medians in milliseconds, with p20 and p80."""
    median, low, high = ([getattr(row, name) * 1e3 for row in rows] for name in ("p50", "p20", "p80"))
    return Line(label, x, median, low, high, measured=all(row.measured for row in rows))
