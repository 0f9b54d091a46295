"""Plans of the buckets: chosen from measured times, the same on every rank, saved and loaded.

`choose` is a function of its arguments alone. Ranks that give it equal times (such as the slowest rank's, exchanged beforehand) get equal
plans. A plan names parameters and not their numbers; it fits a model with the same parameters, each of the same shape, dtype and strides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddpcomm.bucket_search import MOST_ATOMS, best_ends
from ddpcomm.checkpoint import write_text
from ddpcomm.cost_model import CostModel, MeasuredCost
from ddpcomm.errors import PlanError
from ddpcomm.layout import Caps
from ddpcomm.simulate import Exchange, StepProfile, simulate

VERSION = 1
Signature = tuple[tuple[str, str], ...]
SLACK = 0.001  # of backward: what larger buckets may cost, in a prediction that is less exact than that
_MORE_COMMUNICATORS_MUST_SAVE = 0.005  # of backward: each takes memory and processors of the device


@dataclass(frozen=True)
class Plan:
    """Buckets for one model.

    Args:
        parameters: each trainable parameter in the order of registration: its name, and its shape, dtype and strides as text.
        order: names, in the order in which gradients become ready.
        ends: names of the parameters after which buckets end, in that order.
        communicators: how many take buckets in turn.
        max_ctas: NCCL's option of this name; None leaves it to NCCL.
        cost: what all-reduces cost.
        contention: by how much backward slows down beside them, 0 to 1.
        predicted_seconds: end of backward with these buckets.
        default_seconds: the same, with those of the default sizes.
    """

    parameters: Signature
    order: tuple[str, ...]
    ends: tuple[str, ...]
    communicators: int
    cost: MeasuredCost
    contention: float
    predicted_seconds: float
    default_seconds: float
    max_ctas: int | None = None

    def check(self, parameters: Sequence[tuple[str, str]]) -> None:
        """Whether the plan fits a model with these parameters.

        Raises:
            PlanError: it doesn't; the message names the first mismatch.
        """
        for index, (mine, theirs) in enumerate(zip(self.parameters, parameters, strict=False)):
            if mine[0] != theirs[0]:
                raise PlanError(f"the plan is for another model: its parameter {index} is {mine[0]}, the model's is {theirs[0]}")
            if mine[1] != theirs[1]:
                raise PlanError(f"the plan is for another model: {mine[0]} is {mine[1]} in the plan, {theirs[1]} in the model")
        if len(self.parameters) != len(parameters):
            longer, where = (self.parameters, "plan") if len(self.parameters) > len(parameters) else (tuple(parameters), "model")
            first = longer[min(len(self.parameters), len(parameters))][0]
            raise PlanError(f"the plan is for another model: {first} is in the {where} only")

    def caps(self, names: Sequence[str]) -> Caps:
        """The buckets' boundaries for `layout.assign`. names: of the parameters by index."""
        ends = set(self.ends)
        return replace(Caps.of_mb(None), ends=frozenset(index for index, name in enumerate(names) if name in ends))

    def with_options(self, options: Mapping[str, int]) -> Plan:
        """The same with other `communicators` or `max_ctas`."""
        return replace(
            self, communicators=options.get("communicators", self.communicators), max_ctas=options.get("max_ctas", self.max_ctas)
        )

    def summary(self) -> str:
        """One line for the log."""
        saved = 1 - self.predicted_seconds / self.default_seconds if self.default_seconds > 0 else 0.0
        return (
            f"{len(self.ends)} buckets over {self.communicators} communicator{'s' if self.communicators > 1 else ''}: "
            f"backward is predicted to take {self.predicted_seconds * 1e3:.3f} ms, {saved:.1%} less than with the default sizes"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "parameters": [list(parameter) for parameter in self.parameters],
            "order": list(self.order),
            "ends": list(self.ends),
            "communicators": self.communicators,
            "max_ctas": self.max_ctas,
            "cost_model": self.cost.to_json(),
            "contention": self.contention,
            "predicted_seconds": self.predicted_seconds,
            "default_seconds": self.default_seconds,
        }

    @classmethod
    def from_json(cls, content: Any) -> Plan:
        """
        Raises:
            PlanError: this isn't a plan, or one of another version.
        """
        if not isinstance(content, dict) or content.get("version") != VERSION:
            found = content.get("version") if isinstance(content, dict) else None
            raise PlanError(f"a plan of version {VERSION} is expected, this is of version {found}; save it again with this ddpcomm")
        try:
            made = cls(
                parameters=tuple((str(name), str(what)) for name, what in content["parameters"]),
                order=tuple(str(name) for name in content["order"]),
                ends=tuple(str(name) for name in content["ends"]),
                communicators=int(content["communicators"]),
                cost=MeasuredCost.from_json(content["cost_model"]),
                contention=float(content["contention"]),
                predicted_seconds=float(content["predicted_seconds"]),
                default_seconds=float(content["default_seconds"]),
                max_ctas=None if content.get("max_ctas") is None else int(content["max_ctas"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise PlanError(f"this plan is damaged: {type(error).__name__}: {error}") from error
        if made.communicators < 1 or (made.max_ctas is not None and made.max_ctas < 1):
            raise PlanError(
                f"this plan is damaged: communicators {made.communicators}, max_ctas {made.max_ctas}; there must be one or more"
            )
        known = {name for name, _ in made.parameters}
        for name in (*made.order, *made.ends):
            if name not in known:
                raise PlanError(f"this plan is damaged: {name} is none of its parameters")
        return made

    def save(self, path: Path | str) -> None:
        """Writes the plan as JSON. Local; one rank's file serves all."""
        write_text(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> Plan:
        """
        Raises:
            PlanError: the file can't be read, or holds no plan of this version.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PlanError(f"{path} can't be read as a plan: {error}") from error
        return cls.from_json(content)


def choose(
    parameters: Sequence[tuple[str, str]],
    profile: StepProfile,
    exchange: Exchange,
    communicators: Sequence[int] = (1,),
    most_atoms: int = MOST_ATOMS,
) -> Plan:
    """The plan with the earliest predicted end of backward. Local and deterministic.

    The boundaries are the best for one communicator. For several they are those that would be best if each all-reduce's latency were shared
    among them; which number is best is then simulated, and one more must save something to be taken.

    Args:
        parameters: names, and shapes, dtypes and strides as text, in the order of registration.
        profile: the step's measured times; on all ranks the same.
        exchange: what travelling costs, also the same. Its `communicators` don't matter; `cost` must be a `MeasuredCost` to be saved as is,
            and is sampled at the sizes of the buckets else.
        communicators: numbers to try, in rising order.
        most_atoms: as for `best_ends`.
    """
    names = [name for name, _ in parameters]
    default = simulate(profile, Caps.of_mb(None), replace(exchange, communicators=1))
    best: tuple[float, int, frozenset[int]] | None = None
    for count in communicators:
        ends = best_ends(profile, replace(exchange, communicators=1, cost=_SharedLatency(exchange.cost, count)), most_atoms, SLACK)
        end = simulate(profile, Caps.of_mb(None) if not ends else Caps((1,), ends), replace(exchange, communicators=count)).backward_seconds
        if best is None or end < best[0] - _MORE_COMMUNICATORS_MUST_SAVE * profile.backward_seconds:
            best = end, count, ends
    if best is None:
        raise PlanError("there must be a number of communicators to try")
    cost = exchange.cost if isinstance(exchange.cost, MeasuredCost) else _sampled(exchange.cost, profile.total_bytes)
    order = [names[index] for index in profile.order]
    kept = {names[index] for index in best[2]}
    return Plan(
        parameters=tuple((name, what) for name, what in parameters),
        order=tuple(order),
        ends=tuple(name for name in order if name in kept),
        communicators=best[1],
        cost=cost,
        contention=exchange.contention,
        predicted_seconds=best[0],
        default_seconds=default.backward_seconds,
    )


@dataclass(frozen=True)
class _SharedLatency:
    """All-reduces whose latencies run side by side, while their bytes share the links."""

    cost: CostModel
    communicators: int

    def seconds(self, size_bytes: float) -> float:
        whole = self.cost.seconds(size_bytes)
        return whole - min(self.cost.seconds(0), whole) * (1 - 1 / self.communicators)


def _sampled(cost: CostModel, most_bytes: int) -> MeasuredCost:
    sizes = [0, *(1 << power for power in range(10, max(most_bytes, 2048).bit_length() + 1))]
    return MeasuredCost(tuple((size, max(cost.seconds(size), 1e-12)) for size in sizes))
