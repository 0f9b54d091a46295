"""The best bucket boundaries for given ready times and costs: exact, by dynamic programming over the ready order.

Gradients become ready in a known order, and a bucket is a run of it. When some prefix of the order has been cut into buckets, two times say
all that matters for the rest:

    done     when backward's own work so far, and what it has lost and will lose to the all-reduces so far, is over
    free     when the communicator has brought the last bucket back

A next bucket, which needs so much more work of backward's own, has done' = done + work + contention * cost, and
free' = max(free, done + work) + cost: if the communicator is still busy when the bucket fills, it goes out at `free`; if not, backward has
regained its full speed and the bucket fills at done + work. Both are monotone: of all ways to cut a prefix only those are kept that no
other one beats in both times (a Pareto front, mostly of a handful). The least `free` of the whole order is the earliest end of backward.
Many ways reach it, or miss it by next to nothing; walking back from the end, the largest bucket is taken that still does, for every bucket
costs something that no model knows of.

All is done in whole nanoseconds, so that equal inputs give equal boundaries on every rank. The result is exact for one communicator and one
kind of parameters. Where a model has several kinds, all their open buckets close at one boundary, which is one way among more.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import NamedTuple

from ddpcomm.cost_model import NANOSECONDS
from ddpcomm.layout import ALIGNMENT_BYTES
from ddpcomm.simulate import Exchange, StepProfile
from ddpcomm.status import STATUS_NUMEL

MOST_ATOMS = 512
_UNIT = 1024  # contention is rounded to parts of this


class _Way(NamedTuple):
    """The two times of one way to cut a prefix."""

    done: int
    free: int


def best_ends(profile: StepProfile, exchange: Exchange, most_atoms: int = MOST_ATOMS, slack: float = 0.0) -> frozenset[int]:
    """The parameters after which buckets end, so that the predicted end of backward is the earliest.

    Args:
        profile: when gradients become ready, and how large they are.
        exchange: what all-reduces cost. Its `communicators` are taken for one.
        most_atoms: gradients that are small and come one after another are kept together, until no more pieces than these are left; up to
            so many parameters the result is exact.
        slack: share of the end of backward that larger buckets may cost; 0 for the exact optimum.
    """
    order = profile.order
    if not order:
        return frozenset()
    atoms = _atoms(profile, order, most_atoms)
    ends = [atom[-1] for atom in atoms]
    costs = _Costs(profile, exchange, order, ends)
    contention = round(exchange.contention * _UNIT)
    last = len(atoms)
    fronts: list[list[_Way]] = [[_Way(0, 0)]]
    for stop in range(1, last + 1):
        ways: list[_Way] = []
        for start in range(stop):
            work, cost = costs.of(start, stop)
            lost = cost * contention // _UNIT
            for done, free in fronts[start]:
                _keep(ways, _Way(done + work + lost, max(free, done + work) + cost))
        fronts.append(ways)
    best = min(free for _, free in fronts[last])
    chosen: list[int] = []
    limit = best + round(slack * best) + last  # a nanosecond for each rounding on the way
    stop, latest = last, _Way(limit, limit)  # backward's own work is done before the last bucket is back
    while stop > 0:
        chosen.append(ends[stop - 1])
        for start in range(stop):
            work, cost = costs.of(start, stop)
            need = _Way(min(latest.done - cost * contention // _UNIT, latest.free - cost) - work, latest.free - cost)
            if any(done <= need.done and free <= need.free for done, free in fronts[start]):
                stop, latest = start, need
                break
    return frozenset(chosen)


def _keep(ways: list[_Way], way: _Way) -> None:
    """Adds a way to a front, unless one there is at least as good in both times; removes those that it beats."""
    if any(other.done <= way.done and other.free <= way.free for other in ways):
        return
    ways[:] = [other for other in ways if other.done < way.done or other.free < way.free]
    ways.append(way)


class _Costs:
    """What each run of atoms costs as a bucket, in nanoseconds."""

    def __init__(self, profile: StepProfile, exchange: Exchange, order: Sequence[int], ends: Sequence[int]) -> None:
        place = {parameter: position for position, parameter in enumerate(order)}
        self._exchange = exchange
        self._positions = [0] + [place[end] + 1 for end in ends]
        self._ready = [0] + [_nanoseconds(profile.ready_seconds[end]) for end in ends]
        self._ready[-1] = _nanoseconds(profile.backward_seconds)
        self._sizes = _SizesOfRuns(profile, order)

    def of(self, start: int, stop: int) -> tuple[int, int]:
        """Backward's own work until the bucket goes out, and the all-reduce."""
        sizes = self._sizes.of(self._positions[start], self._positions[stop], is_last=stop == len(self._positions) - 1)
        local = sum(_nanoseconds(self._exchange.local_seconds(size)) for size in sizes)
        cost = sum(_nanoseconds(self._exchange.cost.seconds(size)) for size in sizes)
        return self._ready[stop] - self._ready[start] + local, cost


def _atoms(profile: StepProfile, order: Sequence[int], most: int) -> list[list[int]]:
    """Runs of the order that are never cut: single parameters, or as many together as is needed."""
    if len(order) <= most:
        return [[parameter] for parameter in order]
    least = -(-profile.total_bytes // most)
    atoms: list[list[int]] = [[]]
    held = 0
    for position, parameter in enumerate(order):
        atoms[-1].append(parameter)
        held += profile.sizes[parameter].numel * profile.sizes[parameter].element_bytes
        if held >= least and position < len(order) - 1:
            atoms.append([])
            held = 0
    return atoms


class _SizesOfRuns:
    """Bytes of the buckets that hold a run of the ready order, one a kind: what `layout.plan` will make them, flags and status included."""

    def __init__(self, profile: StepProfile, order: Sequence[int]) -> None:
        self._kinds: dict[Hashable, tuple[int, list[int], list[int]]] = {}
        kinds = dict.fromkeys(profile.sizes[parameter].kind for parameter in order)
        for kind in kinds:
            members = [profile.sizes[parameter] if profile.sizes[parameter].kind == kind else None for parameter in order]
            element = next(size.element_bytes for size in members if size is not None)
            step = max(1, ALIGNMENT_BYTES // element)
            numels = [0 if size is None else -(-size.numel // step) * step for size in members]
            counts = [int(size is not None) for size in members]
            self._kinds[kind] = element, [0, *accumulate(numels)], [0, *accumulate(counts)]

    def of(self, start: int, stop: int, *, is_last: bool) -> list[int]:
        sizes = []
        for element, numels, counts in self._kinds.values():
            if flags := counts[stop] - counts[start]:
                sizes.append((numels[stop] - numels[start] + flags) * element)
        if is_last and sizes:
            sizes[-1] += STATUS_NUMEL * next(reversed(self._kinds.values()))[0]
        return sizes


def _nanoseconds(seconds: float) -> int:
    return round(seconds * NANOSECONDS)
