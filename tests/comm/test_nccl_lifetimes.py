"""How long the nccl transport keeps memory that a collective uses: torch's, which may be used anew as soon as it is freed, and its own."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest
import torch

from ddpcomm.comm.nccl import NcclCommunicator
from ddpcomm.comm.nccl_work import NcclWork
from tests.comm.hazards import find_hazards
from tests.comm.recorder import Recorder, RecordingRuntime, recorded_communicator

FLOATS = 16


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def communicator(recorder: Recorder) -> Iterator[NcclCommunicator]:
    communicator = recorded_communicator(recorder)
    yield communicator
    recorder.runtime.idle = True
    communicator.close()


def reduce_and_drop(communicator: NcclCommunicator, recorder: Recorder, wait_on: str) -> None:
    """Reduces a tensor of torch's and lets go of it, having waited on the current stream, on another, or not at all."""
    tensor = recorder.tensor(FLOATS)
    recorder.kernel("backward", writes=[tensor])
    work = communicator.all_reduce(tensor)
    if wait_on == "main":
        work.wait()
    elif wait_on == "side":
        with recorder.runtime.on(recorder.runtime.make_stream("side")):
            work.wait()
    del tensor, work
    gc.collect()


def frees(recorder: Recorder) -> list[str]:
    return [line for line in recorder.lines() if "freed" in line]


def test_memory_is_kept_until_the_stream_that_freed_it_waits(communicator: NcclCommunicator, recorder: Recorder) -> None:
    reduce_and_drop(communicator, recorder, "main")
    assert frees(recorder) == ["main: use freed memory"]
    assert find_hazards(recorder.trace) == []


@pytest.mark.parametrize("wait_on", ["side", "nobody"])
def test_memory_is_kept_until_the_device_is_known_to_be_done(communicator: NcclCommunicator, recorder: Recorder, wait_on: str) -> None:
    """The memory would go back to "main", which has not waited."""
    reduce_and_drop(communicator, recorder, wait_on)
    assert frees(recorder) == []
    recorder.runtime.idle = True
    deadline = time.monotonic() + 30
    while not frees(recorder) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert frees(recorder) == ["main: use freed memory"]
    assert find_hazards(recorder.trace) == []


@pytest.mark.parametrize("wait_on", ["side", "nobody"])
def test_memory_let_go_too_early_is_noticed(
    communicator: NcclCommunicator, recorder: Recorder, wait_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def letting_go(self: NcclWork, *arguments: object, **more: object) -> None:
        made(self, *arguments, **more)  # type: ignore[arg-type]
        self._tensors = ()

    made = NcclWork.__init__
    monkeypatch.setattr(NcclWork, "__init__", letting_go)
    reduce_and_drop(communicator, recorder, wait_on)
    assert find_hazards(recorder.trace) != []


def drop_bucket_memory(communicator: NcclCommunicator, recorder: Recorder) -> None:
    """A bucket is laid out anew while its last all-reduce is under way."""
    buffer = communicator.empty(FLOATS, torch.float32)
    recorder.kernel("flatten", writes=[buffer])
    communicator.all_reduce(buffer).wait()
    del buffer
    gc.collect()
    assert "free" not in recorder.library.calls
    communicator.empty(2 * FLOATS, torch.float32)


def test_bucket_memory_is_freed_by_the_next_allocation_once_the_device_is_idle(communicator: NcclCommunicator, recorder: Recorder) -> None:
    drop_bucket_memory(communicator, recorder)
    assert [line for line in recorder.lines() if line.startswith("host")] == ["host: synchronize", "host: free"]
    assert recorder.library.calls.index("deregister_window") < recorder.library.calls.index("free")
    assert find_hazards(recorder.trace) == []


def test_bucket_memory_freed_without_waiting_is_noticed(
    communicator: NcclCommunicator, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecordingRuntime, "synchronize", lambda self: None)
    drop_bucket_memory(communicator, recorder)
    assert find_hazards(recorder.trace) != []
