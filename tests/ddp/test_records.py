"""What a model tells of its last backward, and the guard before an optimizer's step."""

from __future__ import annotations

import pytest
import torch

from ddpcomm import DistributedDataParallel
from ddpcomm.errors import UnsynchronizedGradientError
from tests.ddp.models import Fork, both_arms
from tests.ddp.on_ranks import on_two_ranks
from tests.ddp.oracle import build, whole_numbers
from tests.ranks import RankContext

ARMS = {"left.weight", "left.bias", "right.weight", "right.bias"}


@on_two_ranks
def test_unused_parameters_and_why(rank: RankContext) -> None:
    ddp = DistributedDataParallel(build(Fork), find_unused_parameters=True)
    x = whole_numbers(1, 5, 3)[rank.rank]
    ddp(x, "left" if rank.rank else "right").backward()
    unused = "right" if rank.rank else "left"
    assert ddp.unused_parameters() == {f"{unused}.{kind}": "used on other ranks only" for kind in ("weight", "bias")}
    ddp(x, "left").backward()
    assert ddp.unused_parameters() == {f"right.{kind}": "used on no rank" for kind in ("weight", "bias")}
    both_arms(ddp, x).backward()
    assert ddp.unused_parameters() == {}


@on_two_ranks
def test_unsynchronized_parameters_and_why(rank: RankContext) -> None:
    ddp = DistributedDataParallel(build(Fork))
    x = whole_numbers(1, 5, 3)[rank.rank]
    both_arms(ddp, x).backward()
    assert ddp.unsynchronized_parameters() == {}
    with ddp.no_sync():
        ddp(x, "left").backward()
    found = ddp.unsynchronized_parameters()
    assert set(found) == {"trunk.weight", "trunk.bias", "left.weight", "left.bias"}
    assert all("no_sync" in why for why in found.values())
    ddp.zero_grad()
    assert ddp.unsynchronized_parameters() == {}
    with ddp.no_sync():
        both_arms(ddp, x).backward()
    both_arms(ddp, x).backward()
    assert ddp.unsynchronized_parameters() == {}


@on_two_ranks
def test_a_step_on_them_is_an_error_if_asked(rank: RankContext) -> None:
    ddp = DistributedDataParallel(build(Fork), error_on_unsynchronized=True)
    others = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    x = whole_numbers(1, 5, 3)[rank.rank]
    with ddp.no_sync():
        both_arms(ddp, x).backward()
    before = [p.detach().clone() for p in ddp.parameters()]
    with pytest.raises(UnsynchronizedGradientError, match=r"trunk\.weight"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
    others.step()
    both_arms(ddp, x).backward()
    optimizer.step()
    ddp.close()
    ddp.close()
    with torch.enable_grad():
        both_arms(ddp.module, x).backward()
    optimizer.step()
