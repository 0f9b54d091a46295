"""Small Python objects from every rank to every rank, over any communicator. For set-up and for errors, not for the hot path."""

from __future__ import annotations

import pickle
from typing import TypeVar

import torch

from ddpcomm.comm.base import Communicator

_Object = TypeVar("_Object")


def all_gather_objects(communicator: Communicator, value: _Object) -> list[_Object]:
    """`value` of every rank, by rank. Collective: two all-gathers, of the sizes and of the pickled values padded to the largest.

    Raises:
        CommunicationError: a collective failed.
    """
    if communicator.world_size == 1:
        return [value]
    data = pickle.dumps(value)
    sizes = torch.empty(communicator.world_size, dtype=torch.int64, device=communicator.device)
    size = torch.tensor([len(data)], dtype=torch.int64, device=communicator.device)
    communicator.all_gather(sizes, size).wait()
    largest = int(sizes.max())
    mine = torch.zeros(largest, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    all_data = torch.empty(communicator.world_size * largest, dtype=torch.uint8, device=communicator.device)
    communicator.all_gather(all_data, mine.to(communicator.device)).wait()
    rows = all_data.cpu().view(communicator.world_size, largest)
    return [pickle.loads(rows[rank, :length].numpy().tobytes()) for rank, length in enumerate(sizes.tolist())]
