"""Several forwards before a backward, several backwards after a forward, and backwards that are none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.ddp.models import Fork, both_arms, chain, left_arm, right_arm, squares
from tests.ddp.on_ranks import on_two_ranks
from tests.ddp.oracle import BUCKETS_AND_VIEWS, Step, Trial, inner, whole_numbers
from tests.ranks import RankContext


class Heads(nn.Module):
    """An encoder and three heads. Returns all heads' outputs, or the one that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 1) for _ in range(3)])

    def forward(self, x: Tensor, head: int | None = None) -> Tensor | list[Tensor]:
        hidden = self.encoder(x).relu()
        outputs = [each(hidden).pow(2).sum() for each in self.heads]
        return outputs if head is None else outputs[head]


def two_forwards_one_backward(model: nn.Module, x: Tensor) -> Tensor:
    return both_arms(model, x) + both_arms(model, x * 2)


def two_forwards_two_backwards(model: nn.Module, x: Tensor) -> None:
    losses = [both_arms(model, x), both_arms(model, x * 2)]
    for loss in losses:
        loss.backward()


def backwards_in_reverse(model: nn.Module, x: Tensor) -> None:
    losses = [left_arm(model, x), both_arms(model, x * 2), right_arm(model, x)]
    for loss in reversed(losses):
        loss.backward()


def second_backward_over_kept_graph(model: nn.Module, x: Tensor) -> None:
    loss = both_arms(model, x)
    loss.backward(retain_graph=True)
    loss.backward()


def both_losses_in_one_call(model: nn.Module, x: Tensor) -> None:
    torch.autograd.backward([left_arm(model, x), right_arm(model, x * 2)])


def one_forward_each_head(model: nn.Module, x: Tensor) -> Tensor:
    return model(x, 0) + model(x * 2, 1)


def loss_on_one_output(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)[1]


def backward_of_each_output(model: nn.Module, x: Tensor) -> None:
    for output in model(x):
        output.backward(retain_graph=True)


def backward_of_two_outputs_the_third_kept(model: nn.Module, x: Tensor) -> None:
    first, second, _ = model(x)
    (first + second).backward()


def forward_without_backward_first(model: nn.Module, x: Tensor) -> Tensor:
    model(x * 3)
    return both_arms(model, x)


def forward_in_evaluation_mode(model: nn.Module, x: Tensor) -> Tensor:
    model.eval()
    loss = both_arms(model, x)
    model.train()
    return loss


def forward_without_gradients_between(model: nn.Module, x: Tensor) -> Tensor:
    loss = both_arms(model, x)
    with torch.no_grad():
        model(x * 5)
    with torch.inference_mode():
        model(x * 5)
    return loss


def graph_joined_with_others(model: nn.Module, x: Tensor) -> Tensor:
    outside = torch.ones(3, requires_grad=True)
    return both_arms(model, x * outside) + (x * outside).pow(2).sum()


def output_used_twice(model: nn.Module, x: Tensor) -> Tensor:
    loss = both_arms(model, x)
    return loss * loss.detach() + loss


def module_called_itself(model: nn.Module, x: Tensor) -> Tensor:
    return both_arms(inner(model), x)


def module_and_wrapper(model: nn.Module, x: Tensor) -> Tensor:
    return both_arms(inner(model), x) + both_arms(model, x * 2)


def named_inputs(model: nn.Module, x: Tensor) -> None:
    module = inner(model)
    both_arms(model, x).backward(inputs=[module.left.weight, module.trunk.bias])


def named_inputs_without_the_last_layer(model: nn.Module, x: Tensor) -> None:
    both_arms(model, x).backward(inputs=[inner(model).trunk.weight])


STEPS: dict[Step, Callable[[], nn.Module]] = {
    two_forwards_one_backward: Fork,
    two_forwards_two_backwards: Fork,
    backwards_in_reverse: Fork,
    second_backward_over_kept_graph: Fork,
    both_losses_in_one_call: Fork,
    one_forward_each_head: Heads,
    loss_on_one_output: Heads,
    backward_of_each_output: Heads,
    backward_of_two_outputs_the_third_kept: Heads,
    forward_without_backward_first: Fork,
    forward_in_evaluation_mode: Fork,
    forward_without_gradients_between: Fork,
    graph_joined_with_others: Fork,
    output_used_twice: Fork,
    module_called_itself: Fork,
    module_and_wrapper: Fork,
    named_inputs: Fork,
    named_inputs_without_the_last_layer: Fork,
}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@on_two_ranks
def test_pass(rank: RankContext, step: Step) -> None:
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, STEPS[step], find_unused_parameters=True, **options)
        for turn in range(3):
            trial.step(step, whole_numbers(turn, 5, 3))
        trial.step(step, whole_numbers(4, 5, 3), zero_grad=False)


@on_two_ranks
def test_one_kind_of_pass_after_another(rank: RankContext) -> None:
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Fork, find_unused_parameters=True, **options)
        for turn, step in enumerate(step for step, make in STEPS.items() if make is Fork):
            trial.step(step, whole_numbers(turn, 5, 3))


@on_two_ranks
def test_autograd_grad_is_no_backward(rank: RankContext) -> None:
    """It communicates nothing: rank 0 may call it alone, for inputs, parameters, or both."""
    trial = Trial(rank, chain)
    for turn in range(3):
        x = whole_numbers(turn, 5, 3)[rank.rank].requires_grad_()
        parameters = list(trial.module.parameters())
        if rank.rank == 0:
            torch.autograd.grad(squares(trial.ddp, x), [x])
            torch.autograd.grad(squares(trial.ddp, x), parameters)
            torch.autograd.grad(squares(trial.ddp, x), [x, *parameters[2:]])
            torch.autograd.grad(squares(trial.ddp, x), parameters[:1])
        trial.step(squares, whole_numbers(turn, 5, 3))


@on_two_ranks
def test_values_from_autograd_grad_are_local(rank: RankContext) -> None:
    trial = Trial(rank, chain)
    batches = whole_numbers(1, 5, 3)
    own = torch.autograd.grad(squares(trial.ddp, batches[rank.rank]), list(trial.module.parameters()))
    replica = trial.oracle.replicas[rank.rank]
    expected = torch.autograd.grad(squares(replica, batches[rank.rank]), list(replica.parameters()))
    assert all(map(torch.equal, own, expected))
    assert all(p.grad is None for p in trial.module.parameters())
