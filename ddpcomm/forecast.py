"""Forecasts: the step of a model on any number of GPUs of a machine, where it becomes communication-bound, and what would help.

A step takes as long as its slowest rank. If ranks compute the same work in times that spread normally with the machine's `imbalance`, the
slowest of n is slower than the mean by that spread times the expected maximum of n normal variables, for which Blom's approximation is
used: the quantile at (n - 3/8) / (n + 1/4) (G. Blom, "Statistical Estimates and Transformed Beta-Variables", 1958).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from statistics import NormalDist

from ddpcomm.bucket_search import best_ends
from ddpcomm.collective_cost import CollectiveCost
from ddpcomm.cost_model import CostModel
from ddpcomm.errors import ConfigurationError
from ddpcomm.layout import Caps
from ddpcomm.machines import Machine
from ddpcomm.simulate import Exchange, Prediction, StepProfile, simulate

MOST_RANKS = 10_000
COMMUNICATION_BOUND = 0.1  # share of the step that is exposed communication
SLACK = 0.001  # of backward: what larger buckets may cost
_DEFAULT = Caps.of_mb(None)


@dataclass(frozen=True)
class Options:
    """How gradients are exchanged.

    Args:
        best_buckets: choose the boundaries; False takes the default sizes.
        wire_factor: bytes on the wire for each byte of gradient: 0.5 for 16-bit formats of 32-bit gradients.
        algorithms: of `collective_cost.ALGORITHMS`.
        synchronize_every: exchange gradients in every n-th backward only.
        contention: by how much backward slows down beside an all-reduce, 0 to 1.
    """

    best_buckets: bool = False
    wire_factor: float = 1.0
    algorithms: tuple[str, ...] = ("ring", "tree")
    synchronize_every: int = 1
    contention: float = 0.0


@dataclass(frozen=True)
class Forecast:
    """A step on `ranks` GPUs; seconds are means over the steps between two exchanges.

    Args:
        ranks: how many.
        caps: where buckets end.
        prediction: of a step that exchanges.
        step_seconds: of a step.
        exposed_seconds: by how much the exchange lengthens it.
        efficiency: one GPU's step over this one.
    """

    ranks: int
    caps: Caps
    prediction: Prediction
    step_seconds: float
    exposed_seconds: float
    efficiency: float

    @property
    def exposed_share(self) -> float:
        return self.exposed_seconds / self.step_seconds


@dataclass(frozen=True)
class _Scaled:
    cost: CostModel
    factor: float

    def seconds(self, size_bytes: float) -> float:
        return self.cost.seconds(size_bytes * self.factor)


def slowest(ranks: int, imbalance: float) -> float:
    """How much longer than the mean rank the slowest of `ranks` needs for the same work, as a factor."""
    return 1.0 + imbalance * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 1.0


def exchange_of(machine: Machine, ranks: int, options: Options) -> Exchange:
    """How buckets travel among `ranks` GPUs of a machine."""
    cost: CostModel = CollectiveCost(machine, ranks, options.algorithms)
    copying = machine.memory_bytes_per_second / 2 or inf  # each byte is read once and written once
    return Exchange(
        _Scaled(cost, options.wire_factor) if options.wire_factor != 1 else cost,
        contention=options.contention,
        flatten_bytes_per_second=copying,
        unflatten_bytes_per_second=copying,
    )


@lru_cache(maxsize=256)
def forecast(profile: StepProfile, machine: Machine, ranks: int, options: Options | None = None) -> Forecast:
    """Predicts a step. Local and deterministic.

    Raises:
        ConfigurationError: fewer than 1 or more than `MOST_RANKS` ranks.
    """
    if not 1 <= ranks <= MOST_RANKS:
        raise ConfigurationError(f"a forecast is for 1 to {MOST_RANKS} ranks, got {ranks}")
    chosen = options or Options()
    own = profile.slowed(slowest(ranks, machine.imbalance))
    exchange = exchange_of(machine, ranks, chosen)
    caps = _DEFAULT
    if chosen.best_buckets:
        found = Caps(_DEFAULT.bytes, best_ends(own, exchange, slack=SLACK))
        # The search is exact but for models of more parameters than it takes apart; then the default may be better.
        caps = min((found, _DEFAULT), key=lambda candidate: simulate(own, candidate, exchange).backward_seconds)
    prediction = simulate(own, caps, exchange)
    exposed = prediction.exposed_seconds / chosen.synchronize_every
    step = own.step_seconds + exposed
    return Forecast(ranks, caps, prediction, step, exposed, profile.step_seconds / step)


@dataclass(frozen=True)
class Remedy:
    """Something that may help, and the step with it. changes_training: gradients are averaged less often, so that batches become larger."""

    name: str
    step_seconds: float
    exposed_seconds: float
    changes_training: bool


def remedies(profile: StepProfile, machine: Machine, ranks: int, options: Options | None = None) -> list[Remedy]:
    """Each remedy alone, beside the options as they are; the most helpful first."""
    base = options or Options()
    hierarchy = tuple(dict.fromkeys((*base.algorithms, "hierarchical")))
    tried = {
        "best bucket sizes": (machine, replace(base, best_buckets=True)),
        "half the bytes on the wire": (machine, replace(base, wire_factor=base.wire_factor / 2)),
        "hierarchy: reduce inside hosts first": (machine, replace(base, algorithms=hierarchy)),
        "synchronise every 4 steps": (machine, replace(base, synchronize_every=4 * base.synchronize_every)),
        "network twice as fast": (replace(machine, network_bytes_per_second=2 * machine.network_bytes_per_second), base),
    }
    found = [(name, forecast(profile, on, ranks, changed)) for name, (on, changed) in tried.items()]
    made = [Remedy(name, f.step_seconds, f.exposed_seconds, "synchronise" in name) for name, f in found]
    return sorted(made, key=lambda remedy: remedy.step_seconds)


def communication_bound_from(curve: Sequence[Forecast]) -> int | None:
    """The least number of ranks from which on exposed communication is more than `COMMUNICATION_BOUND` of the step. None: nowhere."""
    first = None
    for point in sorted(curve, key=lambda f: f.ranks, reverse=True):
        if point.exposed_share <= COMMUNICATION_BOUND:
            break
        first = point.ranks
    return first
