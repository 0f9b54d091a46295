"""Gradients that are not finite: found on all ranks alike, named, and without any effect on weights and optimizers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from ddpcomm import DistributedDataParallel, nonfinite
from ddpcomm.errors import ConfigurationError, NonFiniteGradientError, RankMismatchError
from tests.ddp.models import Fork, chain
from tests.ddp.on_ranks import on_two_ranks, same_on_all_ranks
from tests.ddp.oracle import BUCKETS_AND_VIEWS, TINY_BUCKETS_MB, build, raises_everywhere, whole_numbers
from tests.ranks import RankContext

pytestmark = pytest.mark.timeout(120)

TRANSPORTS = ["shared_memory", "process_group"]


def wrap(model: nn.Module, choice: str, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, nonfinite=choice, **options)  # type: ignore[arg-type]


def spoil(parameter: Tensor, value: float, place: int = 0) -> Any:
    """From now on the parameter's gradient has a `value` at a place of it; returns the hook's handle."""

    def hook(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[place] = value
        return gradient

    return parameter.register_hook(hook)  # type: ignore[no-untyped-call]


def backward(ddp: nn.Module, rank: int, turn: int) -> None:
    ddp(whole_numbers(turn, 4, 3)[rank]).pow(2).sum().backward()


def gradients(model: nn.Module) -> list[list[float] | None]:
    return [None if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()]


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_two_ranks
def test_raise_names_parameter_and_rank_on_every_rank(rank: RankContext, transport: str) -> None:
    for options in BUCKETS_AND_VIEWS:
        for value, kind in ((float("nan"), "nan"), (float("-inf"), "inf")):
            ddp = wrap(build(chain), "raise", transport=transport, **options)
            reference = DistributedDataParallel(build(chain), transport=transport, **options)
            for turn in range(3):
                backward(ddp, rank.rank, turn)
                handle = spoil(ddp.module[2].weight, value) if rank.rank == 1 else None
                ddp.zero_grad()
                with raises_everywhere(NonFiniteGradientError, f"2.weight on rank 1 ({kind}, bucket"):
                    backward(ddp, rank.rank, 7)
                assert set(ddp.unsynchronized_parameters()) == {name for name, _ in ddp.module.named_parameters()}
                if handle is not None:
                    handle.remove()
                for model in (ddp, reference):
                    model.zero_grad()
                    backward(model, rank.rank, turn + 10)
                assert gradients(ddp) == gradients(reference)
                assert not ddp.unsynchronized_parameters()
                ddp.zero_grad()


@on_two_ranks
def test_large_gradients_are_looked_at_as_a_whole(rank: RankContext) -> None:
    """Over shared memory a rank's own share of them is not copied into the bucket otherwise."""
    for view in (False, True):
        ddp = wrap(nn.Linear(512, 256), "raise", transport="shared_memory", gradient_as_bucket_view=view)
        for culprit in (0, 1):
            for place in (0, 512 * 256 - 1):
                handle = spoil(ddp.module.weight, float("nan"), place) if rank.rank == culprit else None
                with raises_everywhere(NonFiniteGradientError, f"weight on rank {culprit} (nan"):
                    ddp(torch.ones(2, 512)).sum().backward()
                if handle is not None:
                    handle.remove()
                ddp.zero_grad()


MAKE_OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [
    functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.1),
    functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.1, foreach=True),
    functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, fused=True),
]


@on_two_ranks
def test_skip_leaves_weights_and_optimizer_untouched(rank: RankContext) -> None:
    for options in BUCKETS_AND_VIEWS:
        for make in MAKE_OPTIMIZERS:
            ddp, reference = wrap(build(chain), "skip", **options), DistributedDataParallel(build(chain), **options)
            optimizer, other = make(ddp.parameters()), make(reference.parameters())
            for turn in range(4):
                if turn in (0, 2):  # the very first backward among them, in which the ranks learn the order
                    handle = spoil(ddp.module[0].bias, float("inf")) if rank.rank == 0 else None
                    before = copy.deepcopy((ddp.module.state_dict(), optimizer.state_dict()))
                    backward(ddp, rank.rank, 20 + turn)
                    assert gradients(ddp) == [None] * 6
                    optimizer.step()
                    if handle is not None:
                        handle.remove()
                    torch.testing.assert_close((ddp.module.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
                    assert ddp.grad_norm() == 0
                for model, step in ((ddp, optimizer), (reference, other)):
                    step.zero_grad()
                    backward(model, rank.rank, turn)
                    step.step()
            assert all(torch.equal(a, b) for a, b in zip(ddp.parameters(), reference.parameters(), strict=True))
            assert ddp.stats().nonfinite_steps == 2


@on_two_ranks
def test_overflow_of_the_sum_alone(rank: RankContext) -> None:
    """Every rank's gradient is finite, their sum is not; here because nothing divides it."""
    for transport in TRANSPORTS:
        ddp = wrap(nn.Linear(2, 1, bias=False), "raise", transport=transport)
        for _ in range(2):
            loss = ddp(torch.full((1, 2), 3e38)).sum()
            ddp._reducer.divisor = 1.0
            with raises_everywhere(NonFiniteGradientError, "weight (inf, bucket 0), which came from the sum itself"):
                loss.backward()
            assert ddp.module.weight.grad.isfinite().all()
            ddp.zero_grad()
        ddp(torch.ones(1, 2)).sum().backward()
        assert ddp.module.weight.grad.tolist() == [[1, 1]]


@on_two_ranks
def test_ignore_looks_at_nothing(rank: RankContext) -> None:
    ddp = DistributedDataParallel(build(chain))
    if rank.rank == 0:
        spoil(ddp.module[2].weight, float("nan"))
    with mock.patch("ddpcomm.buckets.Bucket.count_nonfinite", side_effect=AssertionError):
        backward(ddp, rank.rank, 0)
    assert ddp.module[2].weight.grad.view(-1)[0].isnan()


@on_two_ranks
def test_communication_hooks(rank: RankContext) -> None:
    for value in (float("nan"), 1e30):  # the second one is finite until the hook makes 16 bits of it
        ddp = wrap(build(chain), "raise", bucket_cap_mb=TINY_BUCKETS_MB)
        ddp.register_comm_hook(None, fp16_compress_hook)
        backward(ddp, rank.rank, 0)
        ddp.zero_grad()
        handle = spoil(ddp.module[2].weight, value) if rank.rank == 1 else None
        with raises_everywhere(NonFiniteGradientError, "2.weight on rank 1 (nan" if value != value else "2.weight on rank 0 (inf"):
            backward(ddp, rank.rank, 0)
        if handle is not None:
            handle.remove()
        ddp.zero_grad()
        backward(ddp, rank.rank, 0)


@on_two_ranks
def test_accumulated_without_synchronisation(rank: RankContext) -> None:
    for view in (False, True):
        ddp = wrap(build(chain), "skip", gradient_as_bucket_view=view)
        for turn in range(2):
            handle = spoil(ddp.module[4].bias, float("inf")) if rank.rank == 1 else None
            with ddp.no_sync():
                backward(ddp, rank.rank, turn)
            if handle is not None:
                handle.remove()
                assert ddp.module[4].bias.grad.isinf().any()
            backward(ddp, rank.rank, turn)
            assert gradients(ddp) == [None] * 6
        assert ddp.stats().nonfinite_steps == 2


@on_two_ranks
def test_unused_replaced_and_sparse_parameters(rank: RankContext) -> None:
    fork = wrap(build(Fork), "skip", find_unused_parameters=True)
    for turn in range(2):
        handle = spoil(fork.module.left.weight, float("nan")) if rank.rank == 1 else None
        fork(whole_numbers(turn, 4, 3)[rank.rank], "right" if rank.rank == 0 else "left").backward()
        assert gradients(fork) == [None] * 6
        if handle is not None:
            handle.remove()
    replaced = wrap(build(chain), "raise")
    backward(replaced, rank.rank, 0)
    replaced.module[2] = nn.Linear(5, 4)
    handle = spoil(replaced.module[2].weight, float("nan")) if rank.rank == 0 else None
    with raises_everywhere(NonFiniteGradientError, "2.weight on rank 0 (nan"):
        backward(replaced, rank.rank, 0)
    if handle is not None:
        handle.remove()
    replaced.zero_grad()
    backward(replaced, rank.rank, 0)
    sparse = wrap(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1)), "raise")
    for _ in range(2):
        scale = float("inf") if rank.rank == 1 else 1.0
        with raises_everywhere(NonFiniteGradientError, "0.weight on rank 1 ("):
            (sparse.module[0](torch.tensor([1, 3])) * scale).sum().add(sparse(torch.tensor([1, 3])).sum()).backward()
        sparse.zero_grad()
    sparse(torch.tensor([1, 3])).sum().backward()


@on_two_ranks
def test_uneven_inputs(rank: RankContext) -> None:
    ddp = wrap(build(chain), "skip")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with ddp.join():
        for turn in range(2 + 2 * rank.rank):
            handle = spoil(ddp.module[0].weight, float("nan")) if turn in (1, 2) and rank.rank == 1 else None
            optimizer.zero_grad()
            backward(ddp, rank.rank, turn)
            optimizer.step()
            if handle is not None:
                handle.remove()
    assert same_on_all_ranks(ddp.stats().nonfinite_steps) == 2
    assert same_on_all_ranks([p.tolist() for p in ddp.parameters()])


@on_two_ranks
def test_figures_that_stay_on_a_device(rank: RankContext) -> None:
    with mock.patch("ddpcomm.reducer.Screen", side_effect=lambda _: nonfinite.Screen(at_once=False)):
        for options in BUCKETS_AND_VIEWS:
            ddp = wrap(build(chain), "raise", **options)
            backward(ddp, rank.rank, 0)
            ddp.zero_grad()
            handle = spoil(ddp.module[2].weight, float("nan")) if rank.rank == 1 else None
            with raises_everywhere(NonFiniteGradientError, "2.weight on rank 1 (nan"):
                backward(ddp, rank.rank, 1)
            if handle is not None:
                handle.remove()
            ddp.zero_grad()
            backward(ddp, rank.rank, 2)


@on_two_ranks
def test_user_hooks_and_optimizers_within_backward_are_not_called(rank: RankContext) -> None:
    ddp = wrap(build(chain), "skip")
    called: list[Sequence[int]] = []
    ddp.module[0].weight.register_post_accumulate_grad_hook(lambda p: called.append(p.shape))
    backward(ddp, rank.rank, 0)
    if rank.rank == 0:
        spoil(ddp.module[4].weight, float("nan"))
    backward(ddp, rank.rank, 0)
    assert len(called) == 1


@on_two_ranks
def test_beside_torchs_scaler(rank: RankContext) -> None:
    """With "ignore" the scaler skips by itself, alike on all ranks; with "skip" it has nothing to look at, and says so."""
    for choice in ("ignore", "skip"):
        ddp = wrap(build(chain), choice)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # type: ignore[attr-defined]
        if rank.rank == 0:
            spoil(ddp.module[2].weight, float("inf"))
        before = [p.tolist() for p in ddp.parameters()]
        scaler.scale(ddp(whole_numbers(0, 4, 3)[rank.rank]).sum()).backward()
        if choice == "ignore":
            scaler.step(optimizer)
            scaler.update()
            assert same_on_all_ranks(scaler.get_scale()) == 2.0
        else:
            with pytest.raises(AssertionError, match="No inf checks"):
                scaler.step(optimizer)
        assert [p.tolist() for p in ddp.parameters()] == before


@on_two_ranks
def test_the_choice_is_checked(rank: RankContext) -> None:
    with pytest.raises(ConfigurationError, match="nonfinite must be"):
        wrap(nn.Linear(2, 2), "mend")
    with raises_everywhere(RankMismatchError, "nonfinite"):
        wrap(nn.Linear(2, 2), "skip" if rank.rank else "raise")
