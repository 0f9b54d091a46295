"""Going on: after an exception on one rank or all, and with the ranks that are left once one was lost."""

from __future__ import annotations

import copy
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpcomm import DistributedDataParallel
from ddpcomm.errors import BackwardInterruptedError, CollectiveTimeoutError, ConfigurationError, PeerLostError, RankMismatchError
from tests.ddp.models import chain
from tests.ddp.on_ranks import exchange, on_two_ranks
from tests.ddp.oracle import BUCKETS_AND_VIEWS, TINY_BUCKETS_MB, build, raises_everywhere, whole_numbers
from tests.ranks import RankContext, RankFailure, RankPool

pytestmark = pytest.mark.timeout(150)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, turn: int) -> None:
    optimizer.zero_grad()
    model(whole_numbers(turn, 4, 3)[rank]).pow(2).sum().backward()
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def weights(model: nn.Module) -> list[list[float]]:
    return [p.flatten().tolist() for p in model.parameters()]


# ---- after an exception ---------------------------------------------------------------------------------------------


@contextmanager
def failing(module: nn.Module, where: str, error: Exception) -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise error

    handle: Any = module.register_forward_pre_hook(fail) if where == "forward" else next(module.parameters()).register_hook(fail)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@on_two_ranks
def test_the_step_after_an_exception(rank: RankContext, transport: str) -> None:
    places = [("forward", 2), ("backward", 2), ("backward", 1)]  # where, on how many ranks
    errors = [ValueError("no"), MemoryError("full"), torch.OutOfMemoryError("full")]
    for options in BUCKETS_AND_VIEWS:
        ddp, reference = (DistributedDataParallel(build(chain), transport=transport, **options) for _ in range(2))
        optimizer, other = sgd(ddp), sgd(reference)
        for turn, ((where, count), error) in enumerate(itertools.product(places, errors)):
            fails = rank.rank < count
            with (
                failing(ddp.module[2] if fails else nn.Linear(1, 1), where, error),
                pytest.raises(type(error) if fails else BackwardInterruptedError),
            ):
                step(ddp, optimizer, rank.rank, 50 + turn)
            step(ddp, optimizer, rank.rank, turn)
            step(reference, other, rank.rank, turn)
            assert weights(ddp) == weights(reference)


@on_two_ranks
def test_a_batch_that_all_ranks_skip(rank: RankContext) -> None:
    ddp, reference = (DistributedDataParallel(build(chain)) for _ in range(2))
    optimizer, other = sgd(ddp), sgd(reference)
    for turn in range(4):
        if turn % 2:
            ddp(whole_numbers(90, 4, 3)[rank.rank])  # and no backward
        step(ddp, optimizer, rank.rank, turn)
        step(reference, other, rank.rank, turn)
        assert weights(ddp) == weights(reference)


# ---- after a loss ---------------------------------------------------------------------------------------------------


def lose_one(context: RankContext, options: dict[str, Any]) -> tuple[list[list[float]], list[list[float]]]:
    ddp = DistributedDataParallel(build(chain), **options)
    optimizer = sgd(ddp)
    mine = context.rank % 2
    for turn in range(2):
        step(ddp, optimizer, mine, turn)
    if context.rank == 2:
        ddp.module[2].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(
        (PeerLostError, CollectiveTimeoutError)
    ):  # Gloo tells the neighbours; who waits for those waits until the time limit
        step(ddp, optimizer, mine, 2)
    assert ddp.unsynchronized_parameters()

    survivors = dist.new_group([0, 1], use_local_synchronization=True, timeout=timedelta(seconds=30))
    before = copy.deepcopy((ddp.module, optimizer.state_dict()))
    ddp.replace_process_group(survivors)
    assert weights(ddp) == weights(before[0])

    fresh = DistributedDataParallel(before[0], process_group=survivors, **options)
    other = sgd(fresh)
    other.load_state_dict(before[1])
    for turn in range(3, 6):
        step(ddp, optimizer, mine, turn)
        step(fresh, other, mine, turn)
        assert weights(ddp) == weights(fresh)
    ddp.close()
    return weights(ddp), weights(fresh)


@pytest.mark.parametrize("options", BUCKETS_AND_VIEWS[:2], ids=str)
@pytest.mark.parametrize("transport", ["shared_memory", "process_group", "hierarchical"])
def test_the_others_go_on_when_one_is_killed(ranks: Callable[[int], RankPool], transport: str, options: dict[str, Any]) -> None:
    if transport != "shared_memory" and options["gradient_as_bucket_view"]:
        pytest.skip("each case costs three processes")
    with pytest.raises(RankFailure) as caught:
        ranks(3).run(lose_one, {"transport": transport, **options}, group_timeout=timedelta(seconds=4))
    assert list(caught.value.tracebacks) == [2], str(caught.value)
    assert len({repr(result) for pair in caught.value.results.values() for result in pair}) == 1


@on_two_ranks
def test_a_group_of_another_size(rank: RankContext) -> None:
    """Nobody was lost: the group may also shrink and grow on purpose, and the divisor with it."""
    alone = dist.new_group([rank.rank], use_local_synchronization=True)
    ddp = DistributedDataParallel(build(chain), bucket_cap_mb=TINY_BUCKETS_MB)
    batch = whole_numbers(0, 4, 3)
    ddp(batch[rank.rank]).pow(2).sum().backward()
    averaged = ddp.module[0].weight.grad.tolist()
    ddp.zero_grad()
    ddp.replace_process_group(alone)
    ddp(batch[rank.rank]).pow(2).sum().backward()
    own = ddp.module[0].weight.grad.tolist()
    plain = build(chain)
    plain(batch[rank.rank]).pow(2).sum().backward()
    assert own == plain[0].weight.grad.tolist()
    ddp.zero_grad()
    ddp.replace_process_group()
    ddp(batch[rank.rank]).pow(2).sum().backward()
    assert ddp.module[0].weight.grad.tolist() == averaged


@on_two_ranks
def test_weights_must_agree(rank: RankContext) -> None:
    ddp = DistributedDataParallel(build(chain))
    with torch.no_grad():
        ddp.module[2].bias += rank.rank
    with raises_everywhere(RankMismatchError, "different weights: 2.bias"):
        ddp.replace_process_group()
    assert exchange(weights(ddp))[0] != exchange(weights(ddp))[1]
    with pytest.raises(ConfigurationError, match="source"):
        ddp.replace_process_group(source=2)
    ddp(torch.ones(1, 3)).sum().backward()  # nothing was changed by the refusals
    ddp.zero_grad()
    ddp.replace_process_group(source=1)
    by_rank = exchange(weights(ddp))
    assert by_rank[0] == by_rank[1]
    assert by_rank[0][3] == [value + 1 for value in build(chain)[2].bias.tolist()]  # type: ignore[index]


@on_two_ranks
def test_in_the_middle_of_a_backward_that_failed(rank: RankContext) -> None:
    for options in BUCKETS_AND_VIEWS:
        ddp = DistributedDataParallel(build(chain), **options)
        reference = DistributedDataParallel(build(chain), **options)
        optimizer, other = sgd(ddp), sgd(reference)
        step(ddp, optimizer, rank.rank, 0)
        step(reference, other, rank.rank, 0)
        with (
            pytest.raises(ValueError if rank.rank == 0 else BackwardInterruptedError),
            failing(ddp.module[2] if rank.rank == 0 else nn.Linear(1, 1), "backward", ValueError("no")),
        ):
            step(ddp, optimizer, rank.rank, 1)
        ddp.replace_process_group()
        step(ddp, optimizer, rank.rank, 2)
        step(reference, other, rank.rank, 2)
        assert weights(ddp) == weights(reference)
