"""What an all-reduce costs on these ranks, over its size: measured, for the tuner."""

from __future__ import annotations

import time
from statistics import median

import torch

from ddpcomm.comm.base import Communicator
from ddpcomm.comm.exchange import all_gather_objects
from ddpcomm.cost_model import MeasuredCost

SMALLEST_BYTES = 4 << 10
LARGEST_BYTES = 64 << 20
_REPETITIONS = 5


def measure_cost(communicator: Communicator, most_bytes: int) -> MeasuredCost:
    """Times all-reduces of `SMALLEST_BYTES` and each four times more, up to `most_bytes` or `LARGEST_BYTES`, as far as there is memory for
    them on every rank. Collective.

    Every rank gets the same: of each size the median, over five, of the slowest rank's time.

    Raises:
        CommunicationError: a collective failed.
    """
    sizes = [SMALLEST_BYTES]
    while sizes[-1] < min(most_bytes, LARGEST_BYTES) or len(sizes) < 2:
        sizes.append(sizes[-1] * 4)
    while not all(all_gather_objects(communicator, (buffer := _buffer(communicator, sizes[-1])) is not None)) or buffer is None:
        sizes.pop()
    mine = {size: [_seconds(communicator, buffer[: size // 4]) for _ in range(_REPETITIONS + 1)][1:] for size in sizes}
    everyone = all_gather_objects(communicator, mine)
    slowest = {size: [max(times) for times in zip(*(rank[size] for rank in everyone), strict=True)] for size in sizes}
    return MeasuredCost(tuple((size, median(times)) for size, times in slowest.items()))


def _buffer(communicator: Communicator, size_bytes: int) -> torch.Tensor | None:
    try:
        return communicator.empty(size_bytes // 4, torch.float32).zero_()
    except (MemoryError, RuntimeError):  # the latter is torch's, out of memory
        return None


def _seconds(communicator: Communicator, tensor: torch.Tensor) -> float:
    communicator.barrier().wait()
    synchronize(communicator.device)
    began = time.perf_counter()
    communicator.all_reduce(tensor).wait()
    synchronize(communicator.device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """The host waits until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
