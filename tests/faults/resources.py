"""What a process holds, and trainings that must not make it hold more and more: for bench/soak.py and the tests beside this file."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddpcomm import DistributedDataParallel
from tests.ddp.oracle import TINY_BUCKETS_MB
from tests.ranks import RankContext

_C_LIBRARY = ctypes.CDLL(None)
BLOCK = 10
"""Steps between two moments at which a training may be looked at."""


@dataclass(frozen=True)
class Usage:
    """What this process holds.

    Attributes:
        rss_bytes: resident memory, shared memory included.
        shared_bytes: of ddpcomm's segments, as far as they are resident: this rank's own and those of others.
        mappings: segments that are mapped.
        files: open file descriptors.
        threads: the operating system's.
        tensors: that Python knows.
        python_blocks: pieces of memory that Python's objects have.
        garbage: objects in cycles since the last look, which only the collector could free.
    """

    rss_bytes: int
    shared_bytes: int
    mappings: int
    files: int
    threads: int
    tensors: int
    python_blocks: int
    garbage: int

    @classmethod
    def now(cls) -> Usage:
        """Local. Collects garbage."""
        garbage = gc.collect()  # and Python's stocks of small objects are given up
        if hasattr(_C_LIBRARY, "malloc_trim"):  # glibc keeps what was freed: more of it, the more has run in this process
            _C_LIBRARY.malloc_trim(0)
        files, mappings, shared = cls.files_and_segments()
        return cls(
            rss_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            shared_bytes=shared,
            mappings=mappings,
            files=files,
            threads=len(os.listdir("/proc/self/task")),
            tensors=sum(issubclass(type(each), Tensor) for each in gc.get_objects()),
            python_blocks=sys.getallocatedblocks(),
            garbage=garbage,
        )

    @staticmethod
    def files_and_segments() -> tuple[int, int, int]:
        """`files`, `mappings` and `shared_bytes`. Local; collects no garbage."""
        shared, mappings = _segments()
        return len(os.listdir("/proc/self/fd")), mappings, shared


def _segments() -> tuple[int, int]:
    """Resident bytes and number of the mappings of ddpcomm's segments."""
    resident, mappings, inside = 0, 0, False
    for line in Path("/proc/self/smaps").read_text(errors="replace").splitlines():
        head = line.partition(" ")[0]
        if not head.endswith(":"):
            inside = "memfd:ddpcomm" in line
            mappings += inside
        elif inside and head == "Rss:":
            resident += int(line.split()[1]) * 1024
    return resident, mappings


class Training:
    """A small model that is trained in a certain way, `BLOCK` steps at a time.

    Args:
        options: of DistributedDataParallel.
        run: trains it so long.
    """

    def __init__(self, rank: int, options: Mapping[str, Any], run: Callable[[Training], None]) -> None:
        self.rank = rank
        self.turn = 0
        self.module = model()
        self.ddp = DistributedDataParallel(self.module, bucket_cap_mb=TINY_BUCKETS_MB, **options)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-4, momentum=0.9)
        self._run = run

    def block(self) -> None:
        """Collective."""
        self._run(self)

    def step(self, *, spoilt: bool = False) -> None:
        self.turn += 1
        self.optimizer.zero_grad()
        self.backward(spoilt=spoilt)
        self.optimizer.step()

    def backward(self, *, spoilt: bool = False) -> None:
        batch = torch.full((4, 8), float(self.turn % 5 + self.rank))
        self.ddp(batch).square().mean().mul(float("inf") if spoilt else 1.0).backward()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))


def _plain(training: Training) -> None:
    for _ in range(BLOCK):
        training.step()


def _accumulating(training: Training) -> None:
    for _ in range(BLOCK // 5):
        with training.ddp.no_sync():
            for _ in range(4):
                training.backward()
        training.step()


def _recording(training: Training) -> None:
    with tempfile.TemporaryDirectory() as directory, training.ddp.timeline(Path(directory) / "trace.json"):
        for _ in range(BLOCK // 2):
            training.step()
    for _ in range(BLOCK // 2):
        training.step()


def _joining(training: Training) -> None:
    with training.ddp.join():
        for _ in range(BLOCK - 3 * training.rank):
            training.step()


def _skipping(training: Training) -> None:
    logging.getLogger("ddpcomm").setLevel(logging.ERROR)  # each skipped step is told
    for number in range(BLOCK):
        training.step(spoilt=number == 5 and training.rank == 0)


WAYS: dict[str, tuple[dict[str, Any], Callable[[Training], None]]] = {
    "copy": ({}, _plain),
    "view": ({"gradient_as_bucket_view": True}, _plain),
    "no_sync": ({}, _accumulating),
    "timeline": ({}, _recording),
    "join": ({}, _joining),
    'nonfinite="skip"': ({"nonfinite": "skip"}, _skipping),
}
"""By name, options and what a block does."""


def soak(context: RankContext, transport: str, way: str, warm_up: int, steps: int, looks: int) -> list[Usage]:
    """What this process holds after the warm-up, and then `looks` times while `steps` more are trained. Collective."""
    options, run = WAYS[way]
    training = Training(context.rank, {"transport": transport, **options}, run)
    with _without_collector():
        for _ in range(warm_up // BLOCK):
            training.block()
        found = [Usage.now()]
        for _ in range(looks):
            for _ in range(steps // BLOCK // looks):
                training.block()
            found.append(Usage.now())
    training.ddp.close()
    return found


def wrap_and_unwrap(context: RankContext, transport: str, warm_up: int, times: int, looks: int) -> list[Usage]:
    """The same for a module that is wrapped, trained for two steps and unwrapped again and again; by turns with and without `close`."""
    module = model()

    def once(number: int) -> None:
        ddp = DistributedDataParallel(module, transport=transport, gradient_as_bucket_view=number % 4 < 2)
        for _ in range(2):
            ddp(torch.ones(4, 8)).square().mean().backward()
        module.zero_grad()
        if number % 2:
            ddp.close()

    with _without_collector():
        for number in range(warm_up):
            once(number)
        found = [Usage.now()]
        for _ in range(looks):
            for number in range(times // looks):
                once(number)
            found.append(Usage.now())
    return found


@contextmanager
def _without_collector() -> Iterator[None]:
    """Cycles can be counted, which Python's collector would free now and then."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
