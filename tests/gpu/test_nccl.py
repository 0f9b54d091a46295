"""Two NCCL ranks, on a GPU each where there are two, else on one.

libnccl allows the latter from 2.30.3 on (NCCL_MULTI_RANK_GPU_ENABLE). Before, ranks must name different hosts (NCCL_HOSTID) and talk over
sockets. Speed is no matter here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ddpcomm
from ddpcomm.comm.nccl import NcclCommunicator
from ddpcomm.comm.nccl_library import Nccl4pyLibrary
from ddpcomm.errors import CollectiveTimeoutError, CommunicationError
from tests.comm.recorder import caught
from tests.rank_process import RankContext
from tests.ranks import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

SHARED_GPU_SINCE = (2, 30, 3)
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.complex64]
SIZES = [1, 3, 1023, 1 << 20, (25 << 20) // 4 + 3]


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Ranks of their own: environment variables of libnccl's are read once in a process."""
    pytest.importorskip("nccl.bindings.nccl", reason="nccl4py is not installed")
    with RankPool(2, timeout=timedelta(seconds=240)) as pool:
        yield pool


def create(context: RankContext, timeout: timedelta = timedelta(seconds=120), **options: Any) -> NcclCommunicator:
    device = torch.device("cuda", context.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if torch.cuda.device_count() < context.world_size:
        # Both ranks' kernels must find room at once, and the multicast of NVLink can't reach one GPU twice.
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        options.setdefault("max_ctas", 2)
        if Nccl4pyLibrary().version >= SHARED_GPU_SINCE:
            os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        else:
            os.environ["NCCL_HOSTID"] = f"rank-{context.rank}"
    return NcclCommunicator.create(context.process_group, device, timeout, **options)


def numbers(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, whose sums and halves every dtype holds exactly."""
    values = (torch.arange(numel, device="cuda") % 16) * 2 + 4 * rank
    return torch.complex(values.float(), -values.float()) if dtype == torch.complex64 else values.to(dtype)


# ---- collectives ----------------------------------------------------------------------------------------------------


def reduces(context: RankContext, options: dict[str, Any]) -> tuple[list[str], str, str]:
    wrong = []
    with create(context, **options) as communicator:
        for dtype in DTYPES:
            for op in ("sum", "avg", "max"):
                if (op == "avg" and not (dtype.is_floating_point or dtype.is_complex)) or (op == "max" and dtype.is_complex):
                    continue
                for numel in SIZES:
                    for make in ("own", "plain", "unaligned"):
                        if make == "plain":
                            tensor = torch.empty(numel, dtype=dtype, device=communicator.device)
                        else:
                            tensor = communicator.empty(numel + (make == "unaligned"), dtype)[make == "unaligned" :]
                        tensor.copy_(numbers(context.rank, numel, dtype))
                        communicator.all_reduce(tensor, op).wait()
                        total = numbers(0, numel, dtype) + numbers(1, numel, dtype)
                        expected = {"sum": total, "avg": total / 2, "max": numbers(1, numel, dtype)}[op].to(dtype)
                        if not torch.equal(tensor, expected):
                            wrong.append(f"{dtype} {op} {numel} {make}")
        communicator.check_order()
        report = communicator.memory
    return wrong, report.mode, report.reason


@pytest.mark.parametrize(
    "options",
    [{}, {"blocking": True}, {"communicators": 3}, {"memory": "registered"}, {"memory": "plain"}],
    ids=lambda options: str(options),
)
def test_all_reduce(pair: RankPool, options: dict[str, Any], record_property: Any) -> None:
    for wrong, mode, reason in pair.run(reduces, options):
        assert wrong == []
        record_property("memory", f"{mode} {reason}")


def others(context: RankContext) -> list[Any]:
    with create(context) as communicator:
        device = communicator.device
        sent = torch.full((5,), context.rank, dtype=torch.int16, device=device)
        communicator.broadcast(sent, source=1).wait()
        gathered = torch.empty(4, dtype=torch.bool, device=device)
        communicator.all_gather(gathered, torch.tensor([True, context.rank == 1], device=device)).wait()
        part = torch.empty(3, device=device)
        communicator.reduce_scatter(part, torch.arange(6.0, device=device) * (context.rank + 1), "avg").wait()
        scaled = torch.full((2,), 2.0 * (context.rank + 1), device=device)
        communicator.all_reduce(scaled, scale=0.25).wait()
        communicator.barrier().wait()
        return [sent.tolist(), gathered.tolist(), part.tolist(), scaled.tolist()]


def test_other_collectives(pair: RankPool) -> None:
    for rank, result in enumerate(pair.run(others)):
        assert result == [[1] * 5, [True, False, True, True], [[0.0, 1.5, 3.0], [4.5, 6.0, 7.5]][rank], [1.5, 1.5]]


# ---- streams and memory ---------------------------------------------------------------------------------------------


def follows_streams(context: RankContext) -> list[bool]:
    """The producing kernels start long after the collective was issued, and the memory is let go at once."""
    results = []
    with create(context, communicators=2) as communicator:
        side = torch.cuda.Stream()
        for turn in range(20):
            tensor = communicator.empty(1 << 20, torch.float32) if turn % 2 else torch.empty(1 << 20, device=communicator.device)
            halves = tensor.chunk(2)
            side.wait_stream(torch.cuda.current_stream())
            for stream, half in zip((side, torch.cuda.current_stream()), halves, strict=True):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(10_000_000)  # cycles
                    half.fill_(turn + context.rank)
            work = communicator.all_reduce(tensor, streams=[side])
            work.wait()
            total = tensor.sum(dtype=torch.float64)
            del tensor, halves, half, work
            torch.empty(1 << 20, device=communicator.device).fill_(-1.0)  # may get the memory that was let go
            results.append(total.item() == (2 * turn + 1) * (1 << 20))
    return results


def test_collectives_follow_the_producing_streams(pair: RankPool) -> None:
    assert pair.run(follows_streams) == [[True] * 20] * 2


def gives_memory_back(context: RankContext) -> tuple[int, int]:
    create(context).close()  # what libnccl and the driver keep for good
    torch.cuda.synchronize()
    dist.barrier()  # the ranks may share the device
    before = torch.cuda.mem_get_info()[0]
    dist.barrier()
    communicator = create(context)
    for _ in range(5):
        buffer = communicator.empty(64 << 20, torch.uint8)
        communicator.all_reduce(buffer).wait()
        del buffer
    communicator.close()
    torch.cuda.synchronize()
    dist.barrier()
    return before, torch.cuda.mem_get_info()[0]


def test_memory_is_given_back(pair: RankPool) -> None:
    for before, after in pair.run(gives_memory_back):
        assert before - after < 64 << 20  # of the 320 MiB


# ---- failures -------------------------------------------------------------------------------------------------------


def one_rank_stays_away(context: RankContext) -> tuple[str, tuple[int, ...], float]:
    communicator = create(context, timeout=timedelta(seconds=10))
    tensor = torch.ones(1 << 20, device=communicator.device)
    communicator.all_reduce(tensor).wait(timedelta(seconds=10))
    start = time.monotonic()
    if context.rank == 0:
        communicator.all_reduce(tensor, tag="bucket 7").wait()
    error = caught(communicator, 60.0)
    assert isinstance(error, CollectiveTimeoutError)
    torch.cuda.synchronize()  # the kernel that waited for the other rank has ended
    with pytest.raises(CommunicationError):
        communicator.all_reduce(tensor)
    communicator.close()
    return str(error), error.missing_ranks, time.monotonic() - start


def test_a_missing_rank_is_named_and_the_device_goes_on(pair: RankPool) -> None:
    for message, missing, seconds in pair.run(one_rank_stays_away):
        assert "bucket 7" in message
        assert missing == (1,)
        assert seconds < 60


def starts_again(context: RankContext) -> list[float]:
    communicator = create(context)
    communicator.all_reduce(torch.ones(4, device=communicator.device)).wait()
    if context.rank == 0:
        communicator.abort()
    caught(communicator, 30.0)
    again = communicator.shrink([])
    tensor = torch.ones(4, device=communicator.device)
    again.all_reduce(tensor).wait()
    again.close()
    communicator.close()
    return list(tensor.tolist())


def test_ranks_start_again_after_an_abort(pair: RankPool) -> None:
    assert pair.run(starts_again) == [[2.0] * 4] * 2


# ---- training -------------------------------------------------------------------------------------------------------


def trains(context: RankContext, view: bool) -> bool:
    communicator = create(context, communicators=2)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    alone = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    for seed, net in ((0, model), (0, alone)):
        torch.manual_seed(seed)
        for parameter in net.parameters():
            nn.init.normal_(parameter, std=0.2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddpcomm.ddp.create_communicator", lambda *arguments, **options: communicator)
        net = ddpcomm.DistributedDataParallel(model, gradient_as_bucket_view=view, bucket_cap_mb=0.004)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, alone)]
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        data = torch.randn(2, 16, 8, generator=generator).cuda()
        for optimizer in optimizers:
            optimizer.zero_grad()
        net(data[context.rank]).square().mean().backward()
        for part in data:
            (alone(part).square().mean() / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
    close = all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(model.parameters(), alone.parameters(), strict=True))
    net.close()
    return close


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_training_matches_one_process_that_sees_everything(pair: RankPool, view: bool) -> None:
    assert pair.run(trains, view) == [True, True]


# ---- cost -----------------------------------------------------------------------------------------------------------


def issues(context: RankContext, blocking: bool) -> float:
    """Seconds of the host for each all-reduce, wait included, while the device is kept busy."""
    with create(context, blocking=blocking) as communicator:
        buffer = communicator.empty(1 << 10, torch.float32)
        for _ in range(20):
            communicator.all_reduce(buffer).wait()
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        start = time.perf_counter()
        for _ in range(100):
            communicator.all_reduce(buffer).wait()
        return (time.perf_counter() - start) / 100


@pytest.mark.parametrize("blocking", [False, True], ids=["non_blocking", "blocking"])
def test_what_issuing_costs_is_recorded(pair: RankPool, blocking: bool, record_property: Any) -> None:
    for rank, seconds in enumerate(pair.run(issues, blocking)):
        record_property(f"rank_{rank}_microseconds_per_all_reduce", seconds * 1e6)
        assert seconds > 0
