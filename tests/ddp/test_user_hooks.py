"""What users do to gradients: hooks, optimizers in backward, clipping, scaling."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward

from ddpcomm import DistributedDataParallel
from tests.ddp.models import Fork, both_arms
from tests.ddp.on_ranks import on_two_ranks, same_on_all_ranks
from tests.ddp.oracle import BUCKETS_AND_VIEWS, Trial, build, whole_numbers
from tests.ranks import RankContext


@pytest.mark.parametrize("before", [True, False], ids=["before wrapping", "after wrapping"])
@on_two_ranks
def test_post_accumulate_hook_sees_the_average(rank: RankContext, before: bool) -> None:
    for options in BUCKETS_AND_VIEWS:
        seen: dict[int, Tensor] = {}

        def look(parameter: Tensor, seen: dict[int, Tensor] = seen) -> None:
            assert parameter.grad is not None
            seen[id(parameter)] = parameter.grad.clone()

        module = build(Fork)
        handles = [p.register_post_accumulate_grad_hook(look) for p in module.parameters()] if before else []
        trial = Trial(rank, Fork, **options)
        trial.ddp = DistributedDataParallel(module, **options)
        if not before:
            handles = [p.register_post_accumulate_grad_hook(look) for p in module.parameters()]
        for turn in range(3):
            trial.step(both_arms, whole_numbers(turn, 5, 3))
            assert all(torch.equal(seen[id(p)], p.grad) for p in module.parameters())
        seen.clear()
        for handle in handles:
            handle.remove()
        trial.step(both_arms, whole_numbers(3, 5, 3))
        assert not seen


@on_two_ranks
def test_step_in_a_hook_of_the_users_own(rank: RankContext) -> None:
    module, alone = build(Fork), build(Fork)

    def descend(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter -= parameter.grad / 64
        parameter.grad = None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(descend)
    ddp = DistributedDataParallel(module)
    for turn in range(3):
        batches = [x / 4 for x in whole_numbers(turn, 5, 3)]
        both_arms(ddp, batches[rank.rank]).backward()
        alone.zero_grad()
        sum(both_arms(alone, batch) / 2 for batch in batches).backward()
        with torch.no_grad():
            for parameter in alone.parameters():
                parameter -= parameter.grad / 64
        for mine, wanted in zip(module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, wanted)
        same_on_all_ranks([p.tolist() for p in module.parameters()])


@on_two_ranks
def test_torchs_optimizer_in_backward(rank: RankContext) -> None:
    module, alone = build(Fork), build(Fork)
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 1 / 64})
    optimizer = torch.optim.SGD(alone.parameters(), lr=1 / 64)
    ddp = DistributedDataParallel(module)
    for turn in range(3):
        batches = [x / 4 for x in whole_numbers(turn, 5, 3)]
        both_arms(ddp, batches[rank.rank]).backward()
        optimizer.zero_grad()
        sum(both_arms(alone, batch) / 2 for batch in batches).backward()
        optimizer.step()
        for mine, wanted in zip(module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, wanted)


@on_two_ranks
def test_clipping_is_by_the_norm_of_the_average(rank: RankContext) -> None:
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Fork, **options)
        for turn in range(3):
            trial.step(both_arms, whole_numbers(turn, 5, 3))
            found = nn.utils.clip_grad_norm_(trial.module.parameters(), 1.0)
            wanted = nn.utils.clip_grad_norm_(trial.oracle.replicas[0].parameters(), 1.0)
            assert torch.equal(found, wanted)


@on_two_ranks
def test_scaled_loss(rank: RankContext) -> None:
    trial = Trial(rank, Fork)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    optimizer = torch.optim.SGD(trial.module.parameters(), lr=0.0)
    for turn in range(2):
        batches = whole_numbers(turn, 5, 3)
        trial.zero_grad()
        scaler.scale(both_arms(trial.ddp, batches[rank.rank])).backward()
        scaler.unscale_(optimizer)
        trial.oracle.step(both_arms, batches)
        trial.check()
        scaler.step(optimizer)
        scaler.update()


@on_two_ranks
def test_a_hook_exchanged_between_two_backwards(rank: RankContext) -> None:
    model = nn.Linear(3, 1, bias=False)
    ddp = DistributedDataParallel(model)
    for step in range(3):
        model.zero_grad()
        seen: list[torch.Tensor] = []
        handle = model.weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad.clone()))
        ddp(torch.full((1, 3), float(2 * rank.rank + step))).sum().backward()
        handle.remove()
        assert torch.equal(seen[0], torch.full((1, 3), 1.0 + step))
    ddp.close()
