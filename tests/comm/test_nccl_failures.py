"""What the nccl transport does when a rank is missing, dies, or issues something else: every rank gets a typed error, and soon."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch

from ddpcomm.errors import CollectiveMismatchError, CollectiveTimeoutError, CommunicationError, PeerLostError
from tests.comm.nccl_over_gloo import nccl_over_gloo
from tests.comm.recorder import Recorder, caught, recorded_communicator
from tests.rank_process import RankContext
from tests.ranks import RankFailure, RankPool

LIMIT = timedelta(milliseconds=500)


def hanging(recorder: Recorder) -> None:
    """From here on the device never gets done with anything."""
    recorder.runtime.idle = False


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank is none that could answer: asking it is no use."""
    monkeypatch.setattr("ddpcomm.comm.nccl_watchdog._GATHER_SECONDS", 0.05)


# ---- one rank alone -------------------------------------------------------------------------------------------------


def test_a_time_limit_aborts_and_names_the_collective(impatient: None) -> None:
    recorder = Recorder()
    communicator = recorded_communicator(recorder, timeout=LIMIT)
    work = communicator.all_reduce(torch.zeros(4), tag="bucket 3")
    error = caught(communicator)
    assert isinstance(error, CollectiveTimeoutError)
    assert "all_reduce of bucket 3 (16 bytes, torch.float32, sum outside windows; collective number 0)" in str(error)
    assert recorder.library.calls[-1] == "abort"
    for call in (work.wait, work.is_completed, lambda: communicator.all_reduce(torch.zeros(4)), lambda: communicator.empty(4, torch.half)):
        with pytest.raises(CollectiveTimeoutError, match="bucket 3"):
            call()
    communicator.close()


def test_a_wait_with_a_time_limit_blocks_and_aborts(impatient: None) -> None:
    recorder = Recorder()
    communicator = recorded_communicator(recorder)
    work = communicator.all_reduce(torch.zeros(4), tag="bucket 5")
    with pytest.raises(CollectiveTimeoutError, match=r"all_reduce of bucket 5 .* was not done after 0\.05 s"):
        work.wait(timedelta(milliseconds=50))
    assert recorder.library.calls[-1] == "abort"
    communicator.close()


def test_a_barrier_blocks_until_the_device_is_done(impatient: None) -> None:
    recorder = Recorder()
    communicator = recorded_communicator(recorder, timeout=LIMIT)
    with pytest.raises(CollectiveTimeoutError, match="barrier"):
        communicator.barrier().wait()
    recorder.runtime.idle = True
    with recorded_communicator(recorder) as other:
        other.barrier().wait()


@pytest.mark.parametrize(("code", "kind"), [(3, CommunicationError), (6, PeerLostError)])
def test_libnccl_s_own_errors_are_polled(impatient: None, code: int, kind: type[Exception]) -> None:
    recorder = Recorder()
    communicator = recorded_communicator(recorder, timeout=LIMIT)
    communicator.all_reduce(torch.zeros(4))
    recorder.library.broken = code
    error = caught(communicator)
    assert type(error) is kind
    assert recorder.library.calls[-1] == "abort"
    communicator.close()


def test_a_call_that_libnccl_never_takes_is_given_up(impatient: None) -> None:
    recorder = Recorder()
    communicator = recorded_communicator(recorder, timeout=LIMIT)
    recorder.library.hangs = "all_reduce"
    with pytest.raises(CollectiveTimeoutError, match=r"libnccl was still at it after 0\.5 s"):
        communicator.all_reduce(torch.zeros(4))
    communicator.close()


def test_a_call_under_way_ends_when_another_thread_aborts(impatient: None) -> None:
    recorder = Recorder()
    communicator = recorded_communicator(recorder)
    communicator.all_reduce(torch.zeros(4))  # starts the watchdog
    recorder.library.hangs = "all_reduce"
    communicator._rendezvous.cry("PeerLostError", "a cable was pulled")
    start = time.monotonic()
    with pytest.raises(PeerLostError, match="a cable was pulled"):
        communicator.all_reduce(torch.zeros(4))
    assert time.monotonic() - start < 30  # not the minute of the time limit
    communicator.close()


def test_a_call_that_libnccl_refuses_fails_the_communicator(impatient: None) -> None:
    recorder = Recorder()
    communicator = recorded_communicator(recorder)
    recorder.library.refused = {"all_reduce"}
    with pytest.raises(CommunicationError, match="all_reduce was refused"):
        communicator.all_reduce(torch.zeros(4))
    with pytest.raises(CommunicationError, match="all_reduce was refused"):
        communicator.check()
    communicator.close()


def test_an_error_of_the_device_reaches_the_caller(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def illegal(event: int) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    recorder = Recorder()
    communicator = recorded_communicator(recorder, timeout=LIMIT)
    monkeypatch.setattr(recorder.runtime, "is_complete", illegal)
    communicator.all_reduce(torch.zeros(4))
    error = caught(communicator)
    assert "illegal memory access" in str(error)
    monkeypatch.setattr(recorder.runtime, "is_complete", lambda event: True)
    communicator.close()


# ---- two ranks ------------------------------------------------------------------------------------------------------


def one_rank_stays_away(context: RankContext) -> tuple[str, tuple[int, ...]]:
    communicator, recorder = nccl_over_gloo(context, timeout=LIMIT)
    communicator.all_reduce(torch.zeros(4)).wait(timedelta(seconds=10))
    if context.rank == 0:
        hanging(recorder)
        communicator._library._reduce = lambda tensor, op: None  # type: ignore[attr-defined]
        communicator.all_reduce(torch.zeros(4), tag="bucket 1")
    error = caught(communicator)
    assert isinstance(error, CollectiveTimeoutError)
    communicator.close()
    return str(error), error.missing_ranks


def test_a_missing_rank_is_named_on_all_ranks(two_ranks: RankPool) -> None:
    for rank, (message, missing) in enumerate(two_ranks.run(one_rank_stays_away)):
        assert missing == (1,)
        assert "all_reduce of bucket 1 (16 bytes" in message
        assert "Rank 1 has issued only 1 collectives" in message
        assert message.startswith("rank 0 gave up: ") == (rank == 1)


def one_rank_differs(context: RankContext) -> str:
    communicator, _ = nccl_over_gloo(context)
    communicator._library._reduce = lambda tensor, op: None  # type: ignore[attr-defined]
    for number in range(8):
        size = 3 if context.rank == 1 and number == 5 else 4
        communicator.all_reduce(torch.zeros(size)).wait()
    error = caught(communicator)
    assert isinstance(error, CollectiveMismatchError)
    communicator.close()
    return str(error)


def test_ranks_that_issue_different_collectives_all_say_so(two_ranks: RankPool) -> None:
    for message in two_ranks.run(one_rank_differs):
        assert "ranks 0 and 1 issued different collectives among the first 8" in message


def one_rank_dies(context: RankContext) -> tuple[str, int | None]:
    communicator, recorder = nccl_over_gloo(context, timeout=LIMIT)
    communicator.all_reduce(torch.zeros(4)).wait()
    if context.rank == 1:
        os._exit(1)
    time.sleep(0.5)
    recorder.library.broken = 6
    error = caught(communicator)
    assert isinstance(error, PeerLostError)
    communicator.close()
    return str(error), error.lost_rank


def test_a_dead_rank_is_named(two_ranks: RankPool) -> None:
    with pytest.raises(RankFailure) as raised:
        two_ranks.run(one_rank_dies)
    assert raised.value.tracebacks.keys() == {1}
    message, lost = raised.value.results[0]
    assert lost == 1
    assert "No answer from rank 1" in message


def one_rank_aborts(context: RankContext) -> str:
    communicator, _ = nccl_over_gloo(context)
    communicator.all_reduce(torch.zeros(4)).wait()
    if context.rank == 1:
        communicator.abort()
    error = caught(communicator)
    communicator.close()
    return str(error)


def test_an_abort_reaches_all_ranks(two_ranks: RankPool) -> None:
    for message in two_ranks.run(one_rank_aborts):
        assert "rank 1 called abort()" in message


def one_rank_aborts_while_the_other_waits(context: RankContext) -> float:
    communicator, _ = nccl_over_gloo(context, timeout=timedelta(seconds=60))
    communicator.all_reduce(torch.zeros(4)).wait()
    start = time.monotonic()
    if context.rank == 1:
        time.sleep(0.5)
        communicator.abort()
    else:
        with pytest.raises(CommunicationError, match=r"rank 1 called abort\(\)"):
            communicator.empty(4, torch.float32)
    communicator.close()
    return time.monotonic() - start


def test_a_failure_elsewhere_ends_a_meeting(two_ranks: RankPool) -> None:
    assert max(two_ranks.run(one_rank_aborts_while_the_other_waits)) < 50
