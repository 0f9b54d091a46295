"""Memory, dictionaries and tensors that are exchanged behind the objects that were there: noticed, or an error everywhere."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ddpcomm import DistributedDataParallel
from ddpcomm.errors import LostGradientError
from tests.ddp.models import chain, squares
from tests.ddp.on_ranks import on_two_ranks, same_on_all_ranks
from tests.ddp.oracle import Trial, build, whole_numbers
from tests.ranks import RankContext


@pytest.mark.parametrize("after", [1, 2])
@on_two_ranks
def test_gradients_that_are_views_get_other_memory(rank: RankContext, after: int) -> None:
    """After the first backward, buckets are laid out anew, and hand their views out by it."""
    trial = Trial(rank, chain, gradient_as_bucket_view=True)

    def exchange(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad.data = parameter.grad.data * 1.0

    for step in range(4):
        trial.step(squares, whole_numbers(step, 4, 3), zero_grad=step != after)
        if step + 1 == after:
            trial.change(exchange)


@pytest.mark.parametrize("clears", [True, False])
@on_two_ranks
def test_a_cast_after_the_first_backward(rank: RankContext, clears: bool) -> None:
    trial = Trial(rank, chain, gradient_as_bucket_view=True)
    trial.step(squares, whole_numbers(0, 4, 3))
    trial.change(nn.Module.double)
    for step in range(1, 4):
        trial.step(squares, whole_numbers(step, 4, 3, dtype=torch.float64), zero_grad=clears or step > 1)


def rebind_buffers(module: nn.Module) -> None:
    module._buffers = {name: buffer.clone() for name, buffer in module._buffers.items()}


def restore(module: nn.Module) -> None:
    module.__setstate__(copy.deepcopy(module.__dict__))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("rebind", [rebind_buffers, restore])
@on_two_ranks
def test_buffers_in_another_dictionary(rank: RankContext, rebind: Callable[[nn.Module], None]) -> None:
    ddp = DistributedDataParallel(build(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False))))
    for step in range(4):
        if step == 2:
            rebind(ddp.module[1])
            ddp.module[1].running_mean.fill_(5.0 + rank.rank)
        squares(ddp, whole_numbers(step, 6, 3)[rank.rank]).backward()
        ddp.zero_grad()
        ddp(torch.zeros(2, 3))  # brings rank 0's buffers
        same_on_all_ranks(ddp.module[1].running_mean.tolist())


@on_two_ranks
def test_parameters_in_another_dictionary(rank: RankContext) -> None:
    trial = Trial(rank, chain)

    def rebind(model: nn.Module) -> None:
        layer = model[2]
        layer._parameters = {name: nn.Parameter(p.detach().clone()) for name, p in layer._parameters.items()}

    for step in range(5):
        trial.step(squares, whole_numbers(step, 4, 3))
        if step in (0, 2):
            trial.change(rebind)


@on_two_ranks
def test_swapped_tensors_are_an_error_once(rank: RankContext) -> None:
    trial = Trial(rank, chain)
    trial.step(squares, whole_numbers(0, 4, 3))
    trial.step(squares, whole_numbers(1, 4, 3))
    former = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        trial.zero_grad()
        trial.change(lambda model: model[2].double())
        trial.change(lambda model: model[2].float())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(former)
    with pytest.raises(LostGradientError, match=r"2\.weight, 2\.bias had lost the hook"):
        squares(trial.ddp, whole_numbers(2, 4, 3)[rank.rank]).backward()
    for step in range(3, 6):
        trial.step(squares, whole_numbers(step, 4, 3))
