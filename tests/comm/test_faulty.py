"""The faulty communicator: without faults it is the one that it wraps; each kind of fault does what it says, on one call."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

from ddpcomm.comm.base import Communicator
from ddpcomm.comm.fake import FakeCommunicator
from ddpcomm.comm.faulty import Fault, FaultyCommunicator, corrupt
from ddpcomm.errors import CollectiveTimeoutError, CommunicationError
from tests.comm import conformance
from tests.comm.conformance import Transport
from tests.ranks import RankPool


def without_faults(communicator: Communicator) -> Communicator:
    return FaultyCommunicator(communicator)


WRAPPED = Transport("shared_memory", wrap=without_faults)


@pytest.mark.parametrize("name", [name for name in conformance.CHECKS if name != "large"])
def test_without_faults(ranks: Callable[[int], RankPool], name: str) -> None:
    ranks(2).run(conformance.run, WRAPPED, name)


def faulty(*faults: Fault) -> FaultyCommunicator:
    return FaultyCommunicator(FakeCommunicator(0, 2, timeout=timedelta(seconds=0.2)), faults)


def test_delay() -> None:
    communicator = faulty(Fault(1, "delay", delay=timedelta(seconds=0.2)))
    begin = time.monotonic()
    communicator.barrier().wait()
    middle = time.monotonic()
    communicator.barrier().wait()
    assert time.monotonic() - middle >= 0.2 > middle - begin


def test_drop() -> None:
    communicator = faulty(Fault(0, "drop"))
    tensor = torch.ones(2)
    work = communicator.all_reduce(tensor)
    assert not work.is_completed()
    with pytest.raises(CollectiveTimeoutError, match="all_reduce was dropped"):
        work.wait()
    assert tensor.tolist() == [1, 1]
    communicator.all_reduce(tensor).wait()
    assert tensor.tolist() == [2, 2]


@pytest.mark.parametrize("at_wait", [False, True])
def test_fail(at_wait: bool) -> None:
    communicator = faulty(Fault(0, "fail", at_wait=at_wait), Fault(1, "fail", error=lambda: KeyError("x"), at_wait=at_wait))
    for kind in (CommunicationError, KeyError):
        if at_wait:
            work = communicator.barrier()
            with pytest.raises(kind):
                work.wait()
        else:
            with pytest.raises(kind):
                communicator.barrier()
    communicator.barrier().wait()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_corrupt(dtype: torch.dtype) -> None:
    tensor = torch.ones(5, dtype=dtype)
    corrupt(tensor)
    assert tensor[0] != 1
    assert (tensor[1:] == 1).all()


def test_corrupt_changes_the_result_once() -> None:
    communicator = faulty(Fault(0, "corrupt"))
    tensor = torch.ones(4)
    work = communicator.all_reduce(tensor)
    work.wait()
    changed = tensor.clone()
    work.wait()
    assert torch.equal(tensor, changed)
    assert tensor[0] != 2
    assert (tensor[1:] == 2).all()


def test_closes_what_it_wraps() -> None:
    communicator = faulty()
    communicator.close()
    assert communicator.inner.closed
