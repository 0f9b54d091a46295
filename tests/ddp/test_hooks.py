"""Communication hooks: torch's own, ddpcomm's, and wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks

import ddpcomm
from ddpcomm import DistributedDataParallel
from ddpcomm.errors import CommHookError
from tests.ddp.models import Fork, both_arms
from tests.ddp.on_ranks import on_two_ranks, same_on_all_ranks
from tests.ddp.oracle import TINY_BUCKETS_MB, Trial, raises_everywhere, whole_numbers
from tests.ranks import RankContext

EXACT: dict[str, Callable[[DistributedDataParallel], Any]] = {
    "allreduce": lambda ddp: ddp.register_comm_hook(None, default_hooks.allreduce_hook),
    "torch's fp16": lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "torch's bf16": lambda ddp: ddp.register_comm_hook(None, default_hooks.bf16_compress_hook),
    "torch's fp16 wrapper": lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "fp16": lambda ddp: ddp.register_comm_hook(None, ddpcomm.hooks.fp16),
    "bf16": lambda ddp: ddp.register_comm_hook(None, ddpcomm.hooks.bf16),
}


class Line(nn.Module):
    """Its gradients are whole numbers below 64: exact in 16 bits, halves included."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x).sum()


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("name", EXACT)
@on_two_ranks
def test_exact_gradients_are_averaged_exactly(rank: RankContext, name: str, view: bool) -> None:
    trial = Trial(rank, Line, gradient_as_bucket_view=view, bucket_cap_mb=TINY_BUCKETS_MB)
    EXACT[name](trial.ddp)
    for turn in range(3):
        trial.step(lambda model, x: model(x), whole_numbers(turn, 5, 3))
    assert trial.module.line.weight.grad.dtype == torch.float32


def power_sgd(ddp: DistributedDataParallel, rank: RankContext) -> None:
    state = powerSGD_hook.PowerSGDState(rank.process_group, matrix_approximation_rank=1, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def quantization(ddp: DistributedDataParallel, rank: RankContext) -> None:
    ddp.register_comm_hook(rank.process_group, quantization_hooks.quantization_pertensor_hook)


@on_two_ranks
def test_power_sgd_runs_unchanged(rank: RankContext) -> None:
    trial = Trial(rank, Fork)
    power_sgd(trial.ddp, rank)
    for turn in range(5):
        trial.module.zero_grad()
        both_arms(trial.ddp, whole_numbers(turn, 5, 3)[rank.rank]).backward()
        same_on_all_ranks([p.grad.tolist() for p in trial.module.parameters()])


@on_two_ranks
def test_unused_parameters_with_a_hook(rank: RankContext) -> None:
    trial = Trial(rank, Fork)
    trial.ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    for turn, arms in enumerate([("left", "left"), ("left", "right"), ("left right", "left")]):
        batches = list(zip(whole_numbers(turn, 5, 3), arms, strict=True))
        trial.step(lambda model, batch: model(*batch), batches)


def returns_nothing(state, bucket):  # type: ignore[no-untyped-def]
    return None


def returns_a_tensor(state, bucket):  # type: ignore[no-untyped-def]
    return bucket.buffer()


def wrong_size(state, bucket):  # type: ignore[no-untyped-def]
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer()[:1])
    return future


@pytest.mark.parametrize("hook", [returns_nothing, returns_a_tensor, wrong_size])
@on_two_ranks
def test_wrong_hooks(rank: RankContext, hook: Callable[..., Any]) -> None:
    trial = Trial(rank, Fork)
    trial.ddp.register_comm_hook(None, hook)
    loss = both_arms(trial.ddp, whole_numbers(1, 5, 3)[rank.rank])
    with raises_everywhere(CommHookError, "hook", hook.__name__):
        loss.backward()
