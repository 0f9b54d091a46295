"""What the shared-memory communicators do when something goes wrong: a typed error on every rank, soon, and nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from ddpcomm import _native
from ddpcomm.comm import segments
from ddpcomm.comm.base import Communicator, Work
from ddpcomm.comm.factory import create_communicator
from ddpcomm.comm.process_group import ProcessGroupCommunicator
from ddpcomm.errors import (
    ClosedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    RankMismatchError,
    SharedMemoryFullError,
    TransportUnavailableError,
)
from tests.ranks import RankContext, RankFailure, RankPool

pytestmark = pytest.mark.timeout(300)

LIMIT = timedelta(seconds=20)


def make(context: RankContext, timeout: timedelta = LIMIT, **options: Any) -> Communicator:
    return create_communicator(context.process_group, "cpu", "shared_memory", timeout, **options)


@contextlib.contextmanager
def measured(limit_seconds: float) -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < limit_seconds


# ---- a rank dies ----------------------------------------------------------------------------------------------------


def end_by_signal() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def end_by_exit() -> None:
    os._exit(0)


def end_with_a_child() -> None:
    """A child that outlives its parent holds all files that it has inherited."""
    if os.fork() == 0:
        time.sleep(8)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def die(context: RankContext, end: Callable[[], None], own: bool, transport: dict[str, Any]) -> str:
    communicator = create_communicator(context.process_group, "cpu", timeout=LIMIT, **transport)
    tensor = communicator.empty(100_000, torch.float32) if own else torch.empty(100_000)
    communicator.all_reduce(tensor.fill_(1)).wait()
    lost = context.world_size - 1
    if context.rank == lost:
        end()
    with measured(5.0), pytest.raises(PeerLostError) as caught:
        communicator.all_reduce(tensor).wait()
    assert caught.value.lost_rank == lost or transport["transport"] == "hierarchical"
    with pytest.raises(PeerLostError):
        communicator.barrier()
    communicator.close()
    return str(caught.value)


def survivors(pool: RankPool, *arguments: Any) -> dict[int, Any]:
    """What the ranks return while the last one dies."""
    with pytest.raises(RankFailure) as caught:
        pool.run(die, *arguments)
    assert list(caught.value.tracebacks) == [pool.world_size - 1], str(caught.value)
    return caught.value.results


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("end", [end_by_signal, end_by_exit, end_with_a_child])
def test_a_rank_dies(ranks: Callable[[int], RankPool], end: Callable[[], None], own: bool) -> None:
    before = set(os.listdir("/dev/shm"))
    results = survivors(ranks(3), end, own, {"transport": "shared_memory"})
    for text in results.values():
        assert "rank 2 has died" in text
        assert "all_reduce(sum, 100000 x float32, 400000 bytes)" in text
    assert not {name for name in os.listdir("/dev/shm") if "ddpcomm" in name} - before


def test_a_rank_of_a_host_dies(ranks: Callable[[int], RankPool]) -> None:
    """Its own host finds it by shared memory, the leaders of others by their connection or by its host's leader."""
    results = survivors(ranks(3), end_by_signal, True, {"transport": "hierarchical", "hosts": ((0,), (1, 2))})
    assert len(results) == 2


# ---- a rank hangs, leaves or goes its own way -----------------------------------------------------------------------


def hang(context: RankContext, arrived: bool) -> None:
    communicator = make(context, timedelta(seconds=1))
    tensor = communicator.empty(100_000, torch.float32)
    if context.rank == 1:
        if arrived:
            communicator.all_reduce(tensor)
        time.sleep(3)
        with pytest.raises(CollectiveTimeoutError):
            communicator.all_reduce(tensor).wait()
        return
    time.sleep(0.5)  # so that rank 1 has come first, and can't do its part in its call
    with measured(2.5), pytest.raises(CollectiveTimeoutError) as caught:
        communicator.all_reduce(tensor).wait()
    assert caught.value.missing_ranks == (1,)
    text = str(caught.value)
    assert "all_reduce(sum, 100000 x float32, 400000 bytes), call 1, did not end within 1 s" in text
    assert ("rank 1 called it but did not do their part" if arrived else "rank 1 did not call it") in text
    with measured(0.5), pytest.raises(CollectiveTimeoutError):
        communicator.barrier()


@pytest.mark.parametrize("arrived", [False, True])
def test_a_rank_hangs(two_ranks: RankPool, arrived: bool) -> None:
    two_ranks.run(hang, arrived)


def short_wait(context: RankContext) -> None:
    """A wait's own time limit counts, not the communicator's."""
    communicator = make(context)
    if context.rank == 1:
        time.sleep(1)
    else:
        with measured(2.0), pytest.raises(CollectiveTimeoutError, match=r"within 0\.2 s"):
            communicator.barrier().wait(timedelta(seconds=0.2))


def test_a_short_wait(two_ranks: RankPool) -> None:
    two_ranks.run(short_wait)


def leave(context: RankContext) -> None:
    communicator = make(context)
    communicator.barrier().wait()
    if context.rank == 1:
        communicator.close()
        return
    with measured(2.0), pytest.raises(PeerLostError, match="rank 1 has closed its communicator") as caught:
        communicator.all_reduce(torch.ones(5)).wait()
    assert caught.value.lost_rank == 1


def test_a_rank_leaves(two_ranks: RankPool) -> None:
    two_ranks.run(leave)


def close_under_way(context: RankContext) -> None:
    communicator = make(context)
    tensor = communicator.empty(100_000, torch.float32)
    if context.rank == 0:
        work = communicator.all_reduce(tensor)
        communicator.close()
        with pytest.raises(ClosedError, match="closed"):
            work.wait()
    else:
        time.sleep(0.5)
        with pytest.raises(PeerLostError):
            communicator.all_reduce(tensor).wait()


def test_closed_under_way(two_ranks: RankPool) -> None:
    two_ranks.run(close_under_way)


Call = Callable[[Communicator], Work]
MISMATCHES: dict[str, tuple[Call, Call, str]] = {
    "op": (
        lambda c: c.all_reduce(torch.ones(4), "sum"),
        lambda c: c.all_reduce(torch.ones(4), "max"),
        "ranks 0, 2 called all_reduce(sum, 4 x float32, 16 bytes)",
    ),
    "size": (lambda c: c.all_reduce(torch.ones(4)), lambda c: c.all_reduce(torch.ones(5)), "rank 1 called all_reduce(sum, 5 x float32"),
    "dtype": (
        lambda c: c.all_reduce(torch.ones(4)),
        lambda c: c.all_reduce(torch.ones(2).double()),
        "rank 1 called all_reduce(sum, 2 x float64, 16 bytes)",
    ),
    "kind": (lambda c: c.barrier(), lambda c: c.broadcast(torch.ones(4)), "rank 1 called broadcast(from rank 0, 4 x float32"),
    "source": (lambda c: c.broadcast(torch.ones(4), 0), lambda c: c.broadcast(torch.ones(4), 1), "ranks 0, 2 called broadcast(from rank 0"),
    "large": (
        lambda c: c.all_reduce(c.empty(1_000_000, torch.float32)),
        lambda c: c.all_reduce(c.empty(999_999, torch.float32)),
        "999999 x float32",
    ),
    "moved type": (
        lambda c: c.broadcast(torch.ones(8, dtype=torch.uint8)),
        lambda c: c.broadcast(torch.ones(8, dtype=torch.bool)),
        "8 x bool",
    ),
}


def call_all(communicator: Communicator, calls: list[Call]) -> None:
    for work in [call(communicator) for call in calls]:
        work.wait()


def mismatch(context: RankContext, name: str) -> str:
    usual, other, wanted = MISMATCHES[name]
    communicator = make(context)
    tensor = communicator.empty(50_000, torch.float32).fill_(context.rank)
    communicator.all_reduce(tensor).wait()
    with measured(5.0), pytest.raises(CollectiveMismatchError) as caught:
        call_all(communicator, [other if context.rank == 1 else usual])
    assert wanted in str(caught.value)
    with pytest.raises(CollectiveMismatchError) as again:
        communicator.all_reduce(tensor)
    assert str(again.value) == str(caught.value)
    assert (tensor == sum(range(context.world_size))).all()
    return str(caught.value)


@pytest.mark.parametrize("name", MISMATCHES)
def test_ranks_call_different_things(ranks: Callable[[int], RankPool], name: str) -> None:
    assert len(set(ranks(3).run(mismatch, name))) == 1


def swapped(context: RankContext) -> None:
    """Two calls in flight, in another order on one rank; neither rank's data is touched."""
    communicator = make(context)
    small, big = communicator.empty(10, torch.float32).fill_(1), communicator.empty(300_000, torch.float32).fill_(1)
    first, second = (lambda c: c.all_reduce(small)), (lambda c: c.all_reduce(big))
    with pytest.raises(CollectiveMismatchError):
        call_all(communicator, [first, second] if context.rank else [second, first])
    assert (small == 1).all()
    assert (big == 1).all()


def test_ranks_swap_two_calls(two_ranks: RankPool) -> None:
    two_ranks.run(swapped)


# ---- memory ---------------------------------------------------------------------------------------------------------


def too_much(context: RankContext) -> None:
    """Refused at once, harmlessly; what is freed can be had again."""
    with make(context, capacity_bytes=32 << 20) as communicator:
        tensors = [communicator.empty(1 << 20, torch.float32) for _ in range(5)]
        with pytest.raises(SharedMemoryFullError, match="could not be had"):
            tensors += [communicator.empty(1 << 20, torch.float32) for _ in range(5)]
        assert isinstance(SharedMemoryFullError(""), MemoryError)
        kept = tensors.pop(0).fill_(1)
        tensors.clear()
        gc.collect()
        again = [communicator.empty(1 << 20, torch.float32) for _ in range(5)]
        communicator.all_reduce(kept).wait()
        assert (kept == context.world_size).all()
        del again


def test_more_memory_than_the_segment_has(two_ranks: RankPool) -> None:
    two_ranks.run(too_much)


def test_more_memory_than_the_machine_has() -> None:
    """Asked for beforehand: the kernel would hand out the memory and then kill some process."""
    arena = _native.SharedMemoryArena(1 << 46)
    with pytest.raises(SharedMemoryFullError, match="Use smaller buckets"):
        segments.allocate(arena, 1 << 45)
    with pytest.raises(SharedMemoryFullError, match="has 1000 left"):
        segments.allocate(arena, 1 << 30, lambda: 1000)
    segments.allocate(arena, 1 << 20, lambda: 1000)


def freed_memory(context: RankContext) -> tuple[int, int]:
    """Bytes that the arena holds with and without tensors."""
    with make(context) as communicator:

        def held() -> int:
            return os.stat(communicator.segments.arena.file).st_blocks * 512  # type: ignore[attr-defined]

        before = held()
        tensor = communicator.empty(10 << 20, torch.uint8)
        communicator.all_reduce(tensor).wait()
        during = held()
        del tensor
        gc.collect()
        return during - before, held() - before


def test_memory_goes_back_when_a_tensor_dies(two_ranks: RankPool) -> None:
    for during, after in two_ranks.run(freed_memory):
        assert during == 10 << 20
        assert after == 0


def child_drops_tensor(context: RankContext) -> None:
    """A forked child drops its copies of tensors: the parent's memory stays."""
    with make(context) as communicator:
        tensor = communicator.empty(1 << 20, torch.float32).fill_(7)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                del tensor
                gc.collect()
                with pytest.raises(ClosedError, match="parent process"):
                    communicator.all_reduce(torch.ones(1))
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert (tensor == 7).all()


def test_a_forked_child_frees_nothing(two_ranks: RankPool) -> None:
    two_ranks.run(child_drops_tensor)


# ---- at set-up ------------------------------------------------------------------------------------------------------


def broken_setup(context: RankContext, where: str) -> None:
    """One rank can't make or map shared memory: none uses it, and "auto" takes something else everywhere."""

    def broken(*arguments: object) -> None:
        raise OSError("out of luck")

    with pytest.MonkeyPatch.context() as patch:
        if context.rank == 1:
            patch.setattr(_native, where, broken)
        with pytest.raises(TransportUnavailableError, match="rank 1: out of luck"):
            make(context)
        with create_communicator(context.process_group, timeout=LIMIT) as communicator:
            assert isinstance(communicator, ProcessGroupCommunicator)
            communicator.barrier().wait()
    with create_communicator(context.process_group, timeout=LIMIT) as communicator:
        assert communicator.transport == "shared_memory"


@pytest.mark.parametrize("where", ["SharedMemoryArena", "SharedMemorySegment"])
def test_one_rank_cannot_set_it_up(two_ranks: RankPool, where: str) -> None:
    two_ranks.run(broken_setup, where)


def different_settings(context: RankContext) -> None:
    with pytest.raises(RankMismatchError, match="different settings"):
        make(context, piece_bytes=4096 * (1 + context.rank))
    make(context).close()


def test_ranks_give_different_settings(two_ranks: RankPool) -> None:
    two_ranks.run(different_settings)
