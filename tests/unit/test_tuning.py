"""The search of boundaries against all there are, and plans that are saved and loaded."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpcomm.bucket_search import best_ends
from ddpcomm.cost_model import CostModel, LinearCost, MeasuredCost
from ddpcomm.errors import PlanError
from ddpcomm.layout import Caps, ParameterSize, assign
from ddpcomm.simulate import Exchange, StepProfile, simulate
from ddpcomm.tuning import Plan, choose
from ddpcomm.workloads import WORKLOADS

lines = st.builds(LinearCost, st.sampled_from([1e-6, 2e-5, 1e-4]), st.sampled_from([1e9, 5e9]))
pieces = st.lists(st.floats(1e-6, 1e-3), min_size=3, max_size=3).map(
    lambda times: MeasuredCost(tuple(zip((0, 200_000, 1_000_000), times, strict=True)))
)
parameters = st.tuples(st.integers(1, 200_000), st.sampled_from([0.0, 1e-4, 3e-4, 1e-3]) | st.floats(0, 1e-3))
profiles = st.lists(parameters, min_size=1, max_size=7).map(
    lambda found: StepProfile(tuple(ParameterSize(numel, 4, "a") for numel, _ in found), tuple(ready for _, ready in found), 1e-3)
)


def end(profile: StepProfile, ends: frozenset[int], exchange: Exchange) -> float:
    return simulate(profile, Caps((1,), ends), exchange).backward_seconds


@settings(max_examples=120, deadline=None)
@given(profiles, lines | pieces, st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.sampled_from([0.0, 1e-5]), st.sampled_from([1e9, 1e12]))
def test_no_boundaries_are_better(
    profile: StepProfile, cost: CostModel, contention: float, bucket_seconds: float, flatten_bytes_per_second: float
) -> None:
    """Against every way to cut the ready order, each simulated; a nanosecond for each time that is rounded."""
    exchange = Exchange(cost, 1, contention, bucket_seconds, flatten_bytes_per_second)
    order = profile.order
    best = min(end(profile, frozenset(cut), exchange) for count in range(len(order)) for cut in combinations(order[:-1], count))
    assert end(profile, best_ends(profile, exchange), exchange) <= best + 5e-9 * len(order)


@settings(max_examples=50, deadline=None)
@given(profiles, lines, st.floats(0.0, 0.2))
def test_slack_buys_larger_buckets_at_its_price(profile: StepProfile, cost: CostModel, slack: float) -> None:
    exchange = Exchange(cost)
    exact, slackened = best_ends(profile, exchange), best_ends(profile, exchange, slack=slack)
    assert end(profile, slackened, exchange) <= end(profile, exact, exchange) * (1 + slack) + 1e-7


def test_equally_good_means_large_buckets() -> None:
    """All can hide behind the long rest of backward but the last gradient, which is tiny: two buckets."""
    sizes = tuple(ParameterSize(numel, 4, "a") for numel in (1, 1000, 1000, 1000))
    profile = StepProfile(sizes, (1.0, 0.03, 0.02, 0.01), 1.0)
    ends = best_ends(profile, Exchange(LinearCost(1e-4, 1e6)))
    assert ends == {1, 0}


def test_several_kinds_are_better_than_one_bucket_each() -> None:
    sizes = tuple(ParameterSize(100_000, 4 if index % 2 else 2, "single" if index % 2 else "half") for index in range(8))
    profile = StepProfile(sizes, tuple((8 - index) * 1e-3 for index in range(8)), 8e-3)
    exchange = Exchange(LinearCost(1e-5, 1e9))
    ends = best_ends(profile, exchange)
    assert end(profile, ends, exchange) < end(profile, frozenset(), exchange)


def test_more_parameters_than_are_taken_apart() -> None:
    """10,000 small ones: their runs stay together, and the result is still better than the default."""
    profile = StepProfile((ParameterSize(1000, 4, "a"),) * 10_000, tuple(1e-5 * (10_000 - index) for index in range(10_000)), 0.1)
    exchange = Exchange(LinearCost(1e-4, 1e9))
    ends = best_ends(profile, exchange, most_atoms=64)
    assert end(profile, ends, exchange) < simulate(profile, Caps.of_mb(None), exchange).backward_seconds


def test_no_parameters_no_ends() -> None:
    assert best_ends(StepProfile((), (), 1.0), Exchange(LinearCost(1.0, 1.0))) == frozenset()


# ---- plans ----------------------------------------------------------------------------------------------------------

NAMES = tuple((f"layer{index}.weight", "[1000, 100] torch.float32 with strides [100, 1]") for index in range(6))
PROFILE = StepProfile((ParameterSize(100_000, 4, "a"),) * 6, (6e-3, 5e-3, 4e-3, 3e-3, 2e-3, 1e-3), 6e-3)
EXCHANGE = Exchange(MeasuredCost(((0, 1e-4), (1 << 20, 1e-3))), contention=0.25)


def test_a_plan_lays_out_what_was_predicted() -> None:
    made = choose(NAMES, PROFILE, EXCHANGE)
    caps = made.caps([name for name, _ in NAMES])
    order = [[name for name, _ in NAMES].index(name) for name in made.order]
    found = simulate(PROFILE, caps, EXCHANGE, order)
    assert found.backward_seconds == made.predicted_seconds
    assert len(found.buckets) == len(made.ends)
    assert made.predicted_seconds <= made.default_seconds
    assert f"{len(made.ends)} buckets over 1 communicator:" in made.summary()


def test_plans_are_equal_on_all_ranks(tmp_path: Path) -> None:
    """The same inputs give the same file, byte for byte."""
    paths = [tmp_path / "first.json", tmp_path / "second.json"]
    for path in paths:
        choose(NAMES, PROFILE, EXCHANGE, (1, 2, 4)).save(path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_saved_plan_comes_back(tmp_path: Path) -> None:
    made = choose(NAMES, PROFILE, EXCHANGE)
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == made
    loaded.check(NAMES)


def test_any_cost_model_can_be_saved() -> None:
    line = LinearCost(1e-4, 1e9)
    made = choose(NAMES, PROFILE, Exchange(line))
    for size in (0, 5000, 400_000, 2_400_000):
        assert made.cost.seconds(size) == pytest.approx(line.seconds(size))


def test_communicators_must_save_something() -> None:
    """Latency that is half of every all-reduce is worth a second communicator; none at all isn't."""
    dear, cheap = (Exchange(MeasuredCost(((0, latency), (400_000, latency + 2e-3)))) for latency in (2e-3, 1e-12))
    assert choose(NAMES, PROFILE, dear, (1, 2)).communicators == 2
    assert choose(NAMES, PROFILE, cheap, (1, 2)).communicators == 1
    with pytest.raises(PlanError, match="number of communicators"):
        choose(NAMES, PROFILE, cheap, ())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (NAMES[:-1], r"layer5\.weight is in the plan only"),
        ((*NAMES, ("head", "[1]")), "head is in the model only"),
        ((*NAMES[:2], ("other", NAMES[2][1]), *NAMES[3:]), r"parameter 2 is layer2\.weight, the model's is other"),
        ((*NAMES[:4], ("layer4.weight", "[3] torch.float32"), NAMES[5]), r"layer4\.weight is \[1000, 100\].* in the plan, \[3\]"),
    ],
)
def test_a_plan_for_another_model(other: tuple[tuple[str, str], ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        choose(NAMES, PROFILE, EXCHANGE).check(other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "of version 1 is expected, this is of version 99"),
        ({"ends": None}, "damaged: TypeError"),
        ({"ends": ["stranger"]}, "damaged: stranger is none of its parameters"),
        ({"cost_model": {"points": []}}, "damaged: ConfigurationError"),
    ],
)
def test_damaged_plans(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(choose(NAMES, PROFILE, EXCHANGE).to_json() | change))
    with pytest.raises(PlanError, match=message):
        Plan.load(path)


def test_files_that_hold_no_plan(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not json")
    (tmp_path / "list").write_text("[]")
    for name in ("text", "list", "nothing"):
        with pytest.raises(PlanError):
            Plan.load(tmp_path / name)


def test_a_real_models_plan_is_better_than_the_default() -> None:
    profile = WORKLOADS["resnet50"]().profile(0.1)
    names = [(f"p{index}", str(shape)) for index, shape in enumerate(WORKLOADS["resnet50"]().shapes)]
    made = choose(names, profile, Exchange(LinearCost(1e-4, 2e9)))
    assert made.predicted_seconds < made.default_seconds
    buckets = assign(profile.sizes, profile.order, made.caps([name for name, _ in names]))
    assert len(buckets) == len(made.ends)
