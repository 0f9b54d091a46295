"""What a timeline notes during one backward: points in time, and nothing that changes what is executed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ddpcomm.clock import Clock, Instant
from ddpcomm.comm.base import CompletedWork, Work
from ddpcomm.comm.cuda_runtime import Stream

Point = Literal[
    "forward",  # the forward began
    "backward",  # the backward began
    "ready",  # a bucket has its last gradient
    "flatten",  # its flatten begins
    "all_reduce",  # its flatten has ended, its all-reduce is about to be issued
    "sent",  # it has been issued
    "begun",  # it begins on the device
    "done",  # it is done, or was seen to be
    "complete",  # the last gradient of this rank is there
    "wait",  # the wait for a bucket begins
    "waited",  # and has ended
    "unflatten",  # its averages are about to be written to `.grad`
    "unflattened",  # they are there
    "in_place",  # all averages are
    "gradient",  # a parameter's gradient has been computed: `profile_backwards` alone notes that
]
ALL = -1
"""In the place of a bucket, or of a parameter: the step as a whole."""


@dataclass(frozen=True)
class BucketFacts:
    """What a timeline tells of a bucket, beside times."""

    nbytes: int
    parameters: str


class StepRecording:
    """The marks of one backward, in the order in which the host made them.

    When an all-reduce is done, is told by whoever knows best: the stream that it runs on, where the transport tells it (nccl); torch's work
    (process_group on the CPU), from one of its threads; else it is looked for at every later mark, without moving it on, so that the end
    is late by as much as the next mark is away; at the latest it is the end of the wait for it.

    Args:
        clock: tells the time.
        buckets: of the arrangement that is reduced.
        forward: when the forward before began, if that is known.
        watches_work: ask torch's and this package's work when it is done. Not where a device's streams tell.
    """

    __slots__ = ("_in_flight", "_now", "_on", "_unready", "_watches_work", "buckets", "lanes", "launching", "marks", "under_way")

    def __init__(self, clock: Clock, buckets: Sequence[BucketFacts], forward: Instant | None, *, watches_work: bool) -> None:
        self.buckets = buckets
        self.marks: list[tuple[Point, int, Instant]] = []
        self.lanes: dict[int, int] = {}
        """By bucket, the stream of its all-reduce, by its number."""
        self.launching: int | None = None
        """The bucket whose all-reduce is being issued just now."""
        self.under_way = True
        """Whether the averages are not in place, or never came there: an exception has ended the backward."""
        self._now = clock.now
        self._on = clock.on
        self._watches_work = watches_work
        self._unready = list(range(len(buckets)))
        self._in_flight: list[tuple[int, Callable[[], bool]]] = []
        if forward is not None:
            self.marks.append(("forward", ALL, forward))
        self.mark("backward")

    def mark(self, point: Point, bucket: int = ALL) -> None:
        """Notes the time."""
        self.marks.append((point, bucket, self._now()))

    def look_for_full(self, is_full: Callable[[int], bool]) -> None:
        """Some bucket has got its last gradient."""
        full = [bucket for bucket in self._unready if is_full(bucket)]
        for bucket in full:
            self.mark("ready", bucket)
            self._unready.remove(bucket)

    def launches(self, bucket: int) -> None:
        """Flatten has ended; the all-reduce is about to be issued."""
        self.mark("all_reduce", bucket)
        self.launching = bucket

    def sent(self, bucket: int, work: Work | None) -> None:
        """The all-reduce has been issued. `work` is None where a communication hook did it."""
        self.mark("sent", bucket)
        self.launching = None
        if isinstance(work, CompletedWork):
            self.mark("done", bucket)
        elif not self._watches_work:
            return
        elif (seen_done := getattr(work, "seen_done", None)) is not None:
            self._in_flight.append((bucket, seen_done))
        elif (when_done := getattr(work, "when_done", None)) is not None:
            when_done(lambda: self.mark("done", bucket))
        self._look_for_done()

    def waited(self, bucket: int) -> None:
        """A wait has ended."""
        self.mark("waited", bucket)
        self._look_for_done()

    def finish(self) -> None:
        """All averages are in place."""
        self.mark("in_place")
        self.under_way = False

    def _look_for_done(self) -> None:
        for each in [each for each in self._in_flight if each[1]()]:
            self.mark("done", each[0])
            self._in_flight.remove(each)

    # ---- a CollectiveTimer ------------------------------------------------------------------------------------------

    def begins(self, stream: Stream) -> None:
        """A collective is about to be put on `stream`."""
        if self.launching is not None:
            self.lanes[self.launching] = stream.cuda_stream
            self.marks.append(("begun", self.launching, self._on(stream)))

    def ends(self, stream: Stream) -> None:
        """It has been."""
        if self.launching is not None:
            self.marks.append(("done", self.launching, self._on(stream)))
