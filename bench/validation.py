"""Predictions held against what others have published: all-reduce times, and torch DDP's steps. `bench/overlap_gains.py` has the paper's.

No constant is fitted to the points that it is judged on: all-reduce times are left out one by one, and the one free parameter of the DDP
steps, the GPUs' imbalance, comes from the other three models.
"""

from __future__ import annotations

from functools import cache

from bench.comparison import Comparison, published_steps, read
from ddpcomm.collective_cost import CollectiveCost
from ddpcomm.cost_model import MeasuredCost
from ddpcomm.forecast import slowest
from ddpcomm.layout import Caps
from ddpcomm.machines import MACHINES
from ddpcomm.simulate import Exchange, simulate
from ddpcomm.workloads import WORKLOADS

MIB = 1 << 20
# Sinha et al., "Not All GPUs Are Created Equal" (arXiv 2208.11035): 8 % average variation between like GPUs, read as a box plot's whisker
# range, which is 4 times the distance of the quartiles, each of 1.349 standard deviations.
SPREAD_FROM_ELSEWHERE = 0.08 / (4 * 1.349)
IMBALANCES = tuple(step / 1000 for step in range(61))
CONSTANTS_ONLY = {"a100_80g_nvlink": "dgx-a100", "h100_ib": "dgx-h100", "h200_cx": "dgx-h100"}


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
