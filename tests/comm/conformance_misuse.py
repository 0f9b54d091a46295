"""What every transport must refuse, and how it must end. Part of the conformance suite."""

from __future__ import annotations

import gc
import os
import time

import pytest
import torch

from ddpcomm.errors import ClosedError, ConfigurationError, ConfigurationTypeError
from tests.comm.checks import (
    Transport,
    check,
)
from tests.ranks import RankContext


@check
def wrong_arguments(context: RankContext, transport: Transport) -> None:
    """Refused before anything is sent: the next collective is right."""
    with transport.make(context) as communicator:
        matrix = torch.zeros(4, 4)
        with pytest.raises(ConfigurationError, match="contiguous"):
            communicator.all_reduce(matrix.t()[1:])
        with pytest.raises(ConfigurationError, match="op must be"):
            communicator.all_reduce(matrix, "product")  # type: ignore[arg-type]
        with pytest.raises(ConfigurationTypeError, match="avg"):
            communicator.all_reduce(matrix.long(), "avg")
        with pytest.raises(ConfigurationError, match="source"):
            communicator.broadcast(matrix, context.world_size)
        with pytest.raises(ConfigurationError, match="times as many"):
            communicator.all_gather(torch.zeros(context.world_size * 4 + 1), torch.zeros(4))
        with pytest.raises(ConfigurationTypeError, match="dtypes"):
            communicator.reduce_scatter(torch.zeros(4), torch.zeros(4 * context.world_size).double())
        with pytest.raises(ConfigurationError, match="on meta"):
            communicator.all_reduce(matrix.to("meta"))
        with pytest.raises(ConfigurationTypeError, match="list"):
            communicator.all_reduce([1.0])  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="negative"):
            communicator.empty(-1, torch.float32)
        tensor = torch.ones(10)
        communicator.all_reduce(tensor).wait()
        assert (tensor == context.world_size).all()


@check
def closed(context: RankContext, transport: Transport) -> None:
    communicator = transport.make(context)
    communicator.barrier().wait()
    communicator.close()
    communicator.close()
    assert communicator.closed
    tensor = torch.ones(context.world_size)
    for call in (
        lambda: communicator.all_reduce(tensor),
        lambda: communicator.broadcast(tensor),
        lambda: communicator.all_gather(tensor, tensor[:1]),
        lambda: communicator.reduce_scatter(tensor[:1], tensor),
        communicator.barrier,
        lambda: communicator.empty(1, torch.float32),
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()


@check
def closed_one_by_one(context: RankContext, transport: Transport) -> None:
    """A rank that is done may leave at once; the others still get their result."""
    for numel in (10, 500_000):
        communicator = transport.make(context)
        tensor = communicator.empty(numel, torch.float32).fill_(1)
        work = communicator.all_reduce(tensor)
        time.sleep(0.05 * context.rank)
        work.wait()
        communicator.close()
        assert (tensor == context.world_size).all()


@check
def forked_child(context: RankContext, transport: Transport) -> None:
    """A child has no part in the group: what it drops, closes and leaves behind does its parent no harm."""
    communicator = transport.make(context)
    tensor = communicator.empty(50_000, torch.float32).fill_(1)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            communicator.close()
            del tensor, communicator
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    communicator.all_reduce(tensor).wait()
    assert (tensor == context.world_size).all()
    communicator.close()
