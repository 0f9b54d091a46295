"""The exact order of kernels, events and collectives, and proof that every record and every wait in it is needed.

A small driver does what the reducer does with a bucket: flatten on the current stream, all-reduce, wait, unflatten.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from ddpcomm.comm.cuda_runtime import order_after
from ddpcomm.comm.nccl_lane import Lane
from ddpcomm.comm.nccl_work import NcclWork
from ddpcomm.errors import CommunicationError
from tests.comm.hazards import Entry, Range, find_hazards, without_each_order
from tests.comm.kernels_on_streams import kernels_written_down
from tests.comm.recorder import AgreeableRendezvous, Recorder, recorded_communicator

FLOATS = 16  # 64 bytes


class Training:
    """One rank: a gradient and a bucket's buffer for each entry of `sizes`, in floats."""

    def __init__(self, recorder: Recorder, sizes: Sequence[int] = (FLOATS,), **options: object) -> None:
        self.recorder = recorder
        self.communicator = recorded_communicator(recorder, **options)
        self.buffers = [self.communicator.empty(size, torch.float32) for size in sizes]
        self.gradients = [recorder.tensor(size) for size in sizes]

    def backward(self, index: int, gradient: Tensor, *, accumulate: bool = False) -> None:
        self.recorder.kernel(f"backward {index}", reads=[gradient] if accumulate else [], writes=[gradient])

    def launch(self, index: int) -> NcclWork:
        """Flattens and sends one bucket."""
        self.recorder.kernel(f"flatten {index}", reads=[self.gradients[index]], writes=[self.buffers[index]])
        return self.communicator.all_reduce(self.buffers[index], tag=f"bucket {index}")

    def finish(self, works: Sequence[NcclWork]) -> None:
        for index, work in enumerate(works):
            work.wait()
            self.recorder.kernel(f"unflatten {index}", reads=[self.buffers[index]], writes=[self.gradients[index]])
        self.recorder.kernel("optimizer", reads=self.gradients)


# ---- the scenarios --------------------------------------------------------------------------------------------------


def plain(recorder: Recorder, sizes: Sequence[int] = (FLOATS,), steps: int = 1, **options: object) -> None:
    training = Training(recorder, sizes, **options)
    for _ in range(steps):
        works = []
        for index, gradient in enumerate(training.gradients):
            training.backward(index, gradient)
            works.append(training.launch(index))
        training.finish(works)


def two_steps(recorder: Recorder) -> None:
    plain(recorder, (FLOATS, FLOATS), steps=2)


def gradient_as_view(recorder: Recorder) -> None:
    """Backward accumulates in the bucket itself, and the averages are used where they lie."""
    training = Training(recorder, (FLOATS, FLOATS))
    for _ in range(2):
        works = []
        for index, buffer in enumerate(training.buffers):
            training.backward(index, buffer, accumulate=True)
            works.append(training.communicator.all_reduce(buffer, "avg"))
        for index, work in enumerate(works):
            work.wait()
            recorder.kernel(f"optimizer {index}", reads=[training.buffers[index]], writes=[training.buffers[index]])


def no_sync(recorder: Recorder) -> None:
    """A backward that stays local, then one that goes out."""
    training = Training(recorder)
    training.backward(0, training.gradients[0])
    training.backward(0, training.gradients[0], accumulate=True)
    training.finish([training.launch(0)])


def no_sync_as_view(recorder: Recorder) -> None:
    """A backward that goes out, a local one in the same memory, and one more that goes out."""
    training = Training(recorder)
    for synchronize in (True, False, True):
        training.backward(0, training.buffers[0], accumulate=True)
        if synchronize:
            training.communicator.all_reduce(training.buffers[0], "avg").wait()
    recorder.kernel("optimizer", reads=[training.buffers[0]])


def several_communicators(recorder: Recorder) -> None:
    plain(recorder, (FLOATS,) * 3, communicators=2)


def communicators_in_turn(recorder: Recorder) -> None:
    recorder.library.version = (2, 26, 2)
    plain(recorder, (FLOATS,) * 3, communicators=2)


def oversized_parameter(recorder: Recorder) -> None:
    """One that is larger than any bucket has a bucket of its own, between others."""
    plain(recorder, (FLOATS, 1000 * FLOATS, FLOATS))


def oversized_in_place(recorder: Recorder) -> None:
    """A gradient that is reduced where it lies, in torch's own memory, and then freed."""
    training = Training(recorder)
    gradient = recorder.tensor(1000 * FLOATS)
    training.backward(0, gradient)
    work = training.communicator.all_reduce(gradient, "avg")
    work.wait()
    recorder.kernel("optimizer", reads=[gradient])
    del gradient, work
    gc.collect()


def gradients_of_two_streams(recorder: Recorder) -> None:
    """One gradient of the bucket is computed on another stream than the one that flattens."""
    training = Training(recorder, (FLOATS, FLOATS))
    runtime, side = recorder.runtime, recorder.runtime.make_stream("side")
    with runtime.on(side):
        training.backward(0, training.gradients[0])
    training.backward(1, training.gradients[1])
    order_after(runtime, runtime.main, [side, runtime.main, side], runtime.create_event())
    recorder.kernel("flatten", reads=training.gradients, writes=[training.buffers[0]])
    training.communicator.all_reduce(training.buffers[0]).wait()
    recorder.kernel("unflatten", reads=[training.buffers[0]], writes=training.gradients)


def views_of_two_streams(recorder: Recorder) -> None:
    """Two streams accumulate in the bucket itself: the collective is told of the one that isn't current."""
    training = Training(recorder)
    side = recorder.runtime.make_stream("side")
    halves = training.buffers[0].chunk(2)
    with recorder.runtime.on(side):
        training.backward(0, halves[0])
    training.backward(1, halves[1])
    training.communicator.all_reduce(training.buffers[0], streams=[side]).wait()
    recorder.kernel("optimizer", reads=[training.buffers[0]])


def scaled_views_of_two_streams(recorder: Recorder) -> None:
    """A third in 16 bits is not exact, so that it is applied before, on the current stream, which must wait for the other one too."""
    communicator = recorded_communicator(recorder, AgreeableRendezvous(3))
    buffer = communicator.empty(2 * FLOATS, torch.bfloat16)
    side = recorder.runtime.make_stream("side")
    with recorder.runtime.on(side), kernels_written_down(recorder):
        buffer[:FLOATS].fill_(1.0)
    with kernels_written_down(recorder):
        buffer[FLOATS:].fill_(1.0)
        communicator.all_reduce(buffer, "avg", streams=[side]).wait()
        buffer.tolist()


SCENARIOS: list[Callable[[Recorder], None]] = [
    plain,
    two_steps,
    gradient_as_view,
    no_sync,
    no_sync_as_view,
    several_communicators,
    communicators_in_turn,
    oversized_parameter,
    oversized_in_place,
    gradients_of_two_streams,
    views_of_two_streams,
    scaled_views_of_two_streams,
]


def traced(scenario: Callable[[Recorder], None]) -> list[Entry]:
    recorder = Recorder()
    scenario(recorder)
    return list(recorder.trace)


def order_of(scenario: Callable[[Recorder], None]) -> list[str]:
    """The trace in words, without what happens to the driver's own tensors when it is done."""
    return [str(entry) for entry in traced(scenario) if entry.label != "use freed memory"]


def check(trace: list[Entry], scenario: Callable[[Recorder], None]) -> list[str]:
    """The hazards. Communicators that run in turn share something that may be used by one at a time: the device."""
    if scenario is communicators_in_turn:
        device = Range(-2, -1)
        trace = [dataclasses.replace(e, writes=(*e.writes, device)) if "all_reduce" in e.label else e for e in trace]
    return find_hazards(trace)


# ---- the tests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_nothing_is_used_too_early(scenario: Callable[[Recorder], None]) -> None:
    assert check(traced(scenario), scenario) == []


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_every_record_and_every_wait_is_needed(scenario: Callable[[Recorder], None]) -> None:
    trace = traced(scenario)
    mutants = without_each_order(trace)
    assert len(mutants) >= 4
    unnoticed = [f"{trace.index(removed)}: {removed}" for removed, mutant in mutants if not check(mutant, scenario)]
    assert unnoticed == []


def test_order_of_a_plain_step() -> None:
    assert order_of(plain) == [
        "main: backward 0",
        "main: flatten 0",
        "main: record",
        "comm0: wait for main",
        "comm0: all_reduce 64 B, op 0",
        "comm0: record",
        "main: wait for comm0",
        "main: unflatten 0",
        "main: optimizer",
    ]


def test_order_with_gradient_as_view() -> None:
    """Nothing is copied, and libnccl scales as it sums (operator 104 is made for that)."""
    assert order_of(gradient_as_view)[:12] == [
        "main: backward 0",
        "main: record",
        "comm0: wait for main",
        "comm0: all_reduce 64 B, op 104",
        "comm0: record",
        "main: backward 1",
        "main: record",
        "comm0: wait for main",
        "comm0: all_reduce 64 B, op 104",
        "comm0: record",
        "main: wait for comm0",
        "main: optimizer 0",
    ]


def test_order_under_no_sync() -> None:
    assert order_of(no_sync) == [
        "main: backward 0",
        "main: backward 0",
        "main: flatten 0",
        "main: record",
        "comm0: wait for main",
        "comm0: all_reduce 64 B, op 0",
        "comm0: record",
        "main: wait for comm0",
        "main: unflatten 0",
        "main: optimizer",
    ]


def test_order_with_several_communicators() -> None:
    """They take turns in being given work, and none waits for another."""
    lines = [line for line in order_of(several_communicators) if not line.startswith("main")]
    assert lines == [
        "comm0: wait for main",
        "comm0: all_reduce 64 B, op 0",
        "comm0: record",
        "comm1: wait for main",
        "comm1: all_reduce 64 B, op 0",
        "comm1: record",
        "comm0: wait for main",
        "comm0: all_reduce 64 B, op 0",
        "comm0: record",
    ]


def test_order_with_communicators_in_turn() -> None:
    """A libnccl that can't order the kernels of several communicators must not run two at once."""
    lines = [line for line in order_of(communicators_in_turn) if not line.startswith("main")]
    assert lines == [
        "comm0: wait for main",
        "comm0: all_reduce 64 B, op 0",
        "comm0: record",
        "comm1: wait for main",
        "comm1: wait for comm0",
        "comm1: all_reduce 64 B, op 0",
        "comm1: record",
        "comm0: wait for main",
        "comm0: wait for comm1",
        "comm0: all_reduce 64 B, op 0",
        "comm0: record",
    ]


def test_order_with_an_oversized_parameter() -> None:
    collectives = [line for line in order_of(oversized_parameter) if "all_reduce" in line]
    assert collectives == ["comm0: all_reduce 64 B, op 0", "comm0: all_reduce 64000 B, op 0", "comm0: all_reduce 64 B, op 0"]


def test_each_other_stream_is_waited_for_once() -> None:
    recorder = Recorder()
    runtime, side = recorder.runtime, recorder.runtime.make_stream("side")
    order_after(runtime, runtime.main, [side, runtime.main, side], runtime.create_event())
    assert recorder.lines() == ["side: record", "main: wait for side"]


def test_order_of_an_abort() -> None:
    """What is under way is stopped; nothing is put on any stream after that, and whoever waits is told."""
    recorder = Recorder()
    training = Training(recorder, (FLOATS, FLOATS), communicators=2)
    for index, gradient in enumerate(training.gradients):
        training.backward(index, gradient)
    works = [training.launch(0), training.launch(1)]
    before = recorder.lines()
    training.communicator.abort()
    for work in works:
        with pytest.raises(CommunicationError, match=r"rank 0 called abort\(\)"):
            work.wait()
    with pytest.raises(CommunicationError, match=r"rank 0 called abort\(\)"):
        training.launch(0)
    after = [line for line in recorder.lines()[len(before) :] if not line.startswith("host")]
    assert after == ["main: flatten 0"]
    assert recorder.library.calls[-2:] == ["abort", "abort"]
    training.communicator.close()
    assert recorder.runtime.destroyed == ["comm0", "comm1"]


@pytest.mark.parametrize("broken", ["follow", "wait"])
def test_a_lane_that_does_not_wait_is_noticed(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as taking entries out of the trace, but in the code: without the waits before, or after, the collective."""
    if broken == "follow":
        monkeypatch.setattr(Lane, "follow", lambda self, producers: None)
    else:
        monkeypatch.setattr(NcclWork, "wait", lambda self, timeout=None: None)
    assert find_hazards(traced(plain)) != []
