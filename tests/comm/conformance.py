"""What every transport must do. Each check runs on all ranks of a group; a transport's own test file runs them all.

Inputs are whole numbers that every dtype holds exactly, also when they are summed or averaged in any order, so that results are compared
bit for bit.
"""

from __future__ import annotations

import gc
import threading
import time
from datetime import timedelta
from typing import Any

import torch

from tests.comm import conformance_misuse
from tests.comm.checks import (
    CHECKS,
    FLOATS,
    SIZES,
    Transport,
    check,
    expected,
    memories,
    ops_of,
    same,
    values,
)
from tests.ranks import RankContext

__all__ = ["CHECKS", "Transport", "conformance_misuse", "run"]


def run(context: RankContext, transport: Transport, name: str) -> None:
    """Runs one check on this rank."""
    CHECKS[name](context, transport)


# ---- collectives ----------------------------------------------------------------------------------------------------


@check
def all_reduce(context: RankContext, transport: Transport) -> None:
    with transport.make(context) as communicator:
        assert (communicator.rank, communicator.world_size) == (context.rank, context.world_size)
        for dtype in transport.dtypes:
            for numel in SIZES:
                for op in ops_of(dtype):
                    wanted = expected(numel, context.world_size, dtype, op)
                    for tensor in memories(communicator, numel, dtype):
                        tensor.copy_(values(numel, context.rank, dtype))
                        communicator.all_reduce(tensor, op).wait()
                        same(tensor, wanted, op, context.world_size)


@check
def all_reduce_of_mixed_memory(context: RankContext, transport: Transport) -> None:
    """Some ranks reduce the transport's own memory, others any tensor."""
    with transport.make(context) as communicator:
        for numel in SIZES:
            own = context.rank % 2 == 0
            tensor = communicator.empty(numel, torch.float32) if own else torch.empty(numel)
            tensor.copy_(values(numel, context.rank, torch.float32))
            communicator.all_reduce(tensor).wait()
            same(tensor, expected(numel, context.world_size, torch.float32, "sum"), "sum", context.world_size)


@check
def all_reduce_of_many_dimensions(context: RankContext, transport: Transport) -> None:
    with transport.make(context) as communicator:
        tensor = values(2 * 3 * 5, context.rank, torch.float32).view(2, 3, 5)
        communicator.all_reduce(tensor).wait()
        same(tensor, expected(30, context.world_size, torch.float32, "sum").view(2, 3, 5), "sum", context.world_size)
        scalar = torch.tensor(float(context.rank))
        communicator.all_reduce(scalar, "max").wait()
        assert scalar.item() == context.world_size - 1


@check
def all_reduce_of_complex(context: RankContext, transport: Transport) -> None:
    with transport.make(context) as communicator:
        for dtype in (torch.complex64, torch.complex128):
            parts = values(1000, context.rank, torch.float64).view(-1, 2)
            tensor = torch.view_as_complex(parts).to(dtype)
            communicator.all_reduce(tensor).wait()
            wanted = torch.view_as_complex(expected(1000, context.world_size, torch.float64, "sum").view(-1, 2)).to(dtype)
            assert torch.equal(tensor, wanted)


@check
def large(context: RankContext, transport: Transport) -> None:
    """64 MiB and three elements."""
    numel = (16 << 20) + 3
    with transport.make(context) as communicator:
        for tensor in (communicator.empty(numel, torch.float32), torch.empty(numel)):
            tensor.copy_(torch.arange(numel, dtype=torch.int32).remainder_(1009).add_(context.rank))
            communicator.all_reduce(tensor).wait()
            ranks = context.world_size
            wanted = torch.arange(numel).remainder_(1009).mul_(ranks).add_(ranks * (ranks - 1) // 2)
            assert torch.equal(tensor, wanted.float())


@check
def broadcast(context: RankContext, transport: Transport) -> None:
    with transport.make(context) as communicator:
        for dtype in (*transport.dtypes, torch.bool, torch.uint8, torch.complex64):
            for numel in SIZES:
                for source in range(context.world_size):
                    for tensor in memories(communicator, numel, dtype):
                        tensor.copy_(values(numel, context.rank, torch.float32).to(dtype))
                        communicator.broadcast(tensor, source).wait()
                        assert torch.equal(tensor, values(numel, source, torch.float32).to(dtype))


@check
def all_gather(context: RankContext, transport: Transport) -> None:
    with transport.make(context) as communicator:
        for dtype in transport.dtypes:
            for numel in SIZES:
                wanted = torch.cat([values(numel, rank, dtype) for rank in range(context.world_size)])
                for tensor in memories(communicator, numel, dtype):
                    tensor.copy_(values(numel, context.rank, dtype))
                    out = torch.empty(numel * context.world_size, dtype=dtype)
                    communicator.all_gather(out, tensor).wait()
                    assert torch.equal(out, wanted)
        out = communicator.empty(100 * context.world_size, torch.int32)
        mine = out.view(context.world_size, 100)[context.rank]
        mine.copy_(values(100, context.rank, torch.int32))
        communicator.all_gather(out, mine).wait()  # in place
        assert torch.equal(out, torch.cat([values(100, rank, torch.int32) for rank in range(context.world_size)]))


@check
def reduce_scatter(context: RankContext, transport: Transport) -> None:
    with transport.make(context) as communicator:
        for dtype in transport.dtypes:
            for part in SIZES:
                numel = part * context.world_size
                for op in ops_of(dtype):
                    wanted = expected(numel, context.world_size, dtype, op).view(context.world_size, part)[context.rank]
                    for tensor in memories(communicator, numel, dtype):
                        tensor.copy_(values(numel, context.rank, dtype))
                        out = torch.empty(part, dtype=dtype)
                        communicator.reduce_scatter(out, tensor, op).wait()
                        same(out, wanted, op, context.world_size)


@check
def barrier(context: RankContext, transport: Transport) -> None:
    """Nobody leaves before the last has come."""
    with transport.make(context) as communicator:
        communicator.barrier().wait()
        late = context.rank == context.world_size - 1
        if late:
            time.sleep(0.3)
        came = time.monotonic()
        communicator.barrier().wait()
        left = time.monotonic()
        times = torch.empty(2 * context.world_size, dtype=torch.float64)
        communicator.all_gather(times, torch.tensor([came, left], dtype=torch.float64)).wait()
        assert times.view(-1, 2)[:, 0].max() <= times.view(-1, 2)[:, 1].min()


# ---- what is promised about them ------------------------------------------------------------------------------------


@check
def same_bits_on_all_ranks(context: RankContext, transport: Transport) -> None:
    """Of sums that do depend on the order."""
    with transport.make(context) as communicator:
        for dtype in FLOATS:
            for numel in (1, 1000, 100_003):
                generator = torch.Generator().manual_seed(context.rank)
                for tensor in (communicator.empty(numel, dtype), torch.empty(numel, dtype=dtype)):
                    tensor.copy_(torch.randn(numel, generator=generator) * 10**context.rank)
                    communicator.all_reduce(tensor).wait()
                    everybody = torch.empty(context.world_size * numel, dtype=dtype)
                    communicator.all_gather(everybody, tensor).wait()
                    bits = everybody.view(context.world_size, -1).view(torch.uint8)
                    assert (bits == bits[0]).all()


@check
def in_flight(context: RankContext, transport: Transport) -> None:
    """Many at a time, of many sizes, waited for in another order."""
    with transport.make(context) as communicator:
        for own in (True, False):
            sizes = [(37 * i) % 5000 for i in range(150)]
            tensors = [communicator.empty(n, torch.float32) if own else torch.empty(n) for n in sizes]
            for seed, tensor in enumerate(tensors):
                tensor.copy_(values(tensor.numel(), context.rank, torch.float32, seed))
            works = [communicator.all_reduce(tensor) for tensor in tensors]
            for i in torch.randperm(len(works), generator=torch.Generator().manual_seed(context.rank)).tolist():
                works[i].wait()
                assert works[i].is_completed()
                works[i].wait()  # again: no harm
                same(tensors[i], expected(sizes[i], context.world_size, torch.float32, "sum", i), "sum", context.world_size)


@check
def kinds_in_flight(context: RankContext, transport: Transport) -> None:
    """Different collectives at a time, on the same tensor one after another."""
    with transport.make(context) as communicator:
        tensor = communicator.empty(5000, torch.float32).copy_(values(5000, context.rank, torch.float32))
        out = torch.empty(5000 * context.world_size)
        first = communicator.all_reduce(tensor)
        first.wait()
        works = [communicator.all_gather(out, tensor), communicator.barrier()]
        other = torch.full((7,), float(context.rank))
        works.append(communicator.broadcast(other, context.world_size - 1))
        for work in works:
            work.wait()
        wanted = expected(5000, context.world_size, torch.float32, "sum")
        assert torch.equal(out, wanted.repeat(context.world_size))
        assert torch.equal(other, torch.full((7,), float(context.world_size - 1)))


@check
def completion_without_waiting(context: RankContext, transport: Transport) -> None:
    with transport.make(context) as communicator:
        for tensor in (communicator.empty(300_000, torch.float32), torch.empty(300_000)):
            tensor.fill_(1)
            work = communicator.all_reduce(tensor)
            deadline = time.monotonic() + 20
            while not work.is_completed():
                assert time.monotonic() < deadline
                communicator.progress()
            assert (tensor == context.world_size).all()
            communicator.barrier().wait()


@check
def dropped_work(context: RankContext, transport: Transport) -> None:
    """Neither tensor nor work is kept by the caller; what comes after is right all the same."""
    with transport.make(context) as communicator:
        for i in range(40):
            communicator.all_reduce(communicator.empty(20_000, torch.float32).fill_(i))
            communicator.all_reduce(torch.full((20_000,), float(i)))
        gc.collect()
        tensor = communicator.empty(20_000, torch.float32).fill_(1)
        communicator.all_reduce(tensor).wait()
        assert (tensor == context.world_size).all()


@check
def memory(context: RankContext, transport: Transport) -> None:
    """Aligned, independent of one another, reusable, and the caller's for as long as it is held."""
    communicator = transport.make(context)
    tensors = [communicator.empty(numel, torch.float32).fill_(numel) for numel in (1, 5, 1000, 300_000)]
    assert all(tensor.data_ptr() % 64 == 0 and tensor.is_contiguous() for tensor in tensors)
    assert communicator.empty(0, torch.int64).numel() == 0
    for _ in range(20):
        communicator.empty(1_000_000, torch.float64).fill_(0)
    part = tensors[3][10:20]
    del tensors[3]
    communicator.close()
    del communicator
    gc.collect()
    assert (part == 300_000).all()
    assert all((tensor == tensor.numel()).all() for tensor in tensors[:3])
    assert torch.equal(part.clone() + 1, part + 1)


@check
def several_communicators(context: RankContext, transport: Transport) -> None:
    communicators = [transport.make(context) for _ in range(3)]
    for _ in range(5):
        tensors = [c.empty(2000, torch.float32).fill_(i + 1) for i, c in enumerate(communicators)]
        works = [c.all_reduce(t) for c, t in zip(communicators, tensors, strict=True)]
        for i in (2, 0, 1):
            works[i].wait()
            assert (tensors[i] == (i + 1) * context.world_size).all()
    # One's memory in the other's collective, and one's end while the others go on.
    foreign = communicators[0].empty(2000, torch.float32).fill_(3)
    communicators[1].all_reduce(foreign).wait()
    assert (foreign == 3 * context.world_size).all()
    communicators[0].close()
    communicators[1].all_reduce(foreign, "max").wait()
    communicators[2].barrier().wait()
    for communicator in communicators:
        communicator.close()


@check
def threads(context: RankContext, transport: Transport) -> None:
    """Called in one thread, waited for in another, as autograd's threads do."""
    with transport.make(context) as communicator:
        tensor = communicator.empty(100_000, torch.float32).fill_(2)
        works: list[Any] = []
        thread = threading.Thread(target=lambda: works.append(communicator.all_reduce(tensor)))
        thread.start()
        thread.join()
        works[0].wait(timedelta(seconds=20))
        assert (tensor == 2 * context.world_size).all()
