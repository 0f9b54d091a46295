"""`bucket_cap_mb="auto"`: right gradients all along the way, one decision for all ranks, and plans that come back."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddpcomm.all_reduce_times
import ddpcomm.auto_tuning
from ddpcomm import DistributedDataParallel
from ddpcomm.errors import BackwardInterruptedError, ConfigurationError, DDPCommError, PlanError
from ddpcomm.tuning import Plan
from tests.ddp.models import Fork, both_arms, chain, left_arm, right_arm, squares
from tests.ddp.on_ranks import on_two_ranks, same_on_all_ranks
from tests.ddp.oracle import Trial, build, no_sync, whole_numbers
from tests.ranks import RankContext

BACKWARDS = 4 + 5 + 5 + 24
ALWAYS, NEVER = -1e9, 2.0
"""The least gain at which a plan is kept: any, or more than there can be."""


def buckets(ddp: DistributedDataParallel) -> list[list[str]]:
    return [[member.name for member in bucket.members] for bucket in ddp._reducer.arrangement.buckets]


def cut_everywhere(patch: pytest.MonkeyPatch, least_gain: float) -> None:
    """The plan is a bucket for each parameter, whatever was measured."""
    choose = ddpcomm.auto_tuning.choose

    def one_each(*arguments: Any, **options: Any) -> Plan:
        plan = choose(*arguments, **options)
        return Plan(**{**vars(plan), "ends": plan.order})

    patch.setattr(ddpcomm.auto_tuning, "choose", one_each)
    patch.setattr(ddpcomm.auto_tuning, "_LEAST_GAIN", least_gain)


@on_two_ranks
def gradients_are_right(rank: RankContext, view: bool, kept: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cut_everywhere(patch, ALWAYS if kept else NEVER)
        trial = Trial(rank, chain, bucket_cap_mb="auto", gradient_as_bucket_view=view, transport="shared_memory")
        seen = set()
        for step in range(BACKWARDS + 2):
            trial.step(squares, whole_numbers(step, 4, 3))
            seen.add(len(buckets(trial.ddp)))
        assert seen == {1, 6}
        assert trial.ddp._reducer.tuner is None
        assert len(same_on_all_ranks(buckets(trial.ddp))) == (6 if kept else 1)
        assert (trial.ddp.plan is not None) == kept


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("kept", [False, True], ids=["default", "plan"])
def test_gradients_are_right(two_ranks, view: bool, kept: bool) -> None:  # type: ignore[no-untyped-def]
    gradients_are_right(two_ranks, view=view, kept=kept)


@on_two_ranks
def test_the_ranks_decide_alike_and_say_so_once(rank: RankContext) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("ddpcomm.auto_tuning")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        trial = Trial(rank, lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)], nn.Linear(64, 2)), bucket_cap_mb="auto")
        for step in range(BACKWARDS + 1):
            squares(trial.ddp, whole_numbers(step, 2, 64)[rank.rank]).backward()
            trial.ddp.zero_grad()
        assert trial.ddp._reducer.tuner is None
        same_on_all_ranks((buckets(trial.ddp), trial.ddp.plan))
        assert len(lines) == (1 if rank.rank == 0 else 0)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


@on_two_ranks
def a_saved_plan_comes_back(rank: RankContext, directory: str) -> None:
    path = Path(directory) / "plan.json"
    with pytest.MonkeyPatch.context() as patch:
        cut_everywhere(patch, ALWAYS)
        trial = Trial(rank, chain, bucket_cap_mb="auto")
        with pytest.raises(PlanError, match="tuning has not ended"):
            trial.ddp.save_plan(path)
        for step in range(BACKWARDS):
            trial.step(squares, whole_numbers(step, 4, 3))
    if rank.rank == 0:
        trial.ddp.save_plan(path)
    same_on_all_ranks(None)
    again = Trial(rank, chain, plan=path)
    for step in range(2):
        again.step(squares, whole_numbers(step, 4, 3))
    assert same_on_all_ranks(buckets(again.ddp)) == buckets(trial.ddp)
    assert again.ddp._reducer.tuner is None
    with pytest.raises(PlanError, match=r"the plan is for another model: its parameter 0 is 0\.weight, the model's is trunk\.weight"):
        DistributedDataParallel(build(Fork), plan=path)
    with pytest.raises(DDPCommError, match=r"rank 1: .*can't be read as a plan"):  # both hear of it
        DistributedDataParallel(build(chain), plan=path if rank.rank == 0 else path.with_name("missing.json"))
    with pytest.raises(ConfigurationError, match="plan"):
        DistributedDataParallel(build(chain), plan=path, bucket_cap_mb=5)
    with pytest.raises(PlanError, match="no plan to save"):
        DistributedDataParallel(build(chain)).save_plan(path)


def test_a_saved_plan_comes_back(two_ranks, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    a_saved_plan_comes_back(two_ranks, directory=str(tmp_path))


@on_two_ranks
def test_accumulation_and_unused_parameters_while_tuning(rank: RankContext) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cut_everywhere(patch, ALWAYS)
        trial = Trial(rank, Fork, bucket_cap_mb="auto", find_unused_parameters=True)

        def accumulated(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            with no_sync(model):
                both_arms(model, x).backward()
            return left_arm(model, x)

        for step in range(BACKWARDS + 3):
            trial.step((both_arms, left_arm, accumulated, right_arm)[step % 4], whole_numbers(step, 2, 3))
        assert trial.ddp._reducer.tuner is None
        assert len(same_on_all_ranks(buckets(trial.ddp))) == 6


@on_two_ranks
def test_a_rank_that_runs_out_of_input_while_tuning(rank: RankContext) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cut_everywhere(patch, ALWAYS)
        ddp = DistributedDataParallel(build(chain), bucket_cap_mb="auto")
        for _ in range(2):
            with ddp.join():
                for step in range(12 if rank.rank == 0 else 7):
                    squares(ddp, whole_numbers(step, 4, 3)[rank.rank]).backward()
                    ddp.zero_grad()
        for step in range(BACKWARDS):
            squares(ddp, whole_numbers(step, 4, 3)[rank.rank]).backward()
            ddp.zero_grad()
        assert ddp._reducer.tuner is None
        assert len(same_on_all_ranks(buckets(ddp))) == 6


@on_two_ranks
def test_an_interrupted_backward_while_tuning(rank: RankContext) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ValueError("on purpose")

    with pytest.MonkeyPatch.context() as patch:
        cut_everywhere(patch, ALWAYS)
        trial = Trial(rank, chain, bucket_cap_mb="auto")
        for step in range(BACKWARDS + 4):
            if step % 7 == 6:
                out = squares(trial.ddp, whole_numbers(step, 4, 3)[rank.rank])
                handle = trial.ddp.module[2].weight.register_hook(fail) if rank.rank == 1 else None
                with pytest.raises(ValueError if handle else BackwardInterruptedError):
                    out.backward()
                if handle:
                    handle.remove()
                trial.ddp.zero_grad()
            trial.step(squares, whole_numbers(step, 4, 3))
        assert trial.ddp._reducer.tuner is None
        assert len(same_on_all_ranks(buckets(trial.ddp))) == 6


@on_two_ranks
def test_communication_hooks_keep_their_buckets(rank: RankContext) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    trial = Trial(rank, chain, bucket_cap_mb="auto")
    trial.ddp.register_comm_hook(None, allreduce_hook)
    for step in range(6):
        trial.step(squares, whole_numbers(step, 4, 3))
    assert trial.ddp._reducer.tuner is None
    assert trial.ddp.plan is None


@on_two_ranks
def test_a_rank_without_memory_for_the_largest_all_reduce(rank: RankContext) -> None:
    with pytest.MonkeyPatch.context() as patch:
        ddp = DistributedDataParallel(build(chain))
        make = ddp._communicator.empty

        def empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
            if rank.rank == 1 and numel > 25_000:
                raise RuntimeError("can't allocate memory")  # as torch's allocators do
            return make(numel, dtype)

        patch.setattr(ddp._communicator, "empty", empty)
        cost = ddpcomm.all_reduce_times.measure_cost(ddp._communicator, 1 << 20)
    assert [size for size, _ in same_on_all_ranks(cost.points)] == [4096, 16384, 65536]


@on_two_ranks
def test_a_rank_without_memory_for_a_copy(rank: RankContext) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cut_everywhere(patch, ALWAYS)
        trial = Trial(rank, chain, bucket_cap_mb="auto")
        zeros = torch.zeros

        def refused(*arguments: Any, **options: Any) -> torch.Tensor:
            if rank.rank == 1:
                raise RuntimeError("can't allocate memory")
            return zeros(*arguments, **options)

        patch.setattr(torch, "zeros", refused)
        copy_speed = ddpcomm.auto_tuning._copy_bytes_per_second
        assert (copy_speed(1 << 10, torch.device("cpu")) is None) == (rank.rank == 1)
        patch.setattr(torch, "zeros", zeros)
        patch.setattr(ddpcomm.auto_tuning, "_copy_bytes_per_second", lambda *_: None if rank.rank == 1 else 1e9)
        for step in range(BACKWARDS):
            trial.step(squares, whole_numbers(step, 4, 3))
        assert same_on_all_ranks((trial.ddp._reducer.tuner, trial.ddp.plan)) == (None, None)


@on_two_ranks
def test_only_one_word_is_known(rank: RankContext) -> None:
    with pytest.raises(ConfigurationError, match="bucket_cap_mb must be a number of MiB or \"auto\", got 'fast'"):
        DistributedDataParallel(build(chain), bucket_cap_mb="fast")


@on_two_ranks
def test_a_hook_that_raises_on_one_rank_while_tuning(rank: RankContext) -> None:
    """The averages are in place by then: that rank goes on counting backwards with the others."""
    with pytest.MonkeyPatch.context() as patch:
        cut_everywhere(patch, ALWAYS)
        trial = Trial(rank, chain, bucket_cap_mb="auto")

        def fail(_: torch.Tensor) -> None:
            raise ValueError("on purpose")

        for step in range(BACKWARDS + 2):
            trial.step(squares, whole_numbers(step, 4, 3))
            if step % 9 == 2 and rank.rank == 1:
                handle = trial.ddp.module[0].weight.register_post_accumulate_grad_hook(fail)
                with pytest.raises(ValueError, match="on purpose"):
                    squares(trial.ddp, whole_numbers(step, 4, 3)[1]).backward()
                handle.remove()
            elif step % 9 == 2:
                squares(trial.ddp, whole_numbers(step, 4, 3)[0]).backward()
        assert trial.ddp._reducer.tuner is None
        assert len(same_on_all_ranks(buckets(trial.ddp))) == 6


@on_two_ranks
def test_a_parameter_frozen_within_a_step_while_tuning(rank: RankContext) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cut_everywhere(patch, ALWAYS)
        ddp = DistributedDataParallel(build(chain), bucket_cap_mb="auto")
        weight = ddp.module[2].weight
        for step in range(BACKWARDS):
            loss = squares(ddp, whole_numbers(step, 4, 3)[rank.rank])
            weight.requires_grad_(step % 4 != 0)
            loss.backward()
            weight.requires_grad_(True)
            same_on_all_ranks([p.grad.tolist() for p in ddp.parameters() if p is not weight or step % 4 != 0])
            ddp.zero_grad()
        assert same_on_all_ranks(ddp._reducer.tuner) is None


@on_two_ranks
def test_another_group_starts_tuning_anew(rank: RankContext) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cut_everywhere(patch, ALWAYS)
        trial = Trial(rank, chain, bucket_cap_mb="auto", transport="process_group")
        for step in range(16):  # in a turn of the plan's
            trial.step(squares, whole_numbers(step, 4, 3))
        assert len(buckets(trial.ddp)) == 6
        trial.ddp._update_process_group(torch.distributed.new_group())
        assert len(buckets(trial.ddp)) == 1
        for step in range(BACKWARDS):
            trial.step(squares, whole_numbers(step, 4, 3))
        assert trial.ddp._reducer.tuner is None
        assert len(same_on_all_ranks(buckets(trial.ddp))) == 6
        assert trial.ddp.plan is not None


@on_two_ranks
def test_groups_that_learned_other_orders_can_be_merged(rank: RankContext) -> None:
    class AnyOrder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, swapped: bool) -> torch.Tensor:
            return self.first(self.second(x)) if swapped else self.second(self.first(x))

    alone = [torch.distributed.new_group([r]) for r in range(2)][rank.rank]
    ddp = DistributedDataParallel(build(AnyOrder), process_group=alone, bucket_cap_mb=1e-6)
    for _ in range(3):
        ddp(torch.ones(2, 3), rank.rank == 1).sum().backward()
        ddp.zero_grad()
    ddp._update_process_group(torch.distributed.group.WORLD)
    for step in range(3):
        ddp(whole_numbers(step, 2, 3)[rank.rank], False).sum().backward()
        same_on_all_ranks([p.grad.tolist() for p in ddp.parameters()])
        ddp.zero_grad()


@on_two_ranks
def test_plans_are_compared_and_copies_take_theirs_along(rank: RankContext) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cut_everywhere(patch, ALWAYS)
        trial = Trial(rank, chain, bucket_cap_mb="auto")
        for step in range(BACKWARDS):
            trial.step(squares, whole_numbers(step, 4, 3))
    plan = trial.ddp.plan
    assert plan is not None
    other = Plan(**{**vars(plan), "parameters": tuple((name, f"{what} ") for name, what in plan.parameters)})
    with pytest.raises(DDPCommError, match="option plan"):
        DistributedDataParallel(build(chain), plan=plan if rank.rank == 0 else other)
    trial.ddp.module[2].weight.requires_grad_(False)
    squares(trial.ddp, whole_numbers(0, 4, 3)[rank.rank]).backward()
    twin = copy.deepcopy(trial.ddp)
    twin.zero_grad()
    squares(twin, whole_numbers(0, 4, 3)[rank.rank]).backward()
    same_on_all_ranks([p.grad.tolist() for p in twin.parameters() if p.requires_grad])
    with pytest.raises(ConfigurationError, match="only one of them"):
        DistributedDataParallel(build(chain), bucket_cap_mb="auto", bucket_cap_mb_list=[1])


@on_two_ranks
def a_timeline_across_the_profile(rank: RankContext, directory: str) -> None:
    ddp = DistributedDataParallel(build(chain), bucket_cap_mb="auto")

    def steps(count: int) -> None:
        for step in range(count):
            squares(ddp, whole_numbers(step, 4, 3)[rank.rank]).backward()
            ddp.zero_grad()

    steps(8)
    with ddp.timeline(f"{directory}/across.json"):
        steps(3)  # the tuner's own recording begins within
    steps(3)
    with ddp.timeline(f"{directory}/after.json"):
        steps(3)
    assert ddp._reducer.timeline is None


def test_a_timeline_across_the_profile(two_ranks, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    a_timeline_across_the_profile(two_ranks, directory=str(tmp_path))
