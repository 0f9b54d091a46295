"""When each parameter's gradient becomes ready in a backward: what tuning and simulation start from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ddpcomm.recording import ALL, StepRecording
from ddpcomm.reducer import Reducer
from ddpcomm.timeline import Timeline
from ddpcomm.untraced import untraced


@dataclass(frozen=True)
class BackwardProfile:
    """One backward that synchronised, on this rank; on CUDA in the device's time.

    Args:
        ready_seconds: by parameter, from the begin of the backward until its gradient was computed, just before it was accumulated; the
            last time, where there were several. Parameters without a gradient are missing.
        compute_seconds: from the begin until this rank's last gradient, with what it took to flatten and send buckets in between.
    """

    ready_seconds: dict[str, float]
    compute_seconds: float


@contextmanager
def profile_backwards(reducer: Reducer) -> Iterator[list[BackwardProfile]]:
    """Fills a list, at the end, with a profile of each backward inside of it that synchronised and ended well. Local.

    A hook in Python runs for every parameter while it lasts, which a timeline alone does without. On CUDA the host waits for the device at
    the end.
    """
    profiles: list[BackwardProfile] = []
    timeline = Timeline(reducer)
    names = reducer.parameters.names
    handles: list[RemovableHandle] = []
    try:
        timeline.start()
        trainable = [(i, p) for i, p in enumerate(reducer.parameters.parameters) if p.requires_grad]
        handles += [_watch(parameter, index, timeline) for index, parameter in trainable]
        yield profiles
    finally:
        for handle in handles:
            handle.remove()
        timeline.stop()
    for recording, times in timeline.times():
        profiles.append(_profile(recording, times, names))


def _watch(parameter: Tensor, index: int, timeline: Timeline) -> RemovableHandle:
    return parameter.register_hook(partial(_note, timeline, index))  # type: ignore[no-any-return, no-untyped-call]


@untraced
def _note(timeline: Timeline, index: int, _: Tensor) -> None:
    recording = timeline.under_way
    if recording is not None:
        recording.mark("gradient", index)


def _profile(recording: StepRecording, times: list[int], names: list[str]) -> BackwardProfile:
    start = complete = 0
    ready: dict[str, float] = {}
    for (point, index, _), time in zip(recording.marks, times, strict=False):  # one of torch's threads may have added a last one
        if point == "backward":
            start = time
        elif point == "complete":
            complete = time
        elif point == "gradient" and index != ALL:
            ready[names[index]] = (time - start) / 1e9
    return BackwardProfile(ready, (complete - start) / 1e9)
