"""The paper's gains of overlap (Li et al., Fig. 6: 32 V100 on 4 hosts), predicted.

A gain is the share of a step's time that overlap saves. The paper normalises a step without overlap to 1, and only so do its other figures
of "speed-up" agree with each other: one exchange in 8 steps saves 38 and 57 % where the exchange makes a step 2 and 3 times as long. An
exchange every step of T, 7 without of 1: (T + 7) / 8 = 0.62 T gives T = 1.8, 0.43 T gives 2.9; read as rates they would give 1.5 and 1.7.

Batch sizes, and how fast the paper's hosts exchanged bytes, were not published. They follow from how a step on 16 GPUs was divided between
forward, backward and optimizer (`bench/data/paper_breakdown.csv`): backward without an exchange takes twice forward, and the bandwidth is
the one with which the simulator finds the published share of backward. None of these numbers is one of the gains.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from bench.comparison import Comparison, published_steps, read
from ddpcomm.collective_cost import CollectiveCost
from ddpcomm.cost_model import CostModel, LinearCost
from ddpcomm.layout import Caps
from ddpcomm.machines import MACHINES
from ddpcomm.simulate import Exchange, Prediction, StepProfile, simulate
from ddpcomm.workloads import WORKLOADS

MACHINE = MACHINES["v100-one-nic"]
WORKLOAD_OF = {"resnet50": "resnet50", "bert": "bert_large"}
# Of the figures with Gloo nothing is known but the hosts. Assumed: a millisecond for each bucket and, where nothing tells more, a gigabyte
# and a quarter (10 Gbit/s) for each rank's TCP stream.
GLOO_LATENCY_SECONDS, GLOO_BYTES_PER_SECOND = 1e-3, 1.25e9
_BANDWIDTHS = [10 ** (7 + step / 500) for step in range(2001)]  # 10 MB/s to 100 GB/s, in steps of half a percent

CostOf = Callable[[int], CostModel]
"""Of an all-reduce among so many GPUs."""


@dataclass(frozen=True)
class Breakdown:
    """How a step with overlap is divided: shares of its length."""

    backend: str
    model: str
    gpus: int
    forward: float
    backward: float
    optimizer: float


def breakdowns() -> list[Breakdown]:
    """The published ones. What isn't said of forward and optimizer counts as forward's; shares are made to add up to 1."""
    found = []
    for row in read("paper_breakdown.csv"):
        backward, optimizer = float(row["backward"]), float(row["optimizer"] or 0)
        forward = float(row["forward"] or 100 - backward - optimizer)
        total = forward + backward + optimizer
        found.append(Breakdown(row["backend"], row["model"], int(row["gpus"]), forward / total, backward / total, optimizer / total))
    return found


def gains() -> list[Comparison]:
    """With the speed of exchange that the breakdown on 16 GPUs tells."""
    found = {(b.backend, b.model): b for b in breakdowns()}
    return _compare("overlap gain", lambda backend, model: explained(found[backend, model]))


def gains_by_constants() -> list[Comparison]:
    """With NCCL's constants, one 100 Gbit/s card a host, and Gloo's assumed speed; batches are torch's published one, or assumed."""

    def described(backend: str, model: str) -> tuple[StepProfile, CostOf]:
        nccl, gloo = partial(CollectiveCost, MACHINE), partial(_gloo, GLOO_BYTES_PER_SECOND)
        return _profile(model), nccl if backend == "nccl" else gloo

    return _compare("overlap gain, constants alone", described)


def _compare(what: str, described: Callable[[str, str], tuple[StepProfile, CostOf]]) -> list[Comparison]:
    found = []
    for row in read("paper_figures.csv"):
        if row["what"].startswith("overlap"):
            gpus, published = int(row["gpus"]), float(row["value"])
            profile, cost_of = described(row["backend"], row["model"])
            predicted = gain(profile, cost_of(gpus))
            case = f"{row['model']}, {row['backend']}"
            found.append(Comparison(what, case, gpus, "%", predicted, published, predicted - published))
    return found


def gain(profile: StepProfile, cost: CostModel) -> float:
    """Percent of a step without overlap that overlap saves."""
    return 100 * (1 - _step(profile, cost).step_seconds / _step(profile, cost, overlap=False).step_seconds)


def explained(breakdown: Breakdown) -> tuple[StepProfile, CostOf]:
    """The step without an exchange, and the speed of exchange, that a step divided so must have had.

    Shares leave the length of a step open; it matters to latencies alone, and is that of torch's published batch, or of an assumed one.
    """
    profile = _profile(breakdown.model)
    whole = profile.rest_seconds / breakdown.forward
    profile = replace(profile, rest_seconds=whole * (breakdown.forward + breakdown.optimizer))
    cost_of = _nccl if breakdown.backend == "nccl" else _gloo

    def backward_seconds(bandwidth: float) -> float:
        return _step(profile, cost_of(bandwidth, breakdown.gpus)).backward_seconds

    index = bisect_left(_BANDWIDTHS, -whole * breakdown.backward, key=lambda bandwidth: -backward_seconds(bandwidth))
    if not 0 < index < len(_BANDWIDTHS):
        raise ValueError(f"no bandwidth from {_BANDWIDTHS[0]:.0f} to {_BANDWIDTHS[-1]:.0f} bytes a second explains {breakdown}")
    return profile, partial(cost_of, _BANDWIDTHS[index])


def _profile(model: str) -> StepProfile:
    """Forward and backward on one GPU, without an optimizer."""
    workload = WORKLOADS[WORKLOAD_OF[model]]()
    published = published_steps().get(model)
    return workload.profile(
        published[0] if published else workload.step_seconds(workload.batch, MACHINE.flops_per_second * MACHINE.utilisation)
    )


def _nccl(bytes_per_second: float, gpus: int) -> CostModel:
    """NCCL's constants, over a network that carries so much of a host's."""
    return CollectiveCost(replace(MACHINE, network_bytes_per_second=bytes_per_second), gpus)


def _gloo(bytes_per_second: float, gpus: int) -> CostModel:
    """A ring of TCP streams that carry so much each."""
    return LinearCost(GLOO_LATENCY_SECONDS, bytes_per_second / (2 * (gpus - 1) / gpus))


def _step(profile: StepProfile, cost: CostModel, *, overlap: bool = True) -> Prediction:
    return simulate(profile, Caps.of_mb(None), Exchange(cost, overlap=overlap))
