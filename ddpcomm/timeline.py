"""Timelines: when each bucket of each backward was ready, flattened, reduced, waited for and written back.

A timeline notes times and does nothing else: the same kernels and collectives run in the same order with and without it. The format is in
`ddpcomm.trace`, what is noted when in `ddpcomm.recording`, the clocks in `ddpcomm.clock`.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from ddpcomm.arrangement import Arrangement
from ddpcomm.clock import Clock, DeviceClock, HostClock, Instant, Pass, host_clock_name, pass_barriers
from ddpcomm.comm.base import Communicator
from ddpcomm.comm.cuda_runtime import CudaRuntime, Stream, TorchCudaRuntime
from ddpcomm.comm.exchange import all_gather_objects
from ddpcomm.recording import BucketFacts, StepRecording
from ddpcomm.trace import RankTrace, pack, unpack, write
from ddpcomm.trace_events import events_of_step

if TYPE_CHECKING:
    from ddpcomm.reducer import Reducer

_log = logging.getLogger(__name__)
MOST_STEPS = 1000
"""A timeline keeps the last so many steps."""

_environment_timelines = itertools.count()


class Timeline:
    """Records the backwards of one model that synchronise, from `start` to `stop`.

    Args:
        reducer: whose. Its timeline before is put back at `stop`.
        most_steps: older steps are forgotten.
    """

    def __init__(self, reducer: Reducer, most_steps: int = MOST_STEPS) -> None:
        self._reducer = weakref.ref(reducer)
        self._last_communicator: Communicator = reducer.communicator
        self._runtime = _runtime(self._communicator)
        self._clock: Clock = HostClock() if self._runtime is None else DeviceClock(self._runtime)
        self._recordings: deque[StepRecording] = deque(maxlen=most_steps)
        self._forward: Instant | None = None
        self._former: Timeline | None = None
        self._facts: tuple[weakref.ref[Arrangement], list[BucketFacts]] | None = None
        self._started = False
        self._count = 0
        self._barriers: list[list[Pass]] = []

    # ---- its life ---------------------------------------------------------------------------------------------------

    def start(self, *, at_first_step: bool = False) -> None:
        """Begins to record. On a device the host waits until it is idle: now or, `at_first_step`, when the first step begins."""
        reducer = self._reducer()
        if reducer is not None:
            self._former, reducer.timeline = reducer.timeline, self
            if not at_first_step:
                self._begin()

    def stop(self) -> None:
        """Records no further. On a device the host waits until it is idle. Idempotent."""
        reducer = self._reducer()
        if reducer is not None:
            above = reducer.timeline
            if above is self:
                reducer.timeline = self._former
            while above is not None:
                if above._former is self:
                    above._former = self._former
                above = above._former
        if self._communicator.timer is self:
            self._communicator.timer = None
        if self._started:
            self._started = False
            self._clock.finish()

    def close(self) -> None:
        """The model ends."""
        self.stop()
        if self._former is not None:
            self._former.close()

    def align(self) -> None:
        """Lets the ranks of different hosts find out how their clocks differ. Collective; call it after `start` and after `stop`."""
        names = all_gather_objects(self._communicator, host_clock_name())
        if len(set(names)) > 1:
            self._barriers.append(pass_barriers(self._communicator))

    @property
    def _communicator(self) -> Communicator:
        """The reducer's: tuning may have put another in the place of the one that there was."""
        reducer = self._reducer()
        if reducer is not None:
            self._last_communicator = reducer.communicator
        return self._last_communicator

    # ---- while it records -------------------------------------------------------------------------------------------

    def forward_starts(self) -> None:
        """A forward with gradients begins."""
        self._begin()
        self._forward = self._clock.now()

    def step(self, arrangement: Arrangement) -> StepRecording | None:
        """A backward that synchronises begins. Returns where to note its times; None while a CUDA graph is captured, which has none."""
        if self._runtime is not None and self._runtime.is_capturing():
            return None
        self._begin()
        forward, self._forward = self._forward, None
        recording = StepRecording(self._clock, self._facts_of(arrangement), forward, watches_work=self._runtime is None)
        self._recordings.append(recording)
        self._count += 1
        return recording

    @property
    def under_way(self) -> StepRecording | None:
        """The recording of the backward that runs now, if one that synchronises does."""
        return self._recordings[-1] if self._recordings and self._recordings[-1].under_way else None

    def _begin(self) -> None:
        if not self._started:
            self._started = True
            self._clock.start()
            if self._runtime is not None:
                self._communicator.timer = self

    def begins(self, stream: Stream) -> None:
        """A collective is about to be put on a stream."""
        if self._recordings:
            self._recordings[-1].begins(stream)

    def ends(self, stream: Stream) -> None:
        """It has been."""
        if self._recordings:
            self._recordings[-1].ends(stream)

    def _facts_of(self, arrangement: Arrangement) -> list[BucketFacts]:
        if self._facts is None or self._facts[0]() is not arrangement:
            facts = [BucketFacts(bucket.buffer.nbytes, arrangement.names(i)) for i, bucket in enumerate(arrangement.buckets)]
            self._facts = weakref.ref(arrangement), facts
        return self._facts[1]

    # ---- what comes of it -------------------------------------------------------------------------------------------

    def times(self) -> list[tuple[StepRecording, list[int]]]:
        """Every step that ended well, and the times of its marks in nanoseconds of `time.perf_counter_ns`. After `stop`."""
        complete = [recording for recording in self._recordings if not recording.under_way]
        marks = [[instant for _, _, instant in recording.marks] for recording in complete]
        return list(zip(complete, self._clock.host_times(marks), strict=True)) if complete else []

    def trace(self) -> RankTrace:
        """What this rank recorded. After `stop`."""
        numbers = {id(recording): self._count - len(self._recordings) + i for i, recording in enumerate(self._recordings)}
        times, size = self.times(), self._communicator.world_size
        return RankTrace(
            rank=self._communicator.rank,
            world_size=size,
            clock=host_clock_name(),
            device=str(self._communicator.device),
            transport=self._communicator.transport,
            steps=len(times),
            events=[event for step, own in times for event in events_of_step(numbers[id(step)], step, own, size)],
            barriers=self._barriers,
        )

    def write_own(self, path: Path) -> Path:
        """Writes what this rank recorded, to a file of its own beside `path`. Local. Returns that file.

        Raises:
            OSError: it can't be written.
        """
        own = path.with_name(f"{path.stem}.rank{self._communicator.rank}{path.suffix or '.json'}")
        write([self.trace()], own)
        return own

    def write_merged(self, path: Path) -> None:
        """Writes what all ranks recorded into one file, on rank 0. Collective: their traces are exchanged.

        Raises:
            CommunicationError: the exchange failed.
            OSError: rank 0 can't write the file. There alone.
        """
        packed = all_gather_objects(self._communicator, pack(self.trace()))
        if self._communicator.rank == 0:
            write([unpack(each) for each in packed], path)


class EnvironmentTimeline(Timeline):
    """The timeline that DDPCOMM_TIMELINE asks for: from a model's first step to its end, a file for each rank and model.

    Args:
        reducer: of the model.
        path: the variable's value. Files are named after it: trace.json becomes trace.rank0.json, and trace.1.rank0.json for the second
            model of the process.
    """

    def __init__(self, reducer: Reducer, path: Path) -> None:
        super().__init__(reducer)
        number = next(_environment_timelines)
        self._path = path.with_name(f"{path.stem}.{number}{path.suffix}") if number else path

    def close(self) -> None:
        """Writes the file, unless nothing was recorded. What goes wrong is logged: the model has done its work."""
        super().close()
        try:
            if self.times():
                _log.info("timeline written to %s", self.write_own(self._path))
        except OSError as error:
            _log.warning("the timeline could not be written: %s", error)


def _runtime(communicator: Communicator) -> CudaRuntime | None:
    if communicator.cuda_runtime is None and communicator.device.type == "cuda":
        return TorchCudaRuntime(communicator.device)
    return communicator.cuda_runtime
