"""A rank that stalls, or raises, while the others wait for it: after the time limit they say which, where it was, what it had raised."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpcomm import DistributedDataParallel
from ddpcomm.comm_hook import GradBucket
from ddpcomm.errors import BackwardInterruptedError, CollectiveTimeoutError, CommunicationError, ConfigurationError, ConfigurationTypeError
from tests.faults.kills import TRANSPORTS, Net, connect, outcome
from tests.nursery import Birth, Fate, Nursery
from tests.ranks import RankContext, RankPool

pytestmark = pytest.mark.timeout(120)

LIMIT = timedelta(seconds=2.5)
CULPRIT = 1
FORWARD, BACKWARD, STOPPED = "forward", "backward", "stopped"


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as made:
        yield made


def step(model: DistributedDataParallel) -> None:
    model(torch.ones(2, 64)).backward()
    model.zero_grad()


# ---- stalls ---------------------------------------------------------------------------------------------------------


def stall(birth: Birth, where: str, transport: str) -> None:
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.01, **connect(transport, LIMIT))
    for _ in range(3):
        step(model)
    layer = model.module.layers[1]
    if birth.rank == CULPRIT:
        pause = LIMIT.total_seconds() + 1
        if where == FORWARD:
            layer.register_forward_pre_hook(lambda *_: time.sleep(pause))
        elif where == BACKWARD:
            layer.register_full_backward_pre_hook(lambda *_: time.sleep(pause))
        else:
            time.sleep(1.2)  # so that it has reported
            os.kill(os.getpid(), signal.SIGSTOP)
    try:
        step(model)
    except CommunicationError as error:
        birth.tell((outcome(error), getattr(error, "missing_ranks", ())))
    model.close()


WANTED = {
    FORWARD: "rank 1 was in forward, after 3 backwards",
    BACKWARD: "rank 1 was in backward 4, had sent 2 of 4 buckets; bucket 2 lacked the gradients of layers.1.weight, layers.1.bias",
    STOPPED: "rank 1 was in code outside of forward and backward, after 3 backwards",
}


@pytest.mark.parametrize(
    ("where", "transport"),
    [*((BACKWARD, transport) for transport in TRANSPORTS), *((where, "shared_memory") for where in (FORWARD, STOPPED))],
)
def test_who_waits_says_for_whom(nursery: Nursery, where: str, transport: str) -> None:
    fates = nursery.run(stall, where, transport, world_size=3, limit=timedelta(seconds=20 if where != STOPPED else 8))
    for fate in fates:
        if fate.rank == CULPRIT:
            assert fate.status == (None if where == STOPPED else 0), fate.stderr
            continue
        assert fate.status == 0, fate.stderr
        found, missing = fate.notes[0]
        assert found.kind in ("CollectiveTimeoutError", "PeerLostError"), found
        assert WANTED[where] in found.text
        assert "s ago, by its clock)" in found.text
        if where == BACKWARD and transport != "hierarchical":  # there rank 2 gets no bucket at all without rank 1
            assert "bucket 2 of 4 (layers.1.bias, layers.1.weight) could not be averaged" in found.text
        if transport == "shared_memory":
            assert missing == (CULPRIT,)


# ---- exceptions -----------------------------------------------------------------------------------------------------


def fail_in_forward(birth: Birth, transport: str) -> None:
    model = DistributedDataParallel(Net(), **connect(transport, LIMIT))
    step(model)
    if birth.rank == CULPRIT:
        model.module.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="out of order"):
            step(model)
        time.sleep(LIMIT.total_seconds() + 1)  # it lives, and is not lost
    else:
        with pytest.raises(CollectiveTimeoutError) as caught:
            step(model)
        birth.tell(str(caught.value))


def fail(*_: Any) -> None:
    raise ValueError("out of order: 17")


def fail_in_backward(birth: Birth, transport: str) -> None:
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.01, **connect(transport, LIMIT))
    for turn in range(4):  # the last one shows that training goes on
        handle = None if turn % 2 or birth.rank != CULPRIT else model.module.layers[1].register_full_backward_pre_hook(fail)
        try:
            step(model)
        except ValueError:
            assert birth.rank == CULPRIT
        except BackwardInterruptedError as error:
            birth.tell((turn, str(error)))
        if handle is not None:
            handle.remove()


def fail_for_good(birth: Birth, transport: str) -> None:
    """Nobody catches it."""
    model = DistributedDataParallel(Net(), **connect(transport, LIMIT))
    step(model)
    if birth.rank == CULPRIT:
        fail()
    with pytest.raises(CommunicationError) as caught:
        step(model)
    birth.tell(str(caught.value))


def fail_in_hook(birth: Birth, transport: str) -> None:
    """Before it has sent anything: the other rank's hook waits in vain."""
    group = dist.new_group(timeout=LIMIT)

    def hook(_: Any, bucket: GradBucket) -> torch.futures.Future[Any]:
        if birth.rank == CULPRIT and bucket.is_last():
            fail()
        return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then(lambda future: future.value()[0])

    model = DistributedDataParallel(Net(), bucket_cap_mb=0.01, **connect(transport, LIMIT))
    model.register_comm_hook(None, hook)
    with pytest.raises(CommunicationError) as caught:
        step(model)
    birth.tell((str(caught.value), str(caught.value.__cause__)))


def statuses(fates: list[Fate]) -> list[int | None]:
    return [fate.status for fate in fates]


def test_exception_in_forward(nursery: Nursery) -> None:
    fates = nursery.run(fail_in_forward, "process_group", world_size=2)
    assert statuses(fates) == [0, 0], [fate.stderr for fate in fates]
    assert "rank 1 was in forward, after 1 backwards, and raised ValueError: out of order: 17" in fates[0].notes[0]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_exception_in_backward(nursery: Nursery, transport: str) -> None:
    fates = nursery.run(fail_in_backward, transport, world_size=3)
    assert statuses(fates) == [0, 0, 0], [fate.stderr for fate in fates]
    for fate in (fates[0], fates[2]):
        assert [turn for turn, _ in fate.notes] == [0, 2]
        for turn, text in fate.notes:
            assert "backward ended with an exception on rank 1" in text
            assert f"rank 1 was in backward {turn + 1}, had sent {0 if turn == 0 else 2} of " in text
            assert "and raised ValueError: out of order: 17" in text


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_exception_in_a_communication_hook(nursery: Nursery, transport: str) -> None:
    fates = nursery.run(fail_in_hook, transport, world_size=2)
    assert statuses(fates) == [0, 0], [fate.stderr for fate in fates]
    (others, _), (own, cause) = fates[0].notes[0], fates[1].notes[0]
    assert re.search(
        "What the ranks had said before: rank 1 .* and raised CommHookError: .* raised ValueError .*: out of order: 17", others
    )
    assert re.search("Before that, on this rank, the communication hook .* raised ValueError .*: out of order: 17", own)
    assert "out of order: 17" in cause


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_exception_that_ends_the_program(nursery: Nursery, transport: str) -> None:
    fates = nursery.run(fail_for_good, transport, world_size=2)
    assert statuses(fates) == [0, 1], [fate.stderr for fate in fates]
    assert (
        "rank 1 was in code outside of forward and backward, after 1 backwards, and raised ValueError: out of order: 17"
        in fates[0].notes[0]
    )


# ---- the time limit itself ------------------------------------------------------------------------------------------


def limits(context: RankContext) -> None:
    for wrong, kind in ((5.0, ConfigurationTypeError), (timedelta(0), ConfigurationError), (timedelta(seconds=-1), ConfigurationError)):
        module = nn.Linear(2, 2)
        with pytest.raises(kind, match="timeout"):
            DistributedDataParallel(module, timeout=wrong)  # type: ignore[arg-type]
        assert not module.weight._post_accumulate_grad_hooks
    for transport in ("shared_memory", "process_group"):
        model = DistributedDataParallel(nn.Linear(2, 2), transport=transport, timeout=timedelta(seconds=7))
        assert model._communicator.timeout == timedelta(seconds=7)
        model.close()


def test_timeout(two_ranks: RankPool) -> None:
    two_ranks.run(limits)
