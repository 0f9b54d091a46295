"""Predictions held against what others have published: all-reduce times, torch DDP's steps, the gains of overlap.

No constant is fitted to the points that it is judged on: all-reduce times are left out one by one, and the one free parameter of the DDP
steps, the GPUs' imbalance, comes from the other three models. `bench/data` holds the published figures with their sources.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from bench.rows import Row, percentiles
from ddpcomm.collective_cost import CollectiveCost
from ddpcomm.cost_model import CostModel, LinearCost, MeasuredCost
from ddpcomm.forecast import slowest
from ddpcomm.layout import Caps
from ddpcomm.machines import MACHINES
from ddpcomm.simulate import Exchange, StepProfile, simulate
from ddpcomm.workloads import WORKLOADS

DATA = Path(__file__).parent / "data"
MIB = 1 << 20
# Sinha et al., "Not All GPUs Are Created Equal" (arXiv 2208.11035): 8 % average variation between like GPUs, read as a box plot's whisker
# range, which is 4 times the distance of the quartiles, each of 1.349 standard deviations.
SPREAD_FROM_ELSEWHERE = 0.08 / (4 * 1.349)
IMBALANCES = tuple(step / 1000 for step in range(61))
# Of the figures with Gloo nothing is known but the hosts. Assumed: a gigabyte and a quarter (10 Gbit/s) for each rank's TCP stream, a
# millisecond for each bucket.
GLOO_BYTES_PER_SECOND, GLOO_LATENCY_SECONDS = 1.25e9, 1e-3
CONSTANTS_ONLY = {"a100_80g_nvlink": "dgx-a100", "h100_ib": "dgx-h100", "h200_cx": "dgx-h100"}


@dataclass(frozen=True)
class Comparison:
    """One predicted figure beside the published one.

    Args:
        what: which of the validations.
        case: of what.
        ranks: how many GPUs.
        unit: of both figures.
        predicted, published: the figures.
        error: relative for times; in points for efficiencies and gains.
    """

    what: str
    case: str
    ranks: int
    unit: str
    predicted: float
    published: float
    error: float

    def row(self) -> Row:
        details: dict[str, Any] = {"published": self.published, "error": self.error}
        statistics: dict[str, Any] = percentiles([self.predicted])
        return Row(
            *("validate", self.case, "ddpcomm", self.what, self.unit, self.ranks, "float32", {}),
            **statistics,
            measured=False,
            details=details,
            device="cuda",
        )


def read(name: str) -> list[dict[str, str]]:
    """A file of published figures, without its comments."""
    lines = (DATA / name).read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def all_reduce_times() -> dict[str, list[tuple[int, int, float]]]:
    """By system: GPUs, bytes, seconds."""
    found: dict[str, list[tuple[int, int, float]]] = {}
    for row in read("allreduce_measured.csv"):
        found.setdefault(row["system"], []).append((int(row["gpus"]), int(row["bytes"]), float(row["time_us"]) * 1e-6))
    return found


def leave_one_out() -> list[Comparison]:
    """All-reduces from 1 MiB: the cost model through all other points of the same system."""
    found = []
    for system, points in all_reduce_times().items():
        for index, (gpus, size, seconds) in enumerate(points):
            if size >= MIB:
                others = tuple((s, t) for i, (_, s, t) in enumerate(points) if i != index)
                predicted = MeasuredCost(others).seconds(size)
                found.append(
                    Comparison("all-reduce, left out", _case(system, size), gpus, "s", predicted, seconds, predicted / seconds - 1)
                )
    return found


def constants_only() -> list[Comparison]:
    """The same all-reduces by NCCL's constants and the makers' link speeds, with nothing measured."""
    found = []
    for system, points in all_reduce_times().items():
        for gpus, size, seconds in points:
            if size >= MIB:
                predicted = CollectiveCost(MACHINES[CONSTANTS_ONLY[system]], gpus).seconds(size)
                error = predicted / seconds - 1
                found.append(Comparison("all-reduce, constants alone", _case(system, size), gpus, "s", predicted, seconds, error))
    return found


def _case(system: str, size: int) -> str:
    return f"{system} {size // MIB} MiB"


# ---- torch DDP's published steps ------------------------------------------------------------------------------------


@cache
def published_steps() -> Mapping[str, Mapping[int, float]]:
    """Seconds a step, by model and number of GPUs; 0 stands for one GPU without DDP."""
    found: dict[str, dict[int, float]] = {}
    for row in read("ddp_published.csv"):
        found.setdefault(row["model"], {})[int(row["gpus"])] = float(row["seconds"])
    return found


@cache
def efficiency(model: str, gpus: int, imbalance: float, base: int) -> float:
    """Predicted: one GPU's time over the step of `gpus`, from shapes and that one time (`base`: 1 with DDP, 0 without)."""
    alone = published_steps()[model][base]
    if gpus <= 1:
        return 1.0
    profile = WORKLOADS[model]().profile(alone).slowed(slowest(gpus, imbalance))
    exchange = Exchange(CollectiveCost(MACHINES["dgx1-v100"], gpus))
    return alone / simulate(profile, Caps.of_mb(None), exchange).step_seconds


def ddp_steps(base: int = 1, imbalance: float | None = None) -> list[Comparison]:
    """Scaling efficiencies, with the imbalance that fits the other models best, or with this one."""
    found = []
    what = "scaling efficiency" if base == 1 else "scaling efficiency, of one GPU without DDP"
    for model, steps in published_steps().items():
        spread = imbalance_without(model, base) if imbalance is None else imbalance
        for gpus, seconds in steps.items():
            if gpus > base:
                predicted, published = (100 * share for share in (efficiency(model, gpus, spread, base), steps[base] / seconds))
                found.append(Comparison(what, model, gpus, "%", predicted, published, predicted - published))
    return found


def imbalance_without(model: str, base: int = 1) -> float:
    """Least squares over the efficiencies of all models but one."""
    steps = published_steps()
    others = [(name, gpus) for name in steps for gpus in steps[name] if name != model and gpus > 1]

    def squares(imbalance: float) -> float:
        return sum((efficiency(name, gpus, imbalance, base) - steps[name][base] / steps[name][gpus]) ** 2 for name, gpus in others)

    return min(IMBALANCES, key=squares)


# ---- gains of overlap -----------------------------------------------------------------------------------------------


def overlap_gains() -> list[Comparison]:
    """How many percent faster steps are with overlap than without, on 32 V100 with one 100 Gbit/s card a host.

    ResNet-50's step on one GPU is torch's published one; BERT-large's follows from its work (batch 32, 128 tokens) and the GPU's peak.
    """
    machine = MACHINES["v100-one-nic"]
    bert = WORKLOADS["bert_large"]()
    profiles = {
        "resnet50": WORKLOADS["resnet50"]().profile(published_steps()["resnet50"][0]),
        "bert": bert.profile(bert.step_seconds(bert.batch, machine.flops_per_second * machine.utilisation)),
    }
    found = []
    for row in read("paper_figures.csv"):
        if row["what"].startswith("overlap"):
            gpus, published = int(row["gpus"]), float(row["value"])
            ring = 2 * (gpus - 1) / gpus
            nccl, gloo = CollectiveCost(machine, gpus), LinearCost(GLOO_LATENCY_SECONDS, GLOO_BYTES_PER_SECOND / ring)
            predicted = _gain(profiles[row["model"]], nccl if row["backend"] == "nccl" else gloo)
            case = f"{row['model']}, {row['backend']}"
            found.append(Comparison("overlap gain", case, gpus, "%", predicted, published, predicted - published))
    return found


def _gain(profile: StepProfile, cost: CostModel) -> float:
    overlapped = Exchange(cost)
    steps = [simulate(profile, Caps.of_mb(None), exchange).step_seconds for exchange in (overlapped, replace(overlapped, overlap=False))]
    return 100 * (steps[1] / steps[0] - 1)


def pairs_in_order(comparisons: list[Comparison]) -> tuple[int, int]:
    """How many pairs of cases stand in the published order, and of how many."""
    pairs = [(a, b) for i, a in enumerate(comparisons) for b in comparisons[i + 1 :] if a.published != b.published]
    return sum((a.predicted - b.predicted) * (a.published - b.published) > 0 for a, b in pairs), len(pairs)


def mean_error(comparisons: list[Comparison]) -> float:
    """Of the errors' sizes."""
    return mean(abs(comparison.error) for comparison in comparisons)


def largest_error(comparisons: list[Comparison]) -> float:
    """Of the errors' sizes."""
    return max(abs(comparison.error) for comparison in comparisons)
