"""Nothing is held longer than it is needed: not over many steps, not after a model's end, however it ended.

bench/soak.py runs the same trainings for longer.
"""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddpcomm import DistributedDataParallel
from ddpcomm.comm.process_group import ProcessGroupCommunicator
from ddpcomm.comm.shared_memory import create_shared_memory
from ddpcomm.errors import (
    BackwardInterruptedError,
    ClosedError,
    CommHookError,
    ConfigurationError,
    PeerLostError,
    RankMismatchError,
    TransportUnavailableError,
)
from tests.ddp.on_ranks import on_two_ranks
from tests.faults.resources import WAYS, Usage, soak, wrap_and_unwrap
from tests.ranks import RankContext, RankPool

pytestmark = pytest.mark.timeout(150)
LIMIT = timedelta(seconds=20)
TRANSPORTS = ["shared_memory", "process_group"]


# ---- over many steps ------------------------------------------------------------------------------------------------


def check(usages: list[Usage], steps: int, most_blocks_per_step: float) -> None:
    first, last = usages[0], usages[-1]
    assert (last.files, last.threads, last.mappings, last.tensors) == (first.files, first.threads, first.mappings, first.tensors)
    # A page a step would show. Staging buffers come as they are needed, when more calls are under way than ever before: each once.
    assert last.shared_bytes <= first.shared_bytes + (steps << 10)
    assert last.rss_bytes <= first.rss_bytes + (4 << 20)
    assert last.garbage == 0
    assert last.python_blocks - first.python_blocks <= 500 + most_blocks_per_step * steps


def soak_all(context: RankContext, transport: str, warm_up: int, steps: int) -> dict[str, list[Usage]]:
    return {way: soak(context, transport, way, warm_up, steps, 1) for way in WAYS}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_hundreds_of_steps(two_ranks: RankPool, transport: str) -> None:
    for by_way in two_ranks.run(soak_all, transport, 100, 300):
        for usages in by_way.values():
            check(usages, 300, 1.0)


@pytest.mark.parametrize("transport", [*TRANSPORTS, "hierarchical"])
def test_wrapped_and_unwrapped_a_hundred_times(two_ranks: RankPool, transport: str) -> None:
    for usages in two_ranks.run(wrap_and_unwrap, transport, 10, 100, 1):
        check(usages, 100, 5.0)


# ---- freed at once --------------------------------------------------------------------------------------------------


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 2))  # a MiB in the middle


def wrap(module: nn.Module, transport: str, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, transport=transport, **{"bucket_cap_mb": 0.1, **options})


def backward(model: nn.Module) -> None:
    model(torch.ones(4, 8)).sum().backward()


def trained(module: nn.Module, transport: str, **options: Any) -> DistributedDataParallel:
    ddp = wrap(module, transport, **options)
    for _ in range(3):
        module.zero_grad()
        backward(ddp)
    return ddp


def plain(rank: int, module: nn.Module, transport: str) -> DistributedDataParallel:
    return trained(module, transport)


def views(rank: int, module: nn.Module, transport: str) -> DistributedDataParallel:
    return trained(module, transport, gradient_as_bucket_view=True)


def guarded(rank: int, module: nn.Module, transport: str) -> DistributedDataParallel:
    return trained(module, transport, error_on_unsynchronized=True, nonfinite="skip")


def without_backward(rank: int, module: nn.Module, transport: str) -> DistributedDataParallel:
    ddp = trained(module, transport)
    ddp(torch.ones(4, 8))
    return ddp


def backward_raised(rank: int, module: nn.Module, transport: str) -> DistributedDataParallel:
    ddp = trained(module, transport)

    def fail(_: Any) -> None:
        raise ValueError("no")

    handle = module[2].weight.register_hook(fail)
    with contextlib.suppress(ValueError):
        backward(ddp)
    handle.remove()
    return ddp


def backward_raised_elsewhere(rank: int, module: nn.Module, transport: str) -> DistributedDataParallel:
    if rank == 0:
        return backward_raised(rank, module, transport)
    ddp = trained(module, transport)
    with contextlib.suppress(BackwardInterruptedError):
        backward(ddp)
    return ddp


def peer_lost(rank: int, module: nn.Module, transport: str) -> DistributedDataParallel:
    ddp = trained(module, transport)
    dist.barrier()
    if transport == "shared_memory":
        if rank == 1:
            ddp.close()
            return ddp
        raised = False
        try:
            backward(ddp)
        except PeerLostError:
            raised = True
        assert raised
        assert ddp._reducer.broken is not None
    return ddp


def hooked(rank: int, module: nn.Module, transport: str) -> DistributedDataParallel:
    ddp = wrap(module, transport)
    ddp.register_comm_hook(None, allreduce_hook)
    for _ in range(3):
        backward(ddp)
    return ddp


def hook_failed(rank: int, module: nn.Module, transport: str) -> DistributedDataParallel:
    def fails(*_):  # type: ignore[no-untyped-def]  # torch checks annotations
        raise ValueError("no")

    ddp = wrap(module, transport)
    ddp.register_comm_hook(None, fails)
    for _ in range(2):
        with contextlib.suppress(CommHookError):
            backward(ddp)
    return ddp


def tuning(rank: int, module: nn.Module, transport: str) -> DistributedDataParallel:
    ddp = wrap(module, transport, bucket_cap_mb="auto")
    for _ in range(12):
        backward(ddp)
    assert ddp._reducer.tuner is not None
    return ddp


def other_group(rank: int, module: nn.Module, transport: str) -> DistributedDataParallel:
    ddp = trained(module, transport)
    ddp.replace_process_group(dist.group.WORLD)
    backward(ddp)
    return ddp


Ending = Callable[[int, nn.Module, str], DistributedDataParallel]
ENDINGS: list[Ending] = [
    plain,
    views,
    guarded,
    without_backward,
    backward_raised,
    backward_raised_elsewhere,
    peer_lost,
    hooked,
    hook_failed,
    tuning,
    other_group,
]


def parts(ddp: DistributedDataParallel) -> dict[str, weakref.ref[Any]]:
    """All that has to die with a model."""
    reducer = ddp._reducer
    found: dict[str, Any] = {
        "model": ddp,
        "reducer": reducer,
        "arrangement": reducer.arrangement,
        "communicator": ddp._communicator,
        "reports": ddp._reports,
        **{f"bucket {i}": bucket for i, bucket in enumerate(reducer.arrangement.buckets)},
        **buffers(ddp),
    }
    return {name: weakref.ref(part) for name, part in found.items()}


def buffers(ddp: DistributedDataParallel) -> dict[str, Any]:
    return {f"buffer {i}": bucket.buffer for i, bucket in enumerate(ddp._reducer.arrangement.buckets) if bucket.buffer.numel()}


def alive(references: dict[str, weakref.ref[Any]]) -> list[str]:
    """Those that have not died. Gloo's own threads let go of a tensor a moment after its collective is done."""
    deadline = time.monotonic() + 2
    while (left := [name for name, reference in references.items() if reference() is not None]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def check_unhooked(module: nn.Module) -> None:
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
    assert not [t.name for t in threading.enumerate() if t.name.startswith("ddpcomm")]


def held() -> tuple[int, int, int]:
    """Without the collector's help."""
    return Usage.files_and_segments()


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_two_ranks
def test_all_is_freed_at_once(rank: RankContext, transport: str) -> None:
    dist.barrier()  # connects the group
    once = plain(rank.rank, build(), transport)  # torch imports what it needs, and leaves cycles
    del once
    gc.collect()
    gc.disable()
    try:
        for ending in ENDINGS:
            for closes in (False, True):
                module = build()
                dist.barrier()
                before = held()
                ddp = ending(rank.rank, module, transport)
                references = parts(ddp)
                output = ddp.module(torch.ones(4, 8)) if ddp._reducer.closed else ddp(torch.ones(4, 8))
                module.zero_grad()
                if closes:
                    ddp.close()
                    memory = {name: ref for name, ref in references.items() if name.startswith("buffer")}
                    assert alive(memory) == [], ending.__name__
                    check_unhooked(module)
                del ddp
                assert alive(references) == [], (ending.__name__, closes)
                check_unhooked(module)
                assert held() == before, (ending.__name__, closes)
                output.sum().backward()  # what an output's nodes still call has nobody to tell
                dist.barrier()
    finally:
        gc.enable()


@on_two_ranks
def test_close_gives_memory_back_while_the_model_lives(rank: RankContext) -> None:
    ddp = trained(build(), "shared_memory")
    dist.barrier()
    during = held()
    dist.barrier()
    ddp.module.zero_grad()
    ddp.close()
    dist.barrier()
    after = held()
    assert after[0] < during[0], "the connections are closed"
    assert after[2] <= during[2] - (1 << 20), "a MiB of gradients lay there"
    with pytest.raises(ClosedError, match="closed"):
        backward(ddp)
    assert ddp.stats().steps


@on_two_ranks
def test_gradients_outlive_the_buckets_that_they_are_views_of(rank: RankContext) -> None:
    for closes in (False, True):
        module = build()
        ddp = trained(module, "shared_memory", gradient_as_bucket_view=True)
        expected = [p.grad.clone() for p in module.parameters()]
        before = held()
        if closes:
            ddp.close()
        del ddp
        assert all(torch.equal(p.grad, each) for p, each in zip(module.parameters(), expected, strict=True))
        module.zero_grad()
        assert held() < before


# ---- a set-up that fails --------------------------------------------------------------------------------------------


@on_two_ranks
def test_a_failed_set_up_keeps_nothing_though_its_error_is_kept(rank: RankContext) -> None:
    kept: list[BaseException] = []
    dist.barrier()
    plain(rank.rank, build(), "shared_memory").close()
    gc.collect()
    group = ProcessGroupCommunicator(rank.process_group, torch.device("cpu"))
    make = {
        "settings differ": (RankMismatchError, lambda: create_shared_memory(group, LIMIT, piece_bytes=(1 << 20) << rank.rank)),
        "no such instructions": (ValueError, lambda: create_shared_memory(group, LIMIT, instruction_set="none")),
        "models differ": (RankMismatchError, lambda: wrap(nn.Linear(2, 2 + rank.rank), "shared_memory")),
        "no parameters": (ConfigurationError, lambda: wrap(nn.Identity(), "shared_memory")),
    }
    for name, (kind, call) in make.items():
        dist.barrier()
        before = held()
        with pytest.raises(kind) as caught:
            call()
        kept.append(caught.value)
        files, *memory = held()
        assert files == before[0], name
        if name in ("models differ", "no parameters"):  # its communicator was in use: its memory stays mapped as long as the object
            assert not [t.name for t in threading.enumerate() if t.name.startswith("ddpcomm")]
        else:
            assert memory == list(before[1:]), name


@on_two_ranks
def test_a_closed_model_that_is_held_keeps_no_file(rank: RankContext) -> None:
    dist.barrier()
    plain(rank.rank, build(), "shared_memory").close()
    gc.collect()
    before = held()
    ddp = trained(build(), "shared_memory")
    assert held()[0] > before[0]
    ddp.close()
    assert held()[0] == before[0]


@on_two_ranks
def test_a_rank_that_can_have_no_memory(rank: RankContext) -> None:
    group = ProcessGroupCommunicator(rank.process_group, torch.device("cpu"))
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if rank.rank == 1:
            patch.setattr(socket, "send_fds", _refuse)
        dist.barrier()
        before = held()
        with pytest.raises(TransportUnavailableError) as caught:
            create_shared_memory(group, LIMIT)
    assert held() == before, caught.value


def _refuse(*arguments: Any) -> None:
    raise OSError("no")
