"""torch.compile around the wrapped model and inside of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpcomm import DistributedDataParallel
from tests.ddp.on_ranks import on_two_ranks, same_on_all_ranks
from tests.ddp.oracle import Oracle, build, check_equal, gradients, whole_numbers
from tests.ranks import RankContext


def two_lines() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "around"])
@pytest.mark.timeout(240)
@on_two_ranks
def test_compiled(rank: RankContext, inside: bool) -> None:
    """The graphs are traced and run as they are ("aot_eager"): generated code would be another backend's matter."""
    torch._dynamo.reset()
    module = build(two_lines)
    oracle = Oracle(two_lines)
    if inside:
        ddp = DistributedDataParallel(torch.compile(module, backend="aot_eager"))
        model: nn.Module = ddp
    else:
        ddp = DistributedDataParallel(module)
        model = torch.compile(ddp, backend="aot_eager")
    for step in range(3):
        batches = whole_numbers(step, 5, 3)
        oracle.zero_grad()
        module.zero_grad()
        model(batches[rank.rank]).sum().backward()
        oracle.step(lambda each, x: each(x).sum(), batches)
        check_equal(gradients(module), oracle.gradients(), f"step {step}")
    assert ddp._reducer.backwards == 3
    same_on_all_ranks([p.grad.tolist() for p in module.parameters()])
    torch._dynamo.reset()
