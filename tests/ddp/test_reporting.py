"""The thread that reports where a rank is: it lives and ends with its model, and keeps nothing alive."""

from __future__ import annotations

import copy
import gc
import os
import sys
import threading
import weakref

import torch
from torch import nn

from ddpcomm import DistributedDataParallel
from tests.ddp.on_ranks import on_two_ranks
from tests.ranks import RankContext


def reporting() -> int:
    return sum(thread.name == "ddpcomm reports" for thread in threading.enumerate())


@on_two_ranks
def test_thread_ends_with_the_model(rank: RankContext) -> None:
    before = reporting()
    kept, dropped = DistributedDataParallel(nn.Linear(2, 2)), DistributedDataParallel(nn.Linear(2, 2))
    assert reporting() == before + 2
    kept.close()
    kept.close()
    assert reporting() == before + 1
    reducer = weakref.ref(dropped._reducer)
    del dropped
    gc.collect()
    assert reporting() == before
    assert reducer() is None


@on_two_ranks
def test_copies_and_children_have_none(rank: RankContext) -> None:
    before = reporting()
    model = DistributedDataParallel(nn.Linear(2, 2))
    twin = copy.deepcopy(model)
    assert reporting() == before + 1
    twin(torch.ones(1, 2)).sum().backward()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            model.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    twin.close()
    model.close()


@on_two_ranks
def test_an_old_exception_is_not_the_end(rank: RankContext) -> None:
    """Interactive sessions keep the last exception that was printed; closing a model does not blame it."""
    sys.last_value = ValueError("an old one")
    try:
        model = DistributedDataParallel(nn.Linear(2, 2))
        told: list[BaseException] = []
        model._reports.raised = told.append  # type: ignore[method-assign, assignment]
        model._reports.close()
        assert told == []
        sys.last_value = ValueError("a new one")
        model._reports.close()
        assert told == [sys.last_value]
        model.close()
    finally:
        del sys.last_value


@on_two_ranks
def test_another_group(rank: RankContext) -> None:
    """The reports move along with the model."""
    before = reporting()
    model = DistributedDataParallel(nn.Linear(2, 2))
    model._update_process_group(torch.distributed.new_group())
    assert reporting() == before + 1
    assert model._reports._board is not None
    model._reports._board.post("raised", rank.rank)
    model(torch.ones(1, 2)).sum().backward()
    model.close()
    assert reporting() == before
