"""grad_norm and clip_grad_norm_: torch's figures, of the gradients as they are at the time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpcomm import DistributedDataParallel
from ddpcomm.errors import NonFiniteGradientError
from tests.ddp.models import Fork, MixedTypes, Transformer, chain, left_arm, loss_itself, next_token, squares
from tests.ddp.on_ranks import on_two_ranks, same_on_all_ranks
from tests.ddp.oracle import whole_numbers
from tests.ranks import RankContext


def torch_norm(model: nn.Module) -> torch.Tensor:
    gradients = [p.grad.double() for p in model.parameters() if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)


def backward(model: nn.Module, turn: int) -> None:
    model.zero_grad()
    squares(model, whole_numbers(turn, 5, 3)[torch.distributed.get_rank()]).backward()


@pytest.mark.parametrize("view", [False, True])
@on_two_ranks
def test_norm_is_torchs(rank: RankContext, view: bool) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(chain(), gradient_as_bucket_view=view, bucket_cap_mb=1e-4)
    assert model.grad_norm() == 0
    for turn in range(4):
        backward(model, turn)
        norm = model.grad_norm()
        torch.testing.assert_close(norm, torch_norm(model), rtol=1e-6, atol=0, check_dtype=False)
        same_on_all_ranks(norm.item())
    model.close()


@pytest.mark.parametrize("view", [False, True])
@on_two_ranks
def test_after_changes_that_bump_no_version(rank: RankContext, view: bool) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(chain(), gradient_as_bucket_view=view)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn in range(3):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer.zero_grad()
        scaler.scale(squares(model, whole_numbers(turn, 5, 3)[rank.rank])).backward()
        scaler.unscale_(optimizer)
        torch.testing.assert_close(model.grad_norm(), torch_norm(model), rtol=1e-6, atol=0, check_dtype=False)
        model.module[0].weight.grad.data.mul_(3)
        torch.testing.assert_close(model.grad_norm(), torch_norm(model), rtol=1e-6, atol=0, check_dtype=False)
    model.close()


@pytest.mark.parametrize("view", [False, True])
@on_two_ranks
def test_never_of_gradients_that_have_changed(rank: RankContext, view: bool) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(chain(), gradient_as_bucket_view=view)
    backward(model, 0)
    model.grad_norm()

    def scale_one() -> None:
        model.module[0].weight.grad.mul_(3)

    def replace_one() -> None:
        model.module[2].bias.grad = torch.full_like(model.module[2].bias, 5.0)

    def drop_one() -> None:
        model.module[4].weight.grad = None

    def accumulate() -> None:
        with model.no_sync():
            squares(model, whole_numbers(1, 5, 3)[rank.rank]).backward()

    def step_of_optimizer() -> None:
        model.zero_grad()

    for turn, change in enumerate((scale_one, replace_one, drop_one, accumulate, step_of_optimizer)):
        backward(model, turn + 1)
        change()
        torch.testing.assert_close(model.grad_norm(), torch_norm(model), rtol=1e-6, atol=0, check_dtype=False)
    model.close()


@on_two_ranks
def test_unused_parameters_and_other_dtypes(rank: RankContext) -> None:
    for view in (False, True):
        torch.manual_seed(0)
        fork = DistributedDataParallel(Fork(), gradient_as_bucket_view=view, find_unused_parameters=True)
        for turn in range(3):
            fork.zero_grad(set_to_none=turn != 1)
            left_arm(fork, whole_numbers(turn, 5, 3)[rank.rank]).backward()
            torch.testing.assert_close(fork.grad_norm(), torch_norm(fork), rtol=1e-6, atol=0, check_dtype=False)
        fork.close()
        for make, step, batch in (
            (MixedTypes, loss_itself, whole_numbers(0, 3, 2)[rank.rank]),
            (Transformer, next_token, whole_numbers(0, 3, 7, largest=10)[rank.rank].abs().long()),
        ):
            model = DistributedDataParallel(make(), gradient_as_bucket_view=view)
            for _ in range(3):
                model.zero_grad()
                step(model, batch).backward()
                real = [torch.view_as_real(p.grad) if p.is_complex() else p.grad for p in model.parameters() if p.grad is not None]
                expected = torch.nn.utils.get_total_norm([g.double() for g in real])
                torch.testing.assert_close(model.grad_norm(), expected, rtol=3e-6, atol=0, check_dtype=False)
            model.close()


@on_two_ranks
def test_clipping_is_torchs(rank: RankContext) -> None:
    for view in (False, True):
        torch.manual_seed(0)
        ours = DistributedDataParallel(chain(), gradient_as_bucket_view=view)
        for turn, max_norm in enumerate((1e9, 1.0, 1e-3, 10.0)):
            backward(ours, turn)
            before = [p.grad.clone() for p in ours.parameters()]
            norm = ours.clip_grad_norm_(max_norm)
            expected = torch.nn.utils.get_total_norm([g.double() for g in before])
            torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0, check_dtype=False)
            factor = min(1.0, max_norm / (float(expected) + 1e-6))
            for parameter, gradient in zip(ours.parameters(), before, strict=True):
                torch.testing.assert_close(parameter.grad, gradient * factor)
                if factor == 1:
                    assert torch.equal(parameter.grad, gradient)
        ours.close()


@on_two_ranks
def test_not_finite(rank: RankContext) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(chain())
    for turn in range(2):
        model.zero_grad()
        batch = whole_numbers(turn, 5, 3)[rank.rank]
        squares(model, batch * float("inf") if rank.rank == 1 else batch).backward()
        before = [p.grad.clone() for p in model.parameters()]
        with pytest.raises(NonFiniteGradientError, match="values are not finite"):
            model.clip_grad_norm_(1.0, error_if_nonfinite=True)
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0, equal_nan=True)
        assert not model.grad_norm().isfinite()
    model.close()
