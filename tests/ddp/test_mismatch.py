"""Ranks that differ: the same error on all of them, at construction, that names what differs."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpcomm import DistributedDataParallel, transport_choice
from ddpcomm.comm.factory import require_same_transport
from ddpcomm.errors import CollectiveMismatchError, ConfigurationError, RankMismatchError
from ddpcomm.model_number import _NEXT
from tests.ddp.models import chain, squares
from tests.ddp.on_ranks import on_two_ranks, same_on_all_ranks
from tests.ddp.oracle import raises_everywhere
from tests.ranks import RankContext


def shape(rank: int) -> nn.Module:
    model = nn.Sequential()
    model.add_module("body", nn.Linear(3, 2))
    model.add_module("head", nn.Linear(2, 2 + rank))
    return model


def order(rank: int) -> nn.Module:
    model = nn.Sequential()
    for name in ("query", "key") if rank == 0 else ("key", "query"):
        model.add_module(name, nn.Linear(3, 3))
    return model


def names(rank: int) -> nn.Module:
    return nn.ModuleDict({f"head{rank}": nn.Linear(3, 3)})


def dtype(rank: int) -> nn.Module:
    return nn.ModuleDict({"head": nn.Linear(3, 3, dtype=torch.float64 if rank else torch.float32)})


def strides(rank: int) -> nn.Module:
    model = nn.ModuleDict({"head": nn.Conv2d(3, 3, 2)})
    return model.to(memory_format=torch.channels_last) if rank else model


def frozen(rank: int) -> nn.Module:
    model = nn.ModuleDict({"head": nn.Linear(3, 3)})
    model["head"].bias.requires_grad_(rank == 0)
    return model


def buffer(rank: int) -> nn.Module:
    model = nn.ModuleDict({"head": nn.Linear(3, 3)})
    model.register_buffer("lookup", torch.zeros(2 + rank))
    return model


CASES: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "shape": (shape, "head.weight"),
    "order": (order, "query.weight"),
    "names": (names, "head1.weight"),
    "dtype": (dtype, "head.weight"),
    "strides": (strides, "head.weight"),
    "requires_grad": (frozen, "head.bias"),
    "buffer": (buffer, "lookup"),
}


@pytest.mark.parametrize("case", CASES)
@on_two_ranks
def test_models_differ(rank: RankContext, case: str) -> None:
    make, name = CASES[case]
    with raises_everywhere(RankMismatchError, name):
        DistributedDataParallel(make(rank.rank))


@on_two_ranks
def test_options_differ(rank: RankContext) -> None:
    with raises_everywhere(RankMismatchError, "bucket_cap_mb"):
        DistributedDataParallel(nn.Linear(3, 3), bucket_cap_mb=1 + rank.rank)


@on_two_ranks
def test_one_rank_has_nothing_to_train(rank: RankContext) -> None:
    model = nn.Linear(3, 3).requires_grad_(rank.rank == 0)
    with raises_everywhere(ConfigurationError, "doesn't have any parameter that requires a gradient"):
        DistributedDataParallel(model)


@on_two_ranks
def test_nothing_was_changed_by_a_refusal(rank: RankContext) -> None:
    model = shape(rank.rank)
    before = [p.detach().clone() for p in model.parameters()]
    with raises_everywhere(RankMismatchError):
        DistributedDataParallel(model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize(("here", "there"), [("auto", "process_group"), ("hierarchical", "shared_memory"), ("process_group", "abc")])
@on_two_ranks
def test_transports_that_differ(rank: RankContext, here: str, there: str) -> None:
    os.environ["DDPCOMM_TRANSPORT"] = there if rank.rank else here
    try:
        with pytest.raises(RankMismatchError, match=f"rank 0 is to use transport '{here}', rank 1 '{there}'"):
            DistributedDataParallel(chain())
    finally:
        del os.environ["DDPCOMM_TRANSPORT"]
    options = {"transport": "shared_memory", "transport_options": {"small_bytes": 128}} if rank.rank else {}
    with pytest.raises(RankMismatchError, match="rank 1 'shared_memory' with small_bytes=128"):
        DistributedDataParallel(chain(), **options)
    DistributedDataParallel(chain()).close()


@on_two_ranks
def test_no_transport_that_moves_nothing(rank: RankContext) -> None:
    with pytest.raises(ConfigurationError, match=r"transport must be one of auto, .*, nccl, got 'fake'"):
        DistributedDataParallel(chain(), transport="fake")
    for value, message in (
        ("fake", "DDPCOMM_TRANSPORT must be one of .* got 'fake'"),
        ("auto ", "DDPCOMM_TRANSPORT must be .* got 'auto '"),
    ):
        os.environ["DDPCOMM_TRANSPORT"] = value
        with pytest.raises(ConfigurationError, match=message):
            DistributedDataParallel(chain())
    os.environ["DDPCOMM_TRANSPORT"] = ""
    DistributedDataParallel(chain()).close()
    del os.environ["DDPCOMM_TRANSPORT"]


@on_two_ranks
def test_a_time_limit_that_never_passes(rank: RankContext) -> None:
    for transport in ("process_group", "shared_memory"):
        ddp = DistributedDataParallel(chain(), transport=transport, timeout=timedelta.max)
        squares(ddp, torch.ones(2, 3)).backward()
        ddp._communicator.barrier().wait(timedelta.max)
        ddp.close()


class ForGpusOnly:
    """A process group whose backends are for GPUs alone: nothing can be sent over it here."""

    def __init__(self) -> None:
        self._group = torch.distributed.group.WORLD
        self._device_types = [torch.device("cuda")]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


@on_two_ranks
def test_transports_are_compared_without_a_backend_for_gpus(rank: RankContext) -> None:
    world = torch.distributed.group.WORLD
    group = ForGpusOnly()
    stores = torch.distributed.distributed_c10d._world.pg_map
    stores[group] = stores[world]
    try:
        require_same_transport(group, "nccl", None, {})
        with pytest.raises(RankMismatchError, match=r"Rank 0: 'nccl'; rank 1: 'nccl' with max_ctas=4"):
            require_same_transport(group, "nccl", timedelta(seconds=20), {"max_ctas": 4} if rank.rank else {})
    finally:
        del stores[group]


@on_two_ranks
def test_two_models_over_one_process_group_in_another_order(rank: RankContext) -> None:
    """Of the same shape: nothing but the model's number tells their buckets apart."""
    models = [DistributedDataParallel(nn.Linear(2, 1, bias=False), transport="process_group") for _ in range(2)]
    for number in (0, 1):
        models[number](torch.full((1, 2), 10.0 * number + rank.rank)).sum().backward()
    assert [model.module.weight.grad[0, 0].item() for model in models] == [0.5, 10.5]
    number = rank.rank  # another one on each rank
    with pytest.raises(CollectiveMismatchError, match="another model's on other ranks"):
        models[number](torch.ones(1, 2)).sum().backward()
    for model in models:
        model.close()


@on_two_ranks
def test_numbers_of_models_agree_where_one_rank_has_built_more(rank: RankContext) -> None:
    group = dist.new_group()
    if rank.rank == 0:
        _NEXT[id(group)] = 2
    models = [DistributedDataParallel(nn.Linear(2, 1), process_group=group, transport="process_group") for _ in range(3)]
    assert same_on_all_ranks([model._tag for model in models]) == [2, 3, 0]
    for model in models:
        model.close()


@on_two_ranks
def test_other_ranks_are_waited_for_as_long_as_was_asked(rank: RankContext) -> None:
    model = DistributedDataParallel(nn.Linear(2, 1), transport="process_group")
    limits: list[timedelta | None] = []
    former = transport_choice.require_same_transport

    def note(group: Any, transport: str, timeout: timedelta | None, options: Any) -> None:
        limits.append(timeout)
        former(group, transport, timeout, options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport_choice, "require_same_transport", note)
        model.replace_process_group(dist.new_group(), timeout=timedelta(seconds=7))
    assert limits == [timedelta(seconds=7)]
    model.close()
