"""What a wrapper tells of the last backward, and the guard that makes a wrong step an error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpcomm import DistributedDataParallel
from ddpcomm.errors import BackwardInterruptedError, UnsynchronizedGradientError
from tests.ddp.models import Fork, both_arms, chain, left_arm, right_arm, squares
from tests.ddp.on_ranks import on_two_ranks
from tests.ddp.oracle import BUCKETS_AND_VIEWS, build, run, whole_numbers
from tests.ranks import RankContext

NAMES = {f"{layer}.{kind}" for layer in ("trunk", "left", "right") for kind in ("weight", "bias")}


@on_two_ranks
def test_unused_parameters(rank: RankContext) -> None:
    for options in BUCKETS_AND_VIEWS:
        ddp = DistributedDataParallel(build(Fork), find_unused_parameters=True, **options)
        assert ddp.unused_parameters() == {}
        x = whole_numbers(1, 5, 3)[rank.rank]
        run(both_arms, ddp, x)
        assert ddp.unused_parameters() == {}
        run(left_arm, ddp, x)
        assert ddp.unused_parameters() == {"right.weight": "used on no rank", "right.bias": "used on no rank"}
        run(left_arm if rank.rank == 0 else both_arms, ddp, x)
        elsewhere = {"right.weight": "used on other ranks only", "right.bias": "used on other ranks only"}
        assert ddp.unused_parameters() == (elsewhere if rank.rank == 0 else {})
        with ddp.no_sync():
            run(left_arm, ddp, x)
        assert ddp.unused_parameters() == (elsewhere if rank.rank == 0 else {})  # of the last that synchronised
        run(both_arms, ddp, x)
        assert ddp.unused_parameters() == {}


@on_two_ranks
def test_unsynchronized_parameters(rank: RankContext) -> None:
    for options in BUCKETS_AND_VIEWS:
        ddp = DistributedDataParallel(build(Fork), find_unused_parameters=True, **options)
        x = whole_numbers(1, 5, 3)[rank.rank]
        assert ddp.unsynchronized_parameters() == {}
        run(both_arms, ddp, x)
        assert ddp.unsynchronized_parameters() == {}
        with ddp.no_sync():
            run(left_arm, ddp, x)
        told = ddp.unsynchronized_parameters()
        assert told.keys() == NAMES - {"right.weight", "right.bias"}
        assert all("no_sync" in reason for reason in told.values())
        ddp.module.left.bias.grad = None
        assert "left.bias" not in ddp.unsynchronized_parameters()
        run(right_arm, ddp, x)
        assert ddp.unsynchronized_parameters() == {}
        with ddp.no_sync():
            run(both_arms, ddp, x)
        ddp.zero_grad()
        assert ddp.unsynchronized_parameters() == {}


@on_two_ranks
def test_ignored_parameters(rank: RankContext) -> None:
    """They are told of, with the reason, and left alone."""
    model = build(Fork)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["left.weight"])
    ddp = DistributedDataParallel(model)
    x = whole_numbers(1, 5, 3)[rank.rank]
    run(both_arms, ddp, x)
    assert ddp.unsynchronized_parameters() == {"left.weight": "ignored by request"}
    alone = build(Fork)
    run(both_arms, alone, x)
    assert torch.equal(model.left.weight.grad, alone.left.weight.grad)


@on_two_ranks
def test_hooks_taken_off(rank: RankContext) -> None:
    """_remove_autograd_hooks: gradients stay this rank's own, by request."""
    ddp = DistributedDataParallel(build(chain))
    ddp._remove_autograd_hooks()
    alone = build(chain)
    x = whole_numbers(1, 5, 3)[rank.rank]
    for model in (ddp, alone):
        run(squares, model, x)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(ddp.parameters(), alone.parameters(), strict=True))


# ---- the guard ------------------------------------------------------------------------------------------------------


@on_two_ranks
def test_step_on_own_gradients_is_an_error(rank: RankContext) -> None:
    for options in BUCKETS_AND_VIEWS:
        ddp = DistributedDataParallel(build(Fork), error_on_unsynchronized=True, find_unused_parameters=True, **options)
        optimizer = torch.optim.SGD(ddp.parameters(), 2**-8)
        x = whole_numbers(1, 5, 3)[rank.rank]
        for _ in range(2):
            run(both_arms, ddp, x)
            optimizer.step()
            optimizer.zero_grad()
            with ddp.no_sync():
                run(left_arm, ddp, x)
            before = [p.clone() for p in ddp.parameters()]
            with pytest.raises(UnsynchronizedGradientError, match=r"SGD.*left\.weight.*no_sync"):
                optimizer.step()
            assert all(map(torch.equal, before, ddp.parameters()))
            run(right_arm, ddp, x)
            optimizer.step()
            optimizer.zero_grad()
        ddp.close()


@on_two_ranks
def test_step_after_an_interruption_is_an_error(rank: RankContext) -> None:
    ddp = DistributedDataParallel(build(Fork), error_on_unsynchronized=True)
    optimizer = torch.optim.SGD(ddp.parameters(), 2**-8)

    def fail(_: object) -> None:
        raise ValueError("fuse blown")

    x = whole_numbers(1, 5, 3)[rank.rank]
    run(both_arms, ddp, x)
    optimizer.step()
    optimizer.zero_grad()
    if rank.rank == 0:
        ddp.module.trunk.weight.register_hook(fail)
    with pytest.raises((ValueError, BackwardInterruptedError)):
        run(both_arms, ddp, x)
    with pytest.raises(UnsynchronizedGradientError, match="left"):
        optimizer.step()


@on_two_ranks
def test_others_may_step(rank: RankContext) -> None:
    """Optimizers of other parameters, and of the same ones once the guarded wrapper is closed or gone."""
    ddp = DistributedDataParallel(build(Fork), error_on_unsynchronized=True)
    other = nn.Linear(3, 2)
    x = whole_numbers(1, 5, 3)[rank.rank]
    with ddp.no_sync():
        run(both_arms, ddp, x)
    run(squares, other, x)
    torch.optim.SGD(other.parameters(), 0.1).step()
    optimizer = torch.optim.SGD(ddp.parameters(), 2**-8)
    with pytest.raises(UnsynchronizedGradientError):
        optimizer.step()
    ddp.close()
    optimizer.step()
    unguarded = DistributedDataParallel(build(Fork))
    with unguarded.no_sync():
        run(both_arms, unguarded, x)
    torch.optim.SGD(unguarded.parameters(), 2**-8).step()
