"""Plays one training step: backward computes, buckets fill, go out and come back. Nothing is communicated.

It has the reducer's own rules, and takes the buckets from the reducer's own layout:

- a bucket goes out when it and all before it are full, strictly by index; the last one waits for the end of backward;
- buckets take the communicators in turn, and each communicator has one bucket under way at a time;
- gradients are written back when all buckets have returned.

Buckets that are under way together share the bandwidth, and each waits out its own latency. While any is under way, backward may be slowed
down: on GPUs by the processors and the memory bandwidth that the all-reduce takes, on CPU ranks by the cores.

Times are seconds since the start of backward, in floating point.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from ddpcomm.argument_checks import check_integer, check_number
from ddpcomm.cost_model import CostModel
from ddpcomm.errors import ConfigurationError
from ddpcomm.layout import Caps, ParameterSize, assign, plan
from ddpcomm.status import STATUS_NUMEL

_NOTHING = 1e-15  # seconds: what is left after rounding
_ROUNDING = 1e-9  # relative


@dataclass(frozen=True)
class StepProfile:
    """One rank's step without any exchange.

    Args:
        sizes: of every parameter, in the order of registration.
        ready_seconds: of every parameter, when its gradient is ready, since the start of backward.
        backward_seconds: length of backward.
        rest_seconds: the rest of the step: forward, optimizer.

    Raises:
        ConfigurationError: lists of different lengths, or a gradient that is ready before backward starts or after it ends.
    """

    sizes: tuple[ParameterSize, ...]
    ready_seconds: tuple[float, ...]
    backward_seconds: float
    rest_seconds: float = 0.0

    def __post_init__(self) -> None:
        for index, size in enumerate(self.sizes):
            check_integer(f"numel of parameter {index}", size.numel, least=0)
            check_integer(f"element_bytes of parameter {index}", size.element_bytes, least=1)
        check_number("backward_seconds", self.backward_seconds, least=0)
        check_number("rest_seconds", self.rest_seconds, least=0)
        if len(self.sizes) != len(self.ready_seconds):
            raise ConfigurationError(f"{len(self.sizes)} parameters, but {len(self.ready_seconds)} times at which they are ready")
        for index, seconds in enumerate(self.ready_seconds):
            if not 0 <= seconds <= self.backward_seconds * (1 + _ROUNDING):
                raise ConfigurationError(f"parameter {index} is ready after {seconds} s of a backward of {self.backward_seconds} s")

    @property
    def order(self) -> list[int]:
        """Parameters as they become ready; of those ready together the last registered comes first."""
        return sorted(range(len(self.sizes)), key=lambda index: (self.ready_seconds[index], -index))

    @property
    def total_bytes(self) -> int:
        return sum(size.numel * size.element_bytes for size in self.sizes)

    @property
    def step_seconds(self) -> float:
        return self.rest_seconds + self.backward_seconds

    def slowed(self, factor: float) -> StepProfile:
        """The same step on a rank that computes more slowly."""
        ready = tuple(seconds * factor for seconds in self.ready_seconds)
        return replace(self, ready_seconds=ready, backward_seconds=self.backward_seconds * factor, rest_seconds=self.rest_seconds * factor)


@dataclass(frozen=True)
class Exchange:
    """How buckets travel.

    Args:
        cost: of one all-reduce that is alone.
        communicators: take buckets in turn.
        contention: by how much backward slows down while a bucket is under way: 0 not at all, 1 stands still.
        bucket_seconds: what each bucket costs backward beside its bytes: launches, bookkeeping.
        flatten_bytes_per_second: how fast gradients are copied into a bucket, in backward's own time.
        unflatten_bytes_per_second: how fast averages are written back, after the last bucket has returned; infinite where gradients are
            views of the buckets.
        overlap: False keeps all buckets back until backward has ended.

    Raises:
        ConfigurationError: a figure out of its range.
    """

    cost: CostModel
    communicators: int = 1
    contention: float = 0.0
    bucket_seconds: float = 0.0
    flatten_bytes_per_second: float = inf
    unflatten_bytes_per_second: float = inf
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.communicators < 1:
            raise ConfigurationError(f"there must be one communicator or more, got {self.communicators}")
        if not 0 <= self.contention <= 1:
            raise ConfigurationError(f"contention must be from 0 to 1, got {self.contention}")

    def latency_seconds(self, size_bytes: int) -> float:
        """The share of an all-reduce's time that it doesn't use the links."""
        return min(self.cost.seconds(0), self.cost.seconds(size_bytes))

    def local_seconds(self, size_bytes: int) -> float:
        """What a bucket costs backward before it goes out."""
        return self.bucket_seconds + size_bytes / self.flatten_bytes_per_second


@dataclass(frozen=True)
class BucketTimes:
    """One bucket's way: full, out, begun on its communicator, back."""

    index: int
    parameters: tuple[int, ...]
    size_bytes: int
    ready_seconds: float
    launched_seconds: float
    started_seconds: float
    ended_seconds: float


@dataclass(frozen=True)
class Prediction:
    """What a step comes to.

    Args:
        buckets: by index.
        computed_seconds: when backward's own computation ended.
        backward_seconds: when all averages are in place.
        step_seconds: the whole step.
        exposed_seconds: by how much the exchange lengthens the step.
    """

    buckets: tuple[BucketTimes, ...]
    computed_seconds: float
    backward_seconds: float
    step_seconds: float
    exposed_seconds: float

    @property
    def communication_seconds(self) -> float:
        """From the first bucket's begin to the last one's end, gaps left out."""
        total, until = 0.0, 0.0
        for bucket in sorted(self.buckets, key=lambda b: b.started_seconds):
            total += max(bucket.ended_seconds - max(bucket.started_seconds, until), 0.0)
            until = max(until, bucket.ended_seconds)
        return total


def simulate(profile: StepProfile, caps: Caps, exchange: Exchange, order: Sequence[int] | None = None) -> Prediction:
    """Predicts one step. Deterministic and local.

    Args:
        profile: the step without exchange.
        caps: where buckets end.
        exchange: how they travel.
        order: in which parameters are laid out; None means as they become ready, which is what the reducer learns.
    """
    buckets = assign(profile.sizes, profile.order if order is None else order, caps)
    layouts = plan(profile.sizes, buckets, STATUS_NUMEL, control=ParameterSize(0, 4, "control"))
    element_bytes = [profile.sizes[bucket[0]].element_bytes for bucket in buckets] or [4]
    sizes = [layout.total_numel * element for layout, element in zip(layouts, element_bytes, strict=True)]
    full = [max((profile.ready_seconds[slot.parameter] for slot in layout.slots), default=0.0) for layout in layouts]
    launches, latest = [], 0.0
    for ready in full:
        latest = max(latest, ready) if exchange.overlap else profile.backward_seconds
        launches.append(latest)
    launches[-1] = profile.backward_seconds
    run = _Run(launches, sizes, exchange)
    run.play()
    times = tuple(
        BucketTimes(index, tuple(slot.parameter for slot in layout.slots), sizes[index], full[index], *run.times[index])
        for index, layout in enumerate(layouts)
    )
    computed = run.times[-1][0]
    end = max(computed, *(bucket.ended_seconds for bucket in times)) + sum(sizes) / exchange.unflatten_bytes_per_second
    return Prediction(times, computed, end, profile.rest_seconds + end, end - profile.backward_seconds)


@dataclass
class _Transfer:
    bucket: int
    latency: float
    left: float


@dataclass
class _Run:
    """The events. `launches` are the places in backward's own computation at which buckets go out."""

    launches: Sequence[float]
    sizes: Sequence[int]
    exchange: Exchange
    now: float = 0.0
    times: list[list[float]] = field(default_factory=list)
    """Of each bucket: launched, started, ended."""

    def play(self) -> None:
        lanes: list[deque[int]] = [deque() for _ in range(self.exchange.communicators)]
        active: dict[int, _Transfer] = {}
        position = 0.0
        for index, place in enumerate(self.launches):
            self._advance(place - position + self.exchange.local_seconds(self.sizes[index]), lanes, active)
            position = place
            self.times.append([self.now, 0.0, 0.0])
            lanes[index % len(lanes)].append(index)
            self._start(lanes, active)
        self._advance(None, lanes, active)

    def _start(self, lanes: Sequence[deque[int]], active: dict[int, _Transfer]) -> None:
        for number, lane in enumerate(lanes):
            if lane and number not in active:
                index = lane.popleft()
                latency = self.exchange.latency_seconds(self.sizes[index])
                active[number] = _Transfer(index, latency, self.exchange.cost.seconds(self.sizes[index]) - latency)
                self.times[index][1] = self.now

    def _advance(self, work: float | None, lanes: Sequence[deque[int]], active: dict[int, _Transfer]) -> None:
        """Goes on until so much of backward's own work is done; None: until all buckets are back."""
        while active if work is None else work > _NOTHING:
            rate = 1.0 - self.exchange.contention if active else 1.0
            sharing = sum(1 for transfer in active.values() if transfer.latency <= _NOTHING) or 1
            waits = [t.latency if t.latency > _NOTHING else t.left * sharing for t in active.values()]
            if work is not None and rate > 0:
                waits.append(work / rate)
            passed = max(min(waits), 0.0)
            self.now += passed
            if work is not None:
                work -= passed * rate
            for number, transfer in list(active.items()):
                if transfer.latency > _NOTHING:
                    transfer.latency -= passed
                else:
                    transfer.left -= passed / sharing
                if transfer.latency <= _NOTHING and transfer.left <= _NOTHING:
                    self.times[transfer.bucket][2] = self.now
                    del active[number]
            self._start(lanes, active)
