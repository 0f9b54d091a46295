"""When forward, backward and communication began and ended: the figures of `stats()` and of torch's `_get_ddp_logging_data()`.

The clock is the host's. On the CPU that is all there is; on CUDA the host runs ahead of the device, and these times tell how long it
took the host to put the work on its streams: for the device's own times record a timeline.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import timedelta

_TIMES = ("forward", "backward", "communication", "overlap")
_ALWAYS_SAMPLED = 10


@dataclass(frozen=True)
class StepTimes:
    """Durations within one step, or their means over several. The names are torch's.

    Args:
        forward: from the begin of the forward to that of the backward.
        backward_compute: from there until the last gradient of this rank.
        backward_communication: from the first bucket's flatten until all averages are in place.
        overlap: the part of it that lies within `backward_compute`.
    """

    forward: timedelta
    backward_compute: timedelta
    backward_communication: timedelta
    overlap: timedelta

    @property
    def exposed(self) -> timedelta:
        """What the step takes longer for the exchange of gradients."""
        return self.backward_communication - self.overlap


@dataclass(frozen=True)
class StepStatistics:
    """What `DistributedDataParallel.stats()` returns.

    Args:
        steps: how many backwards that synchronise have ended well.
        last, average: times of the last of them, and their mean over all; zero before the first.
        initial_bucket_bytes: bytes of gradients in each bucket, as first laid out.
        bucket_bytes: the same as laid out now.
        rebuilt: whether the buckets have been laid out in the order in which gradients become ready.
        buckets_reduced: how many went out in the last backward.
        unused_parameter_bytes: bytes of the parameters that no rank used in it.
        nonfinite_steps: how many were skipped because gradients were not finite (`nonfinite="skip"`).
    """

    steps: int
    last: StepTimes
    average: StepTimes
    initial_bucket_bytes: tuple[int, ...]
    bucket_bytes: tuple[int, ...]
    rebuilt: bool
    buckets_reduced: int
    unused_parameter_bytes: int
    nonfinite_steps: int


@dataclass
class Statistics:
    """Host-side times, in nanoseconds of `time.perf_counter_ns`, of the last synchronising step, and sums over all of them.

    One is kept by each model; its methods are called by the model's own thread.
    """

    forward_start: int = 0
    backward_start: int = 0
    backward_end: int = 0
    communication_start: int = 0
    communication_end: int = 0
    iterations: int = 0
    sample_every: int = 1
    """After the first ten, torch's log speaks of every so many iterations."""
    sampled_iteration: int = 0
    unused_parameter_bytes: int = 0
    buckets_reduced: int = 0
    nonfinite_steps: int = 0
    initial_bucket_bytes: tuple[int, ...] = ()
    error: str = ""
    ready_order: list[int] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_TIMES, 0))
    sums: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_TIMES, 0))

    def forward_starts(self, synchronizes: bool) -> None:
        """A forward with gradients begins."""
        self.forward_start = time.perf_counter_ns()
        if self.iterations < _ALWAYS_SAMPLED or self.iterations % self.sample_every == 0:
            self.sampled_iteration = self.iterations
        self.iterations += synchronizes

    def backward_starts(self) -> None:
        """A backward that synchronises begins."""
        self.backward_start = time.perf_counter_ns()
        self.communication_start = 0

    def bucket_launched(self) -> None:
        """The first of these calls in a backward marks the begin of communication."""
        if not self.communication_start:
            self.communication_start = time.perf_counter_ns()

    def gradients_complete(self) -> None:
        """The last gradient of this rank is there."""
        self.backward_end = time.perf_counter_ns()

    def communication_ends(self) -> None:
        """All averages are in place."""
        self.communication_end = time.perf_counter_ns()
        start = self.communication_start = self.communication_start or self.backward_end
        self.last = {
            "forward": max(self.backward_start - self.forward_start, 0) if self.forward_start else 0,
            "backward": self.backward_end - self.backward_start,
            "communication": self.communication_end - start,
            "overlap": max(self.backward_end - start, 0),
        }
        for what, duration in self.last.items():
            self.sums[what] += duration
        self._steps = self.steps + 1

    _steps: int = 0

    @property
    def steps(self) -> int:
        """How many synchronising backwards have ended well."""
        return self._steps

    def average_ns(self, what: str) -> int:
        """Mean over all steps of "forward", "backward", "communication" or "overlap"."""
        return self.sums[what] // max(self._steps, 1)

    def summary(self, bucket_bytes: tuple[int, ...], *, rebuilt: bool) -> StepStatistics:
        """All of it, given how the buckets are laid out now."""
        return StepStatistics(
            steps=self._steps,
            last=_step_times(self.last),
            average=_step_times({what: self.average_ns(what) for what in _TIMES}),
            initial_bucket_bytes=self.initial_bucket_bytes,
            bucket_bytes=bucket_bytes,
            rebuilt=rebuilt,
            buckets_reduced=self.buckets_reduced,
            unused_parameter_bytes=self.unused_parameter_bytes,
            nonfinite_steps=self.nonfinite_steps,
        )


def _step_times(nanoseconds: dict[str, int]) -> StepTimes:
    return StepTimes(*(timedelta(microseconds=nanoseconds[what] / 1e3) for what in _TIMES))
