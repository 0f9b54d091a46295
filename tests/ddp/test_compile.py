"""torch.compile around the wrapped model and inside of it."""

from __future__ import annotations

import warnings

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


@pytest.mark.parametrize("transport", ["process_group", "auto"])
@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.timeout(240)
@on_two_ranks
def test_compiled_training_step(rank: RankContext, transport: str, view: bool) -> None:
    """A compiled function that runs backward itself: what autograd calls of ours runs as it is, and none of it is traced."""
    torch._dynamo.reset()
    module, oracle = build(two_lines), Oracle(two_lines)
    ddp = DistributedDataParallel(module, transport=transport, gradient_as_bucket_view=view, error_on_unsynchronized=True)
    optimizer, theirs = (torch.optim.SGD(m.parameters(), 0.125) for m in (module, oracle.replicas[0]))

    @torch.compile(backend="aot_eager")
    def train(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = ddp(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    for step in range(3):
        batches = whole_numbers(step, 5, 3)
        oracle.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            train(batches[rank.rank])
        assert not [str(warning.message) for warning in caught if "ddpcomm" in str(warning.message)]
        oracle.step(lambda each, x: each(x).sum(), batches)
        check_equal(gradients(module), oracle.gradients(), f"step {step}")
        theirs.step()
        for replica in oracle.replicas[1:]:
            replica.load_state_dict(oracle.replicas[0].state_dict())
        check_equal(dict(module.named_parameters()), dict(oracle.replicas[0].named_parameters()), f"weights after step {step}")
    ddp.close()
    torch._dynamo.reset()
