"""Copies: deepcopy, pickle, state dict."""

from __future__ import annotations

import copy
import io

import torch

from ddpcomm import DistributedDataParallel
from tests.ddp.models import Fork, both_arms
from tests.ddp.on_ranks import on_two_ranks, same_on_all_ranks
from tests.ddp.oracle import Trial, build, gradients, whole_numbers
from tests.ranks import RankContext


@on_two_ranks
def test_deep_copy_trains_by_itself(rank: RankContext) -> None:
    trial = Trial(rank, Fork)
    trial.step(both_arms, whole_numbers(1, 5, 3))
    before = {name: value.clone() for name, value in gradients(trial.module).items() if value is not None}
    twin = copy.deepcopy(trial.ddp)
    other = Trial(rank, Fork)
    other.ddp = twin
    for turn in range(2):
        other.step(both_arms, whole_numbers(2 + turn, 5, 3))
    assert all(torch.equal(before[name], value) for name, value in gradients(trial.module).items() if value is not None)
    trial.step(both_arms, whole_numbers(4, 5, 3))


@on_two_ranks
def test_deep_copy_on_one_rank_alone_waits_for_nobody(rank: RankContext) -> None:
    trial = Trial(rank, Fork)
    trial.step(both_arms, whole_numbers(1, 5, 3))
    if rank.rank == 0:
        twin = copy.deepcopy(trial.ddp)
        with torch.no_grad():
            twin(whole_numbers(2, 5, 3)[0])
    trial.step(both_arms, whole_numbers(3, 5, 3))


@on_two_ranks
def test_saved_and_loaded_whole(rank: RankContext) -> None:
    ddp = DistributedDataParallel(build(Fork))
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    both_arms(loaded, whole_numbers(1, 5, 3)[rank.rank]).backward()
    same_on_all_ranks([p.grad.tolist() for p in loaded.parameters()])


@on_two_ranks
def test_state_dict_has_the_prefix(rank: RankContext) -> None:
    ddp = DistributedDataParallel(build(Fork))
    state = ddp.state_dict()
    assert all(name.startswith("module.") for name in state)
    Fork().load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
