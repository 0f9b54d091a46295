"""The example end to end on two ranks: bit for bit with torch's DDP, and what it writes can be used."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from examples import train_gpt
from examples.model import GPT, GPTConfig, generate
from examples.report import CHECKPOINT, LOSS_CURVE, SUMMARY, comparison, load_checkpoint
from examples.training import Replica, Settings, earliest, learning_rate_factor, same_weights
from tests.ranks import RankContext, RankPool

pytestmark = pytest.mark.timeout(300)

# A small bucket makes several of them even in this small model.
SMALL = shlex.split("--steps 200 --batch-size 4 --context 32 --width 48 --heads 3 --layers 2 --validations 4 --bucket-cap-mb 0.05")


def run_example(context: RankContext, arguments: list[str]) -> None:
    train_gpt.run(train_gpt.parse_arguments(arguments), torch.device("cpu"))


@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
def test_200_steps_are_bit_identical_with_torch(two_ranks: RankPool, tmp_path: Path, gradient_as_bucket_view: bool) -> None:
    view = ["--gradient-as-bucket-view"] if gradient_as_bucket_view else []
    two_ranks.run(run_example, [*SMALL, *view, "--compare", "--output", str(tmp_path)])
    summary = json.loads((tmp_path / SUMMARY).read_text())
    assert summary["bit_identical"]
    assert summary["steps"] == 200
    losses = list(summary["validation_bits_per_byte"].values())
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    assert set(summary["median_step_seconds"]) == {"ddpcomm", "torch"}
    assert any("bit-identical after each of 200 steps" in line for line in comparison(summary))

    model = load_checkpoint(tmp_path / CHECKPOINT)
    assert set(model.state_dict()) == set(GPT(model.config).state_dict())
    assert (tmp_path / LOSS_CURVE).read_bytes().startswith(b"\x89PNG")
    assert generate(model, b"def ", 20).startswith("def ")
    assert generate(model, b"def ", 20) == generate(model, b"def ", 20)


def find_a_difference(context: RankContext) -> list[int | None]:
    """Each rank's answer when a weight differs on rank 1 alone, then when none does."""
    replicas = [Replica(str(number), nn.Linear(3, 3), Settings()) for number in range(2)]
    replicas[1].wrapped.load_state_dict(replicas[0].wrapped.state_dict())
    answers = [None if same_weights(*replicas) else 0]
    if context.rank == 1:
        with torch.no_grad():
            replicas[1].wrapped.weight[1, 1].nextafter_(torch.tensor(9.0))
    answers.append(None if same_weights(*replicas) else 7)
    return [earliest(answer, 10, torch.device("cpu")) for answer in answers]


def test_a_difference_of_one_bit_on_one_rank_is_seen_by_all(two_ranks: RankPool) -> None:
    assert two_ranks.run(find_a_difference) == [[None, 7], [None, 7]]


def test_equal_nans_are_the_same_and_zeros_of_different_sign_are_not() -> None:
    replicas = [Replica(str(number), nn.Linear(1, 2, bias=False), Settings()) for number in range(2)]
    for replica, values in zip(replicas, ([float("nan"), 0.0], [float("nan"), -0.0]), strict=True):
        replica.wrapped.weight.data.copy_(torch.tensor(values)[:, None])
    assert same_weights(replicas[0], replicas[0])
    assert not same_weights(*replicas)


def test_the_learning_rate_warms_up_and_decays() -> None:
    settings = Settings(steps=100, warmup_steps=10)
    factors = [learning_rate_factor(step, settings) for step in range(100)]
    assert factors[:3] == [0.1, 0.2, 0.3]
    assert max(factors) == factors[10] == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert 0.1 <= factors[-1] < 0.11


def test_the_default_model_has_one_to_three_million_parameters() -> None:
    assert 1e6 < sum(parameter.numel() for parameter in GPT(GPTConfig()).parameters()) < 3e6


def test_the_model_does_not_see_the_future() -> None:
    model = GPT(GPTConfig(context=16, width=32, heads=2, layers=2))
    text = torch.randint(0, 256, (1, 16))
    changed = text.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    one, other = model(text), model(changed)
    torch.testing.assert_close(one[:, :10], other[:, :10])
    assert not torch.allclose(one[:, 10:], other[:, 10:])


def choose(context: RankContext) -> str:
    os.environ |= {"LOCAL_RANK": str(context.rank), "LOCAL_WORLD_SIZE": "2"}
    assert dist.get_backend() == "gloo"
    return train_gpt.choose_device().type


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_ranks_without_gpus_use_the_cpu(two_ranks: RankPool) -> None:
    assert two_ranks.run(choose) == ["cpu", "cpu"]
