"""What a model tells of its own speed: `stats()` and `timeline()`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike

from torch import nn

from ddpcomm import env
from ddpcomm.argument_checks import check_path
from ddpcomm.reducer import Reducer
from ddpcomm.statistics import Statistics, StepStatistics
from ddpcomm.timeline import EnvironmentTimeline, Timeline

_log = logging.getLogger(__name__)


class Measurements(nn.Module):
    """Base of DistributedDataParallel, which has the attributes named here."""

    require_backward_grad_sync: bool
    _reducer: Reducer
    _statistics: Statistics

    def _measure(self) -> None:
        """Begins what is measured from a model's first step on. Local."""
        self._statistics.initial_bucket_bytes = self._bucket_bytes()
        path = env.read().timeline
        if path is not None:
            EnvironmentTimeline(self._reducer, path).start(at_first_step=True)

    def _forward_starts(self) -> None:
        """A training forward begins."""
        self._statistics.forward_starts(self.require_backward_grad_sync)
        if self._reducer.timeline is not None:
            self._reducer.timeline.forward_starts()

    def _bucket_bytes(self) -> tuple[int, ...]:
        sizes = [sum(p.nbytes for p in bucket.parameters) for bucket in self._reducer.arrangement.buckets]
        return tuple(size for size in sizes if size)

    def stats(self) -> StepStatistics:
        """Times and sizes of this rank's steps so far: see `StepStatistics`. Local."""
        return self._statistics.summary(self._bucket_bytes(), rebuilt=self._reducer.learned)

    @contextmanager
    def timeline(self, path: str | PathLike[str]) -> Iterator[Timeline]:
        """Records a timeline of the steps inside of it, and writes it, all ranks in one file, on rank 0. `ddpcomm timeline` shows it.

        Collective at the start and at the end. Where an exception leaves the block it is not: then this rank writes what it has to a file
        of its own (trace.json becomes trace.rank0.json), and so does every rank whose exchange at the end fails in consequence. On CUDA the
        host waits for the device at the start and at the end, never in between. The last 1000 steps are kept.

        Args:
            path: of the file, in Chrome's trace format, which https://ui.perfetto.dev shows.

        Raises:
            CommunicationError: the ranks could not exchange what they recorded.
            OSError: the file can't be written.
        """
        file = check_path("timeline: path", path)
        recorder = Timeline(self._reducer)
        self._reducer.prepare_forward()  # what an interrupted backward has left under way would meet the exchanges
        recorder.align()
        recorder.start()
        try:
            yield recorder
            recorder.stop()
            self._reducer.prepare_forward()
            recorder.align()
            recorder.write_merged(file)
        except BaseException:
            recorder.stop()
            try:
                recorder.write_own(file)
            except OSError as error:
                _log.warning("the timeline could not be written: %s", error)  # what has ended the block counts more
            raise
