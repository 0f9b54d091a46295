"""The bucket memory of one rank of the nccl transport, over the recorder: which mode it has, and what becomes of it where that fails."""

from __future__ import annotations

import gc
import logging

import pytest
import torch

from ddpcomm.errors import CommunicationError, ConfigurationError
from tests.comm.recorder import AgreeableRendezvous, idle_recorder, recorded_communicator


@pytest.mark.parametrize(
    ("version", "mode", "reason"),
    [
        ((2, 32, 3), "window", ""),
        ((2, 26, 2), "registered", "libnccl 2.26.2 has no ncclCommWindowRegister"),
        ((2, 21, 5), "registered", "libnccl 2.21.5 has no ncclCommWindowRegister"),
    ],
)
def test_memory_is_of_the_best_mode_that_the_library_has(version: tuple[int, int, int], mode: str, reason: str) -> None:
    recorder = idle_recorder()
    recorder.library.version = version
    with recorded_communicator(recorder) as communicator:
        communicator.empty(4, torch.float32)
        assert (communicator.memory.mode, communicator.memory.reason) == (mode, reason)


def test_the_fall_back_is_logged_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    recorder = idle_recorder()
    recorder.library.no_handle = True
    with caplog.at_level(logging.INFO), recorded_communicator(recorder) as communicator:
        for _ in range(3):
            communicator.empty(4, torch.float32)
        assert communicator.memory.mode == "plain"
        assert recorder.library.allocated == {}
    lines = [record.getMessage() for record in caplog.records if "falls back" in record.getMessage()]
    assert lines == [
        "bucket memory falls back to registered: ncclCommWindowRegister does not register memory here",
        "bucket memory falls back to plain: ncclCommRegister does not register memory here",
    ]


def test_another_rank_s_reason_is_reported() -> None:
    recorder = idle_recorder()
    rendezvous = AgreeableRendezvous()
    with recorded_communicator(recorder, rendezvous) as communicator:
        rendezvous.objections = ["rank 1 has no NVLink"]
        communicator.empty(4, torch.float32)
        assert (communicator.memory.mode, communicator.memory.reason) == ("registered", "rank 1 has no NVLink")


@pytest.mark.parametrize("memory", ["auto", "window"])
def test_a_failed_window_that_leaves_a_broken_communicator(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Falling back would only put the error off to the first collective."""
    recorder = idle_recorder()

    def fails(*_: object) -> int:
        recorder.library.broken = 2
        raise CommunicationError("no addresses left")

    monkeypatch.setattr(recorder.library, "register_window", fails)
    communicator = recorded_communicator(recorder, memory=memory)
    with pytest.raises(CommunicationError, match=r"\(no addresses left\), and libnccl does nothing more .*memory=\"registered\""):
        communicator.empty(4, torch.float32)
    assert recorder.library.allocated == {}


@pytest.mark.parametrize("memory", ["window", "registered"])
def test_memory_that_was_asked_for_and_can_t_be_had_is_an_error(memory: str) -> None:
    recorder = idle_recorder()
    recorder.library.no_handle = True
    with recorded_communicator(recorder, memory=memory) as communicator, pytest.raises(ConfigurationError, match=f'memory="{memory}"'):
        communicator.empty(4, torch.float32)
    assert recorder.library.allocated == {}


def test_plain_memory_on_request() -> None:
    recorder = idle_recorder()
    with recorded_communicator(recorder, memory="plain") as communicator:
        assert communicator.empty(4, torch.float32).shape == (4,)
        assert communicator.memory.reason == "chosen by option"
    assert "allocate" not in recorder.library.calls


def test_memory_is_accounted_for() -> None:
    recorder = idle_recorder()
    with recorded_communicator(recorder, communicators=2) as communicator:
        first, second = communicator.empty(4, torch.float32), communicator.empty(6, torch.bfloat16)
        assert communicator.registered_bytes == 28
        assert communicator.memory.communicator_bytes == 10
        part = first[:2]
        del first, second
        gc.collect()
        third = communicator.empty(1, torch.int64)
        assert communicator.registered_bytes == 24
        assert recorder.library.calls.count("deregister_window") == 2
        del part, third
    recorder = idle_recorder()
    recorder.library.version = (2, 29, 7)
    with recorded_communicator(recorder) as communicator:
        assert communicator.memory.communicator_bytes is None


def test_empty_tensors_of_no_elements_need_no_memory() -> None:
    recorder = idle_recorder()
    with recorded_communicator(recorder) as communicator:
        assert communicator.empty(0, torch.float32).shape == (0,)
        communicator.all_reduce(communicator.empty(0, torch.float32)).wait()
    assert recorder.library.allocated == {}
