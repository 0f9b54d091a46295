"""Gradients of gradients, and torch.func over the wrapped module."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

from tests.ddp.models import chain, squares
from tests.ddp.on_ranks import on_two_ranks
from tests.ddp.oracle import BUCKETS_AND_VIEWS, Step, Trial, check_equal, inner, whole_numbers
from tests.ranks import RankContext


class Cubic(nn.Module):
    """Smooth, and exact in whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).pow(2))  # type: ignore[no-any-return]


def slope(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    out = model(x)
    return out, torch.autograd.grad(out.sum(), x, create_graph=True)[0]


def penalty_alone(model: nn.Module, x: Tensor) -> Tensor:
    return slope(model, x)[1].pow(2).sum()


def output_and_penalty(model: nn.Module, x: Tensor) -> Tensor:
    out, by_input = slope(model, x)
    return out.sum() + by_input.pow(2).sum()


def penalty_after_backward(model: nn.Module, x: Tensor) -> Tensor:
    out, by_input = slope(model, x)
    out.sum().backward(retain_graph=True)
    return by_input.pow(2).sum()


def penalty_on_parameters(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).sum()
    by_parameters = torch.autograd.grad(loss, list(inner(model).parameters()), create_graph=True)
    return loss + sum(g.pow(2).sum() for g in by_parameters)  # type: ignore[no-any-return]


def hessian_vector_product(model: nn.Module, x: Tensor) -> Tensor:
    by_parameter = torch.autograd.grad(model(x).sum(), inner(model).first.weight, create_graph=True)[0]
    return (by_parameter * torch.ones(3)).sum()


def second_penalty(model: nn.Module, x: Tensor) -> Tensor:
    """Twice differentiated by the input, then by the parameters."""
    x = x.detach().requires_grad_()
    first = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
    second = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)[0]
    return second.sum()


STEPS = [penalty_alone, output_and_penalty, penalty_after_backward, penalty_on_parameters, hessian_vector_product, second_penalty]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@on_two_ranks
def test_penalty(rank: RankContext, step: Step) -> None:
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Cubic, find_unused_parameters=True, **options)
        for turn in range(3):
            trial.step(step, whole_numbers(turn, 3, 3, largest=2))
        trial.step(squares, whole_numbers(4, 3, 3, largest=2), zero_grad=False)


@on_two_ranks
def test_backward_that_keeps_its_graph(rank: RankContext) -> None:
    """backward(create_graph=True): the values are averaged; the graph behind them is not."""

    def keep_graph(model: nn.Module, x: Tensor) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of the reference cycle
            squares(model, x).backward(create_graph=True)

    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, chain, **options)
        for turn in range(2):
            trial.step(keep_graph, whole_numbers(turn, 5, 3))
        trial.step(squares, whole_numbers(3, 5, 3))


@on_two_ranks
def test_no_warning_about_strides(rank: RankContext) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trial = Trial(rank, Cubic)
        for turn in range(2):
            trial.step(output_and_penalty, whole_numbers(turn, 3, 3, largest=2))


# ---- torch.func -----------------------------------------------------------------------------------------------------


def parameters_of(model: nn.Module) -> dict[str, Any]:
    return dict(model.named_parameters())


@on_two_ranks
def test_functional_call_with_own_parameters(rank: RankContext) -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        return functional_call(model, parameters_of(model), (x,)).pow(2).sum()

    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, chain, **options)
        for turn in range(3):
            trial.step(step, whole_numbers(turn, 5, 3))


@on_two_ranks
def test_functional_call_with_scaled_parameters(rank: RankContext) -> None:
    """The tensors that take part are computed from the parameters, as in meta-learning's inner steps."""

    def step(model: nn.Module, x: Tensor) -> Tensor:
        scaled = {name: p * 2 for name, p in model.named_parameters()}
        return functional_call(model, scaled, (x,)).pow(2).sum()

    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, chain, **options)
        for turn in range(3):
            trial.step(step, whole_numbers(turn, 5, 3))


@on_two_ranks
def test_functional_call_with_foreign_tensors(rank: RankContext) -> None:
    """The gradients go to the caller's own leaves, which nobody promised to average; the parameters' stay."""
    trial = Trial(rank, chain, find_unused_parameters=True)
    for turn in range(2):
        trial.step(squares, whole_numbers(turn, 5, 3))
        x = whole_numbers(10 + turn, 5, 3)[rank.rank]
        leaves = {name: p.detach().clone().requires_grad_() for name, p in trial.ddp.named_parameters()}
        functional_call(trial.ddp, leaves, (x,)).pow(2).sum().backward()
        own = {name: p.detach().clone().requires_grad_() for name, p in trial.oracle.replicas[0].named_parameters()}
        functional_call(trial.oracle.replicas[0], own, (x,)).pow(2).sum().backward()
        check_equal({n: t.grad for n, t in leaves.items()}, {f"module.{n}": t.grad for n, t in own.items()}, "own gradient")
        trial.check()


@pytest.mark.parametrize("wrapped", [False, True], ids=["module", "wrapper"])
@on_two_ranks
def test_transforms_are_local(rank: RankContext, wrapped: bool) -> None:
    """`grad`, `vmap` and `jacrev` compute what they do without a wrapper, on one rank alone, and training goes on."""

    def make() -> nn.Module:
        model = chain()
        model.register_buffer("synchronized_in_training", torch.zeros(1))
        return model

    trial = Trial(rank, make)
    for turn in range(2):
        if rank.rank == turn % 2:
            model: nn.Module = trial.ddp if wrapped else trial.module
            plain = trial.oracle.replicas[0]
            x = whole_numbers(20 + turn, 5, 3)[rank.rank]
            for transform in (each_gradient, mean_gradient, jacobian):
                found, expected = transform(model, x), transform(plain, x)
                prefix = "module." if wrapped else ""
                check_equal(found, {prefix + name: value for name, value in expected.items()}, transform.__name__)
        trial.step(squares, whole_numbers(turn, 5, 3))


def detached(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def each_gradient(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(model, parameters, (row.unsqueeze(0),)).pow(2).sum()

    return vmap(grad(loss), in_dims=(None, 0))(detached(model), x)  # type: ignore[no-any-return]


def mean_gradient(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return grad(lambda parameters: functional_call(model, parameters, (x,)).pow(2).sum())(detached(model))  # type: ignore[no-any-return]


def jacobian(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return jacrev(lambda parameters: functional_call(model, parameters, (x,)))(detached(model))  # type: ignore[no-any-return]


@on_two_ranks
def test_forward_mode(rank: RankContext) -> None:
    """Directional derivatives by dual numbers are local too."""
    import torch.autograd.forward_ad as forward_ad

    trial = Trial(rank, chain)
    for turn in range(2):
        x = whole_numbers(turn, 5, 3)[rank.rank]
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(trial.ddp(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
            expected = forward_ad.unpack_dual(trial.oracle.replicas[0](forward_ad.make_dual(x, torch.ones_like(x)))).tangent
            assert torch.equal(found, expected)
        trial.step(squares, whole_numbers(turn, 5, 3))
