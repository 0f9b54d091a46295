"""One rank of bench/allreduce.py: it is started as a process of its own, by mpirun or by the bench itself."""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpcomm.comm.base import Communicator
from ddpcomm.comm.factory import create_communicator

COPY, REWRITE, GLOO, MPI = "copy", "rewrite", "gloo", "mpi"
OWN, OTHER = "ddpcomm", "ddpcomm, other memory"
LIMIT = timedelta(seconds=120)
BATCH_SECONDS = 2e-3  # calls shorter than this are timed several at a time
LONGEST_BATCH = 100


@dataclass(frozen=True)
class Case:
    """A size in bytes and a dtype's name."""

    size_bytes: int
    dtype: str

    @property
    def numel(self) -> int:
        return self.size_bytes // getattr(torch, self.dtype).itemsize


Operation = Callable[[], None]


class Subjects:
    """Everything that is timed for one case: operations that each all-reduce a tensor of their own, a copy, and a pass that rewrites
    a tensor in place."""

    def __init__(self, case: Case, communicator: Communicator, mpi: Any) -> None:
        dtype = getattr(torch, case.dtype)
        self.tensors: dict[str, Tensor] = {GLOO: torch.empty(case.numel, dtype=dtype)}
        if mpi is not None and dtype != torch.bfloat16:  # which MPI doesn't know
            self.tensors[MPI] = torch.empty(case.numel, dtype=dtype)
        self.tensors[OWN] = communicator.empty(case.numel, dtype)
        self.tensors[OTHER] = torch.empty(case.numel, dtype=dtype)
        source, target = torch.zeros(case.numel, dtype=dtype), torch.empty(case.numel, dtype=dtype)
        words = source.view(torch.int32)
        self.operations: dict[str, Operation] = {
            COPY: lambda: target.copy_(source),  # type: ignore[dict-item,return-value]
            REWRITE: lambda: words.bitwise_not_(),  # type: ignore[dict-item,return-value]
        }
        for name, tensor in self.tensors.items():
            self.operations[name] = _operation(name, tensor, communicator, mpi)

    def check(self, rank: int, ranks: int) -> None:
        """Every rival's result is right."""
        for name, tensor in self.tensors.items():
            tensor.copy_(torch.arange(tensor.numel()).remainder_(8).add_(rank))
            self.operations[name]()
            wanted = torch.arange(tensor.numel()).remainder_(8).mul_(ranks).add_(ranks * (ranks - 1) // 2)
            if not torch.equal(tensor, wanted.to(tensor.dtype)):
                raise ValueError(f"{name} gave a wrong sum of {tensor.numel()} x {tensor.dtype}")
            tensor.zero_()


def _operation(name: str, tensor: Tensor, communicator: Communicator, mpi: Any) -> Operation:
    if name == GLOO:
        return lambda: dist.all_reduce(tensor)  # type: ignore[return-value]
    if name == MPI:
        from mpi4py import MPI as library

        array = tensor.numpy()
        return lambda: mpi.Allreduce(library.IN_PLACE, array)
    return lambda: communicator.all_reduce(tensor).wait()


def measure(case: Case, rounds: int, communicator: Communicator, mpi: Any) -> dict[str, list[float]]:
    """Seconds a call, by subject; each the slowest rank's. The subjects take turns, in an order that rotates."""
    subjects = Subjects(case, communicator, mpi)
    subjects.check(communicator.rank, communicator.world_size)
    names = list(subjects.operations)
    batches = {name: _batch(subjects.operations[name], communicator) for name in names}
    samples = torch.zeros(len(names), rounds, dtype=torch.float64)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            operation = subjects.operations[name]
            communicator.barrier().wait()
            began = time.perf_counter()
            for _ in range(batches[name]):
                operation()
            samples[names.index(name), number] = (time.perf_counter() - began) / batches[name]
    communicator.all_reduce(samples, "max").wait()
    return dict(zip(names, samples.tolist(), strict=True))


def _batch(operation: Operation, communicator: Communicator) -> int:
    """How many calls make a sample; the same on all ranks."""
    operation()
    communicator.barrier().wait()
    began = time.perf_counter()
    for _ in range(3):
        operation()
    seconds = torch.tensor((time.perf_counter() - began) / 3, dtype=torch.float64)
    communicator.all_reduce(seconds, "max").wait()
    return max(1, min(LONGEST_BATCH, int(BATCH_SECONDS / max(seconds.item(), 1e-9))))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", type=Path, required=True)
    options = parser.parse_args()
    task = json.loads(options.task.read_text())
    mpi = None
    if task["mpi"]:
        from mpi4py import MPI as library

        mpi = library.COMM_WORLD
    rank = mpi.rank if mpi is not None else int(os.environ["RANK"])
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(task["store"], task["ranks"])  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=task["ranks"], timeout=LIMIT)
    results = []
    with create_communicator(transport="shared_memory", timeout=LIMIT) as communicator:
        for size_bytes, dtype in task["cases"]:
            case = Case(size_bytes, dtype)
            results.append([size_bytes, dtype, measure(case, task["rounds"], communicator, mpi)])
            gc.collect()
    if rank == 0:
        Path(task["result"]).write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
