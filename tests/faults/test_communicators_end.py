"""How the shared-memory communicators end: nothing is left open, and Ctrl-C gets through."""

from __future__ import annotations

import gc
import os
import signal
import sys
from datetime import timedelta

import pytest
import torch

from ddpcomm.errors import (
    CommunicationError,
    DDPCommError,
)
from tests.faults.test_communicators import make, measured
from tests.ranks import RankContext, RankPool

pytestmark = pytest.mark.timeout(300)


def open_files(context: RankContext) -> None:
    """Communicators that are closed, or failed, or never came to be leave no file and no mapping."""

    def count() -> tuple[int, int]:
        gc.collect()
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum("ddpcomm" in line and "memfd" in line for line in maps)

    make(context).close()
    before = count()
    for _ in range(3):
        with make(context) as communicator:
            communicator.all_reduce(communicator.empty(1000, torch.float32)).wait()
        with pytest.raises(DDPCommError):
            make(context, piece_bytes=4096 * (1 + context.rank))
        failed = make(context, timedelta(seconds=0.3))
        if context.rank == 0:
            with pytest.raises(CommunicationError):
                failed.barrier().wait()
        failed.close()
        del communicator, failed
    assert count() == before


def test_nothing_is_left_open(two_ranks: RankPool) -> None:
    two_ranks.run(open_files)


def held_after_close(context: RankContext) -> None:
    """What is closed has no file open, though the object and its memory are still held."""
    make(context).close()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    communicator = make(context)
    tensor = communicator.empty(1 << 20, torch.float32).fill_(1)
    communicator.all_reduce(tensor).wait()
    communicator.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert torch.equal(tensor, torch.full_like(tensor, 2.0))


def test_a_closed_communicator_that_is_held(two_ranks: RankPool) -> None:
    two_ranks.run(held_after_close)


@pytest.mark.skipif(sys.platform != "linux", reason="signals as on Linux")
def test_interrupted_by_ctrl_c(two_ranks: RankPool) -> None:
    two_ranks.run(interrupt)


def interrupt(context: RankContext) -> None:
    communicator = make(context)
    if context.rank == 0:
        signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with measured(2.0), pytest.raises(KeyboardInterrupt):
            communicator.barrier().wait()
        signal.setitimer(signal.ITIMER_REAL, 0)
    context.process_group.barrier().wait()
