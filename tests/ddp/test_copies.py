"""Copies: deepcopy, pickle, state dictionaries, and wrappers that are thrown away."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcomm import DistributedDataParallel, hooks
from ddpcomm.errors import ConfigurationError, UnsynchronizedGradientError
from tests.ddp.models import Fork, both_arms, chain, squares
from tests.ddp.on_ranks import on_two_ranks
from tests.ddp.oracle import BUCKETS_AND_VIEWS, Trial, build, check_equal, gradients, no_sync, run, whole_numbers
from tests.ranks import RankContext


def take_over(trial: Trial, rank: RankContext, ddp: DistributedDataParallel, **options: Any) -> Trial:
    """A trial of a copy."""
    twin = Trial(rank, Fork, **options)
    twin.ddp.close()
    twin.ddp = ddp
    for replica, original in zip(twin.oracle.replicas, trial.oracle.replicas, strict=True):
        replica.load_state_dict(original.state_dict())
    return twin


@on_two_ranks
def test_deepcopy(rank: RankContext) -> None:
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Fork, **options)
        for turn in range(2):
            trial.step(both_arms, whole_numbers(turn, 5, 3))
        before = {name: p.grad.clone() for name, p in trial.module.named_parameters()}
        twin = take_over(trial, rank, copy.deepcopy(trial.ddp), **options)
        for turn in range(3):
            twin.step(both_arms, whole_numbers(turn, 5, 3))
        check_equal(gradients(trial.module), before, "the original's gradient")
        for turn in range(2):
            trial.step(both_arms, whole_numbers(turn, 5, 3))
            twin.step(both_arms, whole_numbers(turn + 5, 5, 3))


@on_two_ranks
def test_many_copies(rank: RankContext) -> None:
    """Also copies of copies, and copies of which the original is gone."""
    trial = Trial(rank, Fork)
    trial.step(both_arms, whole_numbers(1, 5, 3))
    copies = [copy.deepcopy(trial.ddp) for _ in range(5)]
    copies.append(copy.deepcopy(copies[-1]))
    trials = [take_over(trial, rank, each) for each in copies]
    del trial.ddp
    gc.collect()
    for turn in range(2):
        for each in trials:
            each.step(both_arms, whole_numbers(turn, 5, 3))


@on_two_ranks
def test_copy_between_forward_and_backward(rank: RankContext) -> None:
    trial = Trial(rank, Fork)
    batches = whole_numbers(1, 5, 3)
    loss = both_arms(trial.ddp, batches[rank.rank])
    twin = take_over(trial, rank, copy.deepcopy(trial.ddp))
    loss.backward()
    trial.oracle.step(both_arms, batches)
    trial.check()
    twin.step(both_arms, whole_numbers(2, 5, 3))


@on_two_ranks
def test_copy_takes_options_and_hook_along(rank: RankContext) -> None:
    """A copy without the original's communication hook or guard would train otherwise than it."""

    def make() -> DistributedDataParallel:
        return DistributedDataParallel(build(chain), gradient_as_bucket_view=True, error_on_unsynchronized=True)

    calls: list[int] = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        calls.append(bucket.index())
        future: torch.futures.Future[Tensor] = dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    for registered in (None, hook, hooks.bf16):
        ddp = make()
        if registered is not None:
            ddp.register_comm_hook(None, registered)
        twin = copy.deepcopy(ddp)
        assert twin.gradient_as_bucket_view
        calls.clear()
        run(squares, twin, whole_numbers(1, 2, 3, largest=1)[rank.rank])
        assert bool(calls) == (registered is hook)
        if registered is not None:
            with pytest.raises(ConfigurationError, match="once"):
                twin.register_comm_hook(None, hook)
            assert ddp._get_ddp_logging_data()["comm_hook"] == twin._get_ddp_logging_data()["comm_hook"]
        with twin.no_sync():
            run(squares, twin, torch.ones(2, 3))
        with pytest.raises(UnsynchronizedGradientError):
            torch.optim.SGD(twin.parameters(), 0.1).step()


@on_two_ranks
def test_pickle(rank: RankContext) -> None:
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Fork, **options)
        for turn in range(2):
            trial.step(both_arms, whole_numbers(turn, 5, 3))
        twin = take_over(trial, rank, pickle.loads(pickle.dumps(trial.ddp)), **options)
        for turn in range(3):
            twin.step(both_arms, whole_numbers(turn, 5, 3))
            trial.step(both_arms, whole_numbers(turn, 5, 3))


@on_two_ranks
def test_saved_and_loaded(rank: RankContext) -> None:
    """torch.save of the whole wrapper, as some trainers do."""
    trial = Trial(rank, Fork)
    trial.step(both_arms, whole_numbers(1, 5, 3))
    file = io.BytesIO()
    torch.save(trial.ddp, file)
    file.seek(0)
    twin = take_over(trial, rank, torch.load(file, weights_only=False))
    twin.step(both_arms, whole_numbers(2, 5, 3))


@on_two_ranks
def test_pickle_of_another_group_is_refused(rank: RankContext) -> None:
    group = dist.new_group([0, 1])
    ddp = DistributedDataParallel(build(chain), process_group=group)
    with pytest.raises(ConfigurationError, match="default process group"):
        pickle.dumps(ddp)
    twin = copy.deepcopy(ddp)
    assert twin.process_group is group
    run(squares, twin, whole_numbers(1, 5, 3)[rank.rank])


@on_two_ranks
def test_state_dict(rank: RankContext) -> None:
    """Keys as torch's; loads into the plain model and back."""
    trial = Trial(rank, Fork, lambda p: torch.optim.SGD(p, 2**-8))
    trial.step(both_arms, whole_numbers(1, 2, 3, largest=1))
    state = trial.ddp.state_dict()
    assert set(state) == {f"module.{name}" for name in trial.module.state_dict()}
    plain = Fork()
    plain.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
    check_equal(plain.state_dict(), trial.module.state_dict(), "weight")
    for assign in (False, True):
        other = DistributedDataParallel(build(Fork))
        run(both_arms, other, torch.ones(2, 3))
        other.load_state_dict(state, assign=assign)
        check_equal(other.state_dict(), state, "weight")
        run(both_arms, other, whole_numbers(2, 2, 3)[rank.rank])


@on_two_ranks
def test_nothing_is_kept_alive(rank: RankContext) -> None:
    """A wrapper that nobody holds is freed, and takes its hooks off the module, which trains by itself from then on."""
    for options in (*BUCKETS_AND_VIEWS, {"error_on_unsynchronized": True}, {"static_graph": True}):
        model = build(Fork)
        for turn in range(2):
            ddp = DistributedDataParallel(model, **options)
            run(both_arms, ddp, whole_numbers(turn, 5, 3)[rank.rank])
            gone = weakref.ref(ddp)
            del ddp
            gc.collect()
            assert gone() is None, options
        model.zero_grad()
        run(both_arms, model, whole_numbers(3, 5, 3)[rank.rank])
        alone = build(Fork)
        run(both_arms, alone, whole_numbers(3, 5, 3)[rank.rank])
        check_equal(gradients(model), gradients(alone), "gradient of the module alone")


@on_two_ranks
def test_closed(rank: RankContext) -> None:
    trial = Trial(rank, Fork)
    trial.step(both_arms, whole_numbers(1, 5, 3))
    trial.ddp.close()
    trial.ddp.close()
    model = trial.module
    model.zero_grad()
    run(both_arms, model, whole_numbers(3, 5, 3)[rank.rank])
    again = DistributedDataParallel(model)
    run(both_arms, again, whole_numbers(3, 5, 3)[rank.rank])


@on_two_ranks
def test_wrapped_again(rank: RankContext) -> None:
    """The module of a wrapper that is gone is wrapped anew, with gradients that are there."""
    for options in BUCKETS_AND_VIEWS:
        trial = Trial(rank, Fork, **options)
        trial.step(both_arms, whole_numbers(1, 5, 3))
        model = trial.ddp.module
        del trial.ddp
        gc.collect()
        trial.ddp = DistributedDataParallel(model, **options)
        for turn in range(2):
            trial.step(both_arms, whole_numbers(turn, 5, 3), zero_grad=False)


@on_two_ranks
def test_copies_accumulate_apart(rank: RankContext) -> None:
    def step(model: nn.Module, x: Tensor) -> None:
        with no_sync(model):
            run(both_arms, model, x)
        run(both_arms, model, x * 2)

    trial = Trial(rank, Fork)
    trial.step(step, whole_numbers(1, 5, 3))
    twin = take_over(trial, rank, copy.deepcopy(trial.ddp))
    for turn in range(2):
        twin.step(step, whole_numbers(turn, 5, 3))
        trial.step(step, whole_numbers(turn + 3, 5, 3))
