"""bench/steps.py: what is wrong is not timed; subjects take turns; the slowest rank counts."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ddpcomm
from bench import accumulation, steps
from bench.floors import AllReduceAlone, BareExchange, Wrap
from bench.models import Case
from bench.round_robin import RoundRobin, use
from bench.subjects import NONE, TORCH, AfterBackward, own_ddp, plain, torch_ddp
from ddpcomm.comm.base import Communicator, CompletedWork, ReduceOp, Work
from tests.ranks import RankContext, RankPool

CASE = Case("layers", "nothing", lambda: nn.Sequential(*[nn.Linear(40, 40) for _ in range(4)]), lambda: torch.randn(4, 40))
SMALL_MIB = 40 * 40 * 4 / 2**20


class Twice(nn.parallel.DistributedDataParallel):
    """Wrong: its gradients are twice what they should be."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        output = super().forward(*inputs, **kwargs)
        output.register_hook(lambda gradient: 2 * gradient)
        return output


class Forgetful(RoundRobin):
    """Wrong: one all-reduce is not done."""

    def __init__(self, members: list[Communicator], forgotten: int) -> None:
        super().__init__(members)
        self.calls, self.forgotten = 0, forgotten

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Work:
        self.calls += 1
        return CompletedWork() if self.calls == self.forgotten else super()._all_reduce(tensor, op)


def wrap_with_turns(module: nn.Module, transport: str, forgotten: int) -> nn.Module:
    model = own_ddp(transport, bucket_cap_mb=SMALL_MIB)(module)
    use(model, Forgetful([ddpcomm.create_communicator(dist.new_group(backend="gloo"), "cpu", transport) for _ in range(3)], forgotten))
    return model


class Unequal(AfterBackward):
    """Wrong: what ranks other than the first have differs from it."""

    def _exchange(self) -> None:
        super()._exchange()
        next(self.module.parameters()).grad[0, 0] *= 1 + 1.2e-7 * dist.get_rank()


SUBJECTS: dict[str, Wrap] = {
    "alone": partial(AllReduceAlone, transport="shared_memory"),
    "bare": partial(BareExchange, transport="shared_memory"),
    "after": partial(AfterBackward, transport="process_group"),
    "turns": partial(wrap_with_turns, transport="shared_memory", forgotten=0),
    "Gloo turns": partial(wrap_with_turns, transport="process_group", forgotten=0),
    "twice": Twice,
    "forgetful": partial(wrap_with_turns, transport="process_group", forgotten=2),
    "unequal": partial(Unequal, transport="process_group"),
}


def refusals(context: RankContext, *groups: list[str]) -> list[str]:
    """What each group of subjects is refused with; empty if it is not."""
    found = []
    for names in groups:
        wraps = {NONE: plain, TORCH: torch_ddp(), **{name: SUBJECTS[name] for name in names}}
        try:
            steps.prepare(context, CASE, wraps, warm_up_steps=1)
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found


def test_what_is_wrong_is_not_timed(two_ranks: RankPool) -> None:
    of_ranks = two_ranks.run(refusals, ["alone", "bare", "after", "turns", "Gloo turns"], ["twice"], ["alone", "forgetful"], ["unequal"])
    assert of_ranks[0] == of_ranks[1], "all ranks stop together"
    right, *wrong = of_ranks[0]
    assert right == ""
    for text, name in zip(wrong, ("twice", "forgetful", "unequal"), strict=True):
        assert re.fullmatch(f"backward [12]: {name} differs from torch in gradient [0-9] of layers", text)


def test_on_three_ranks_bits_are_compared_among_the_ranks(ranks: Callable[[int], RankPool]) -> None:
    of_ranks = ranks(3).run(refusals, ["alone", "bare", "after", "turns"], ["twice"], ["unequal"])
    wrong = [
        "backward 1: twice differs from torch in gradient 0 of layers",
        "backward 1: unequal differs from torch in gradient 0 of layers",
    ]
    assert of_ranks == [["", *wrong]] * 3


def accumulate(context: RankContext, wrong: bool) -> str:
    torch.manual_seed(0)
    model = CASE.build()
    wraps = {TORCH: torch_ddp(), "other": Twice if wrong else own_ddp("process_group")}
    try:
        accumulation.check(CASE, {name: wrap(steps.twin(model)) for name, wrap in wraps.items()}, torch.randn(4, 40), every=3)
    except ValueError as error:
        return str(error)
    return ""


def test_accumulated_gradients_are_compared(two_ranks: RankPool) -> None:
    assert two_ranks.run(accumulate, False) == [""] * 2
    assert two_ranks.run(accumulate, True) == ["other differs from torch when it synchronises every 3 steps"] * 2


def test_other_losses_than_torchs_are_refused() -> None:
    losses = {("torch", 1): [3.0, 2.0], ("ddpcomm auto", 1): [3.0, 2.5]}
    with pytest.raises(ValueError, match="ddpcomm auto, synchronising every 1 steps, has other losses"):
        accumulation.loss_rows(losses, ranks=2)


def record_turns(context: RankContext) -> list[str]:
    turns: list[str] = []
    steps.take_turns({name: partial(turns.append, name) for name in "abc"}, 4)
    return turns


def test_turns_rotate(two_ranks: RankPool) -> None:
    assert two_ranks.run(record_turns) == [list("abcbcacababc")] * 2


def test_a_step_lasts_as_long_as_on_the_slowest_rank() -> None:
    assert steps.slowest([{"a": [1.0, 5.0]}, {"a": [2.0, 3.0]}]) == {"a": [2.0, 5.0]}
