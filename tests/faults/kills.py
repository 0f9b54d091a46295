"""A rank that kills itself at a given point of training, or at any, and what becomes of the others. Shared with `bench.chaos`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

import ddpcomm.comm.hierarchical
import ddpcomm.comm.shared_memory
import ddpcomm.ddp
import ddpcomm.uneven_inputs
from ddpcomm import DistributedDataParallel
from ddpcomm.comm.factory import create_communicator
from ddpcomm.errors import DDPCommError
from ddpcomm.module_state import Message
from ddpcomm.reduction import Reduction
from tests.nursery import Birth, Fate, Nursery

WORLD_SIZE = 3
VICTIM = 2
KILL_STEP = 3  # the buckets are in their final order by then
STEPS = 5
LIMIT = timedelta(seconds=3)
TRANSPORTS = ("shared_memory", "process_group", "hierarchical")
KILLED = "killed"


@dataclass(frozen=True)
class Outcome:
    """How a survivor noticed. `at` is in seconds of the machine's monotonic clock."""

    at: float
    kind: str
    lost_rank: int | None
    text: str


class Net(nn.Module):
    """Several buckets, and buffers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sum()


def connect(transport: str, timeout: timedelta) -> Any:
    """Makes `DistributedDataParallel` split the ranks, which are all here, into two hosts where the transport is for several."""

    def make(group: Any, device: Any, transport: str, **options: Any) -> Any:
        hosts = {"hosts": ((0,), (1, 2))} if transport == "hierarchical" else {}
        return create_communicator(group, device, transport, **options, **hosts)

    ddpcomm.ddp.create_communicator = make  # in this process alone, which ends with the test
    return {"transport": transport, "timeout": timeout}


# ---- where it dies --------------------------------------------------------------------------------------------------


def before(owner: Any, name: str, die: Callable[[], None], wanted: Callable[..., bool] = lambda *_: True, after: bool = False) -> None:
    """From now on a function kills this process as it begins, or as it returns, if its arguments are the wanted ones."""
    original = getattr(owner, name)

    def deadly(*arguments: Any, **options: Any) -> Any:
        if after:
            result = original(*arguments, **options)
        if wanted(*arguments):
            die()
        return result if after else original(*arguments, **options)

    setattr(owner, name, deadly)


def in_set_up(die: Callable[[], None]) -> None:
    for module in (ddpcomm.comm.shared_memory, ddpcomm.comm.hierarchical):
        before(module, "attach", die)
    before(ddpcomm.ddp, "model_signatures", die)


def in_comparison(die: Callable[[], None]) -> None:
    before(ddpcomm.ddp, "require_same_model", die)


# Points before training, by what to change of this process.
CONSTRUCTION: dict[str, Callable[[Callable[[], None]], None]] = {
    "setting up the transport": in_set_up,
    "construction": in_comparison,
}


def in_forward(model: DistributedDataParallel, die: Callable[[], None]) -> None:
    model.module.layers[1].register_forward_pre_hook(lambda *_: die())


def before_first_bucket(model: DistributedDataParallel, die: Callable[[], None]) -> None:
    model.module.layers[3].register_full_backward_pre_hook(lambda *_: die())


def between_buckets(model: DistributedDataParallel, die: Callable[[], None]) -> None:
    before(Reduction, "launch", die, lambda reduction, *_: reduction.next == 2)


def inside_all_reduce(model: DistributedDataParallel, die: Callable[[], None]) -> None:
    before(type(model._communicator), "_all_reduce", die, after=True)


def in_final_wait(model: DistributedDataParallel, die: Callable[[], None]) -> None:
    before(Reduction, "wait", die)


def in_broadcast(model: DistributedDataParallel, die: Callable[[], None]) -> None:
    before(Message, "broadcast", die)


def in_join(model: DistributedDataParallel, die: Callable[[], None]) -> None:
    before(ddpcomm.uneven_inputs, "tell", die)


def in_close(model: DistributedDataParallel, die: Callable[[], None]) -> None:
    before(type(model._communicator), "_close", die)


TRAINING: dict[str, Callable[[DistributedDataParallel, Callable[[], None]], None]] = {
    "forward": in_forward,
    "before its first bucket": before_first_bucket,
    "between two buckets": between_buckets,
    "inside an all-reduce": inside_all_reduce,
    "the final wait": in_final_wait,
    "a buffer broadcast": in_broadcast,
    "join": in_join,
    "close": in_close,
}
POINTS = (*CONSTRUCTION, *TRAINING)


# ---- what each rank runs --------------------------------------------------------------------------------------------


def die_at(birth: Birth, point: str, transport: str) -> None:
    """Trains; the last rank dies at the point. The others tell how they noticed, if they did, and end as programs do."""
    is_victim = birth.rank == VICTIM
    options = connect(transport, LIMIT)

    def die() -> None:
        birth.tell((KILLED, time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        if is_victim and point in CONSTRUCTION:
            CONSTRUCTION[point](die)
        model = DistributedDataParallel(Net(), bucket_cap_mb=0.01, **options)
        with model.join(enable=point == "join"):
            for step in range(STEPS):
                if is_victim and step == KILL_STEP and point in TRAINING:
                    TRAINING[point](model, die)
                model(torch.ones(2, 64)).backward()
                model.zero_grad()
        model.close()
    except DDPCommError as error:
        birth.tell(outcome(error))


def die_any_time(birth: Birth, transport: str, seconds: float, victim: int) -> None:
    """The same, but one rank is killed by a thread, wherever it is then; construction and close happen again and again."""
    options = connect(transport, LIMIT)
    if birth.rank == victim:

        def strike() -> None:
            time.sleep(seconds)
            birth.tell((KILLED, time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=strike, daemon=True).start()
    give_up = time.monotonic() + seconds + 10
    try:
        while time.monotonic() < give_up:
            model = DistributedDataParallel(Net(256), bucket_cap_mb=0.1, **options)
            for step in range(20):
                model(torch.ones(2, 256)).backward()
                if step == 10:
                    model.zero_grad()
            model.close()
    except DDPCommError as error:
        birth.tell(outcome(error))


def outcome(error: DDPCommError) -> Outcome:
    return Outcome(time.monotonic(), type(error).__name__, getattr(error, "lost_rank", None), str(error))


# ---- what must hold -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """One kill. `noticed` says by rank how long after the kill the survivor had raised; `problems` is empty if all is as promised."""

    outcomes: dict[int, Outcome]
    noticed: dict[int, float]
    problems: tuple[str, ...]


def judge(fates: list[Fate], victim: int, transport: str, *, may_go_unnoticed: bool = False) -> Kill:
    """Survivors end by themselves, with exit status 0, having raised a typed error in time; the victim was killed by the signal."""
    problems = []
    killed = [note[1] for note in fates[victim].notes if isinstance(note, tuple) and note[0] == KILLED]
    if fates[victim].status != -signal.SIGKILL or not killed:
        problems.append(f"rank {victim} was not killed: {fates[victim]} {fates[victim].stderr[-2000:]}")
        killed = killed or [time.monotonic()]
    outcomes, noticed = {}, {}
    for fate in fates:
        if fate.rank == victim:
            continue
        if fate.status != 0:
            problems.append(f"rank {fate.rank} {'hung' if fate.status is None else f'ended with {fate.status}'}: {fate.stderr[-2000:]}")
        raised = [note for note in fate.notes if isinstance(note, Outcome)]
        if raised:
            outcomes[fate.rank], noticed[fate.rank] = raised[0], raised[0].at - killed[0]
            problems += [f"rank {fate.rank}: {text}" for text in _wrong(raised[0], noticed[fate.rank], victim, transport)]
        elif not may_go_unnoticed:
            problems.append(f"rank {fate.rank} noticed nothing")
    return Kill(outcomes, noticed, tuple(problems))


def _wrong(outcome: Outcome, seconds: float, victim: int, transport: str) -> list[str]:
    found = []
    if outcome.kind not in ("PeerLostError", "CollectiveTimeoutError", "CommunicationError"):
        found.append(f"raised {outcome.kind}: {outcome.text}")
    if seconds > (2.0 if transport == "shared_memory" else 2 * LIMIT.total_seconds()):
        found.append(f"took {seconds:.1f} s to raise {outcome.text}")
    return found


def kill_at(nursery: Nursery, point: str, transport: str) -> Kill:
    fates = nursery.run(die_at, point, transport, world_size=WORLD_SIZE, group_timeout=LIMIT)
    return judge(fates, VICTIM, transport, may_go_unnoticed=point == "close")


def kill_any_time(nursery: Nursery, transport: str, seconds: float, victim: int) -> Kill:
    fates = nursery.run(die_any_time, transport, seconds, victim, world_size=WORLD_SIZE, group_timeout=LIMIT)
    return judge(fates, victim, transport)
