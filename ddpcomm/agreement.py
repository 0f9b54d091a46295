"""What the ranks tell each other when a status word says that there is something to tell, and what follows from it.

Every rank sees the same reports, and what follows is a function of them alone: so all ranks raise the same error or take the same step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ddpcomm.comm.base import Communicator
from ddpcomm.comm.exchange import all_gather_objects
from ddpcomm.errors import DDPCommError, RankMismatchError
from ddpcomm.listing import listed
from ddpcomm.parameters import ParameterSet, gradient_dtype

Signature = tuple[str, str]


@dataclass(frozen=True)
class Report:
    """What one rank has to say.

    Args:
        signatures: each trainable parameter as it is now: its name, and everything about it that must be alike on all ranks.
        failure: an error that this rank kept, as type and text.
        late: parameters that received a gradient after their bucket had gone out.
        ready_order: parameters in the order in which their gradients became ready in this backward.
        fires: how often each parameter received a gradient.
        sparse: parameters whose gradient turned out to be sparse.
        newcomers: parameters that this rank's buckets have no place for.
        in_buckets: parameters whose gradient lies in a bucket, where a reduction writes over it.
    """

    signatures: tuple[Signature, ...]
    failure: tuple[type[DDPCommError], str] | None = None
    late: tuple[str, ...] = ()
    ready_order: tuple[str, ...] = ()
    fires: Mapping[str, int] = field(default_factory=dict)
    sparse: tuple[str, ...] = ()
    newcomers: tuple[str, ...] = ()
    in_buckets: tuple[str, ...] = ()


@dataclass(frozen=True)
class Agreement:
    """What the reports of all ranks come to.

    Args:
        late: parameters that were late on some rank, with those ranks.
        ready_order: rank 0's.
        fires: the most on any rank, by parameter.
        sparse: sparse on some rank.
        newcomers: newcomers on some rank.
        unanimous: whether they are so on every rank.
        in_buckets: with a gradient in a bucket on some rank.
    """

    late: Mapping[str, tuple[int, ...]]
    ready_order: tuple[str, ...]
    fires: Mapping[str, int]
    sparse: frozenset[str]
    newcomers: frozenset[str]
    unanimous: bool
    in_buckets: frozenset[str]


def signatures(parameters: ParameterSet) -> tuple[Signature, ...]:
    """What must be alike on all ranks."""
    return tuple((m.name, describe_parameter(m.parameter)) for m in parameters.managed)


def describe_parameter(parameter: Tensor) -> str:
    """As `describe`, with the dtype of its gradients where that is another."""
    dtype = gradient_dtype(parameter)
    return describe(parameter) + (f" and gradients of {dtype}" if dtype != parameter.dtype else "")


def describe(tensor: Tensor) -> str:
    """Shape, dtype and strides; the stride of a dimension of size 1 is never taken and doesn't count."""
    strides = [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    return f"{list(tensor.shape)} {tensor.dtype} with strides {strides}"


def agree(communicator: Communicator, report: Report) -> Agreement:
    """Exchanges the reports. Collective.

    Raises:
        DDPCommError: some rank reported a failure; of the type of the first one, on every rank.
        RankMismatchError: the ranks' parameters differ.
    """
    reports = all_gather_objects(communicator, report)
    failures = [(rank, *r.failure) for rank, r in enumerate(reports) if r.failure is not None]
    if failures:
        _, kind, _ = failures[0]
        raise kind("; ".join(f"rank {rank}: {text}" for rank, _, text in failures))
    require_equal("trainable parameters", [r.signatures for r in reports])
    late: dict[str, tuple[int, ...]] = {}
    fires: dict[str, int] = {}
    for rank, r in enumerate(reports):
        for name in r.late:
            late[name] = (*late.get(name, ()), rank)
        for name, count in r.fires.items():
            fires[name] = max(count, fires.get(name, 1))
    return Agreement(
        late,
        reports[0].ready_order,
        fires,
        sparse=frozenset(name for r in reports for name in r.sparse),
        newcomers=frozenset(name for r in reports for name in r.newcomers),
        unanimous=len({frozenset(r.newcomers) for r in reports}) == 1,
        in_buckets=frozenset(name for r in reports for name in r.in_buckets),
    )


def require_equal(what: str, by_rank: Sequence[Sequence[Signature]]) -> None:
    """Raises the same error everywhere if the ranks' lists differ.

    Raises:
        RankMismatchError: names what differs, with each side's values.
    """
    for rank, theirs in enumerate(by_rank):
        if theirs == by_rank[0]:
            continue
        raise RankMismatchError(
            f"rank {rank} and rank 0 have different {what}: {_difference(by_rank[0], theirs, rank)}. "
            "Build the same model, in the same order, on every rank before it is wrapped."
        )


def _difference(first: Sequence[Signature], other: Sequence[Signature], rank: int) -> str:
    mine, theirs = dict(first), dict(other)
    found = [f"{name} is only on rank 0" for name in mine if name not in theirs]
    found += [f"{name} is only on rank {rank}" for name in theirs if name not in mine]
    found += [
        f"{name} is {mine[name]} on rank 0, {theirs[name]} on rank {rank}" for name in mine if name in theirs and mine[name] != theirs[name]
    ]
    if not found:
        places = [(a[0], b[0]) for a, b in zip(first, other, strict=True) if a[0] != b[0]]
        found = [f"{a} on rank 0 stands where {b} stands on rank {rank}" for a, b in places]
    return listed(found, "; ")
