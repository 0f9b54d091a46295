"""One rank of the nccl transport over the recorder: how communicators start and end, and their calls to libnccl."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta

import pytest
import torch

from ddpcomm.comm.nccl import NcclCommunicator
from ddpcomm.errors import ClosedError, CommunicationError, ConfigurationError, TransportUnavailableError
from tests.comm.recorder import AgreeableRendezvous, Recorder, idle_recorder, recorded_communicator
from tests.rank_process import RankContext
from tests.ranks import RankPool

SHORT = timedelta(milliseconds=200)


# ---- its end --------------------------------------------------------------------------------------------------------


def test_close_flushes_every_communicator_and_can_be_called_twice() -> None:
    recorder = idle_recorder()
    communicator = recorded_communicator(recorder, communicators=2)
    buffer = communicator.empty(4, torch.float32)
    for _ in range(2):
        communicator.all_reduce(buffer, "avg").wait()
    del recorder.library.calls[:]
    communicator.close()
    communicator.close()
    assert recorder.library.calls == [
        "deregister_window",
        "deregister_window",
        "destroy_operator",
        "finalize",
        "destroy",
        "destroy_operator",
        "finalize",
        "destroy",
    ]
    assert recorder.runtime.destroyed == ["comm0", "comm1"]
    for call in (lambda: communicator.all_reduce(buffer), lambda: communicator.empty(1, torch.int8), communicator.check_order):
        with pytest.raises(ClosedError, match="nccl communicator"):
            call()


def test_memory_outlives_its_communicator() -> None:
    recorder = idle_recorder()
    communicator = recorded_communicator(recorder)
    buffer = communicator.empty(4, torch.float32)
    part = buffer[1:3]
    communicator.close()
    del buffer
    gc.collect()
    part.fill_(1.0)
    assert "free" not in recorder.library.calls
    del part
    gc.collect()
    assert recorder.library.calls[-1] == "free"
    assert recorder.library.allocated == {}


def test_close_aborts_what_does_not_end() -> None:
    recorder = Recorder()
    communicator = recorded_communicator(recorder, timeout=SHORT)
    communicator._watchdog.stop()  # so that it is not the one that notices
    communicator.all_reduce(torch.zeros(4))
    communicator.close()
    assert recorder.library.calls[-1] == "abort"


@pytest.mark.parametrize("broken", ["hangs", "refused"])
def test_close_aborts_what_can_t_be_flushed(broken: str) -> None:
    recorder = idle_recorder()
    communicator = recorded_communicator(recorder, timeout=SHORT)
    setattr(recorder.library, broken, "finalize" if broken == "hangs" else {"finalize"})
    communicator.close()
    assert recorder.library.calls[-2:] == ["finalize", "abort"]


def test_memory_that_a_kernel_may_still_use_is_never_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that not even an abort can stop must not hang `close` either."""
    monkeypatch.setattr("ddpcomm.comm.nccl_lanes._ABORT_LIMIT", SHORT)
    recorder = Recorder()
    communicator = recorded_communicator(recorder, timeout=SHORT)
    buffer = communicator.empty(4, torch.float32)
    communicator.all_reduce(buffer)
    never = threading.Event()
    monkeypatch.setattr(recorder.library, "abort", lambda handle: never.wait(60))
    communicator.close()
    del buffer
    gc.collect()
    assert "free" not in recorder.library.calls
    assert "host: synchronize" not in recorder.lines()
    never.set()


def test_memory_is_not_lost_when_another_rank_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = idle_recorder()
    rendezvous = AgreeableRendezvous()
    with recorded_communicator(recorder, rendezvous) as communicator:

        def nobody(value: int, reason: str = "") -> tuple[int, str]:
            raise CommunicationError("nobody came")

        monkeypatch.setattr(rendezvous, "minimum", nobody)
        with pytest.raises(CommunicationError, match="nobody came"):
            communicator.empty(4, torch.float32)
    assert recorder.library.allocated == {}


def threads_since(before: set[threading.Thread]) -> set[threading.Thread]:
    """Threads of other tests may end meanwhile: only what began since then counts."""
    return set(threading.enumerate()) - before


def test_the_watchdog_ends_with_its_communicator() -> None:
    recorder = idle_recorder()
    before = set(threading.enumerate())
    communicator = recorded_communicator(recorder)
    communicator.all_reduce(torch.zeros(4))
    assert len(threads_since(before)) == 1
    communicator.close()
    assert threads_since(before) == set()


def test_the_watchdog_ends_even_if_nobody_closes() -> None:
    recorder = idle_recorder()
    before = set(threading.enumerate())
    communicator = recorded_communicator(recorder)
    communicator.all_reduce(torch.zeros(4)).wait()
    del communicator
    gc.collect()
    assert threads_since(before) == set()


# ---- starting and calling -------------------------------------------------------------------------------------------


def test_options_reach_every_communicator() -> None:
    recorder = idle_recorder()
    with recorded_communicator(recorder, communicators=2, max_ctas=4, traffic_class=1, comm_name="gradients"):
        expected = {"blocking": 0, "launch_order_implicit": 1, "max_ctas": 4, "traffic_class": 1, "comm_name": "gradients"}
        assert recorder.library.configs == [expected, expected]


def test_a_communicator_that_takes_its_time_is_waited_for() -> None:
    """Non-blocking calls return before they are done, and nothing may follow on the stream until they are."""
    recorder = idle_recorder()
    recorder.library.slow = 250
    with recorded_communicator(recorder) as communicator:
        communicator.all_reduce(torch.zeros(4), "avg").wait()
        assert recorder.library._pending < 0
    lines = recorder.lines()
    assert lines.index("comm0: all_reduce 16 B, op 102") < lines.index("comm0: record")


def test_a_start_that_fails_leaves_nothing_behind() -> None:
    recorder = idle_recorder()
    recorder.library.hangs = "start"
    with pytest.raises(TransportUnavailableError, match=r"starting NCCL communicator 0: libnccl was still at it after 0\.2 s"):
        recorded_communicator(recorder, timeout=SHORT)
    assert recorder.library.calls == ["start 0 of 2", "abort"]


def test_libraries_that_can_t_order_kernels_say_that_communicators_run_in_turn(caplog: pytest.LogCaptureFixture) -> None:
    recorder = idle_recorder()
    recorder.library.version = (2, 30, 7)
    recorded_communicator(recorder, communicators=2).close()
    assert "they run in turn" in caplog.text
    caplog.clear()
    recorded_communicator(recorder, communicators=2, side_by_side=True).close()
    assert caplog.text == ""


def test_a_scaled_sum_is_made_once() -> None:
    recorder = idle_recorder()
    with recorded_communicator(recorder) as communicator:
        for scale in (0.5, 0.25, 0.5):
            communicator.all_reduce(torch.zeros(4), scale=scale)
            communicator.all_reduce(torch.zeros(4, dtype=torch.float16), scale=scale)
        communicator.all_reduce(torch.zeros(4), "avg")
        made = [call for call in recorder.library.calls if call.startswith("create")]
    dtypes = ("torch.float32", "torch.float16")
    assert made == [f"create_scaled_sum {scale} {dtype}" for scale in (0.5, 0.25) for dtype in dtypes]


def test_a_captured_collective_is_not_asked_after() -> None:
    recorder = Recorder()
    recorder.runtime.capturing = True
    communicator = recorded_communicator(recorder, timeout=SHORT)
    communicator.all_reduce(torch.zeros(4)).wait()
    assert not communicator._watchdog._works
    communicator.close()
    assert "abort" not in recorder.library.calls


def test_threads_that_issue_at_once_keep_one_order() -> None:
    recorder = idle_recorder()
    recorder.library.slow = 102  # long enough to let other threads in
    with recorded_communicator(recorder, communicators=3) as communicator:
        threads = [
            threading.Thread(target=lambda: [communicator.all_reduce(torch.zeros(4)) for _ in range(30)], name=f"issue-{number}")
            for number in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    streams = [entry.stream for entry in recorder.trace if "all_reduce" in entry.label]
    assert streams == [f"comm{number % 3}" for number in range(120)]


def without_a_gpu(context: RankContext) -> str:
    with pytest.raises(TransportUnavailableError) as raised:
        NcclCommunicator.create(context.process_group)
    return str(raised.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_says_so_on_every_rank(two_ranks: RankPool) -> None:
    for message in two_ranks.run(without_a_gpu):
        assert "needs" in message


def test_a_device_that_is_no_gpu_is_refused(two_ranks: RankPool) -> None:
    two_ranks.run(with_the_wrong_device)


def with_the_wrong_device(context: RankContext) -> None:
    pytest.importorskip("nccl.bindings.nccl")
    with pytest.raises(ConfigurationError, match="needs a CUDA device, got cpu"):
        NcclCommunicator.create(context.process_group, torch.device("cpu"))


# ---- fewer ranks ----------------------------------------------------------------------------------------------------


def test_shrink_makes_a_communicator_of_the_others() -> None:
    recorder = idle_recorder()
    communicator = recorded_communicator(recorder, communicators=2)
    smaller = communicator.shrink([1])
    assert [call for call in recorder.library.calls if call.startswith("shrink")] == ["shrink without [1], aborting"] * 2
    with pytest.raises(CommunicationError, match=r"called shrink\(\)"):
        communicator.all_reduce(torch.zeros(4))
    smaller.all_reduce(torch.zeros(4)).wait()
    smaller.close()
    communicator.close()


@pytest.mark.parametrize("why", ["old", "aborted", "revoked, and nobody is left out", "nobody is left out"])
def test_shrink_starts_from_nothing_where_it_must(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpcomm.comm.nccl_watchdog._GATHER_SECONDS", 0.05)
    recorder = idle_recorder()
    if why == "old":
        recorder.library.version = (2, 26, 2)
    communicator = recorded_communicator(recorder, AgreeableRendezvous(1))
    if why == "aborted":
        communicator.abort()
    if why.startswith("revoked"):
        communicator.revoke()
    smaller = communicator.shrink([])
    assert recorder.library.calls.count("start 0 of 1") == 2
    smaller.all_reduce(torch.zeros(4)).wait()
    smaller.close()
    communicator.close()


@pytest.mark.parametrize("excluded", [[0], [2], [-1]])
def test_shrink_refuses_ranks_that_can_t_be_left_out(excluded: list[int]) -> None:
    with recorded_communicator(idle_recorder()) as communicator, pytest.raises(ConfigurationError, match="can't go on without"):
        communicator.shrink(excluded)


def test_revoke_keeps_what_shrink_needs() -> None:
    recorder = idle_recorder()
    communicator = recorded_communicator(recorder)
    work = communicator.all_reduce(torch.zeros(4))
    communicator.revoke()
    with pytest.raises(CommunicationError, match=r"called revoke\(\)"):
        work.wait()
    communicator.shrink([1]).close()
    del recorder.library.calls[:]
    communicator.close()
    assert recorder.library.calls == ["destroy"]  # a revoked communicator must not be finalized


def test_revoke_needs_a_library_that_has_it() -> None:
    recorder = idle_recorder()
    recorder.library.version = (2, 28, 9)
    with recorded_communicator(recorder) as communicator, pytest.raises(ConfigurationError, match="has no ncclCommRevoke"):
        communicator.revoke()
