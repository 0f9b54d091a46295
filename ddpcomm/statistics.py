"""When forward, backward and communication began and ended: the figures of `stats()` and of torch's `_get_ddp_logging_data()`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

_TIMES = ("forward", "backward", "communication", "overlap")
_ALWAYS_SAMPLED = 10


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
