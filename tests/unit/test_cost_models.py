"""What all-reduces cost: through measured points, and by NCCL's own constants."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpcomm.collective_cost import CollectiveCost
from ddpcomm.cost_model import LinearCost, MeasuredCost
from ddpcomm.errors import ConfigurationError
from ddpcomm.machines import MACHINES, Machine, machine

MIB = 1 << 20
V100 = MACHINES["v100-one-nic"]


def test_measured_points_are_met() -> None:
    points = ((0, 1e-5), (1000, 2e-5), (10_000, 5e-5))
    cost = MeasuredCost(points)
    assert [cost.seconds(size) for size, _ in points] == [seconds for _, seconds in points]


def test_between_and_beyond_points() -> None:
    cost = MeasuredCost(((1000, 2.0), (3000, 4.0), (4000, 7.0)))
    assert cost.seconds(2000) == 3.0
    assert cost.seconds(5000) == 10.0
    assert cost.seconds(0) == 2.0


def test_noise_makes_no_larger_all_reduce_faster() -> None:
    cost = MeasuredCost(((0, 3.0), (10, 1.0), (20, 5.0), (20, 9.0), (20, 6.0)))
    assert cost.points == ((0, 3.0), (10, 3.0), (20, 6.0))


@pytest.mark.parametrize("points", [((0, 1.0),), ((5, 1.0), (5, 2.0)), ((0, 0.0), (1, 1.0)), ((-1, 1.0), (1, 1.0))])
def test_points_that_say_nothing(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ConfigurationError):
        MeasuredCost(points)


def test_a_saved_cost_comes_back() -> None:
    cost = MeasuredCost(((0, 1e-5), (1000, 2.5e-5)))
    assert MeasuredCost.from_json(json.loads(json.dumps(cost.to_json()))) == cost


def test_a_line() -> None:
    assert LinearCost(1.0, 100.0).seconds(50) == 1.5


@pytest.mark.parametrize(("ranks", "ring", "tree"), [(32, 4.77, 4.87), (256, 8.91, 4.95)])
def test_nccls_formulas(ranks: int, ring: float, tree: float) -> None:
    """25 MiB on hosts of 8 V100 with one 100 Gbit/s card: what NCCL 2.30.7's formulas come to, in milliseconds."""
    lines = CollectiveCost(V100, ranks).lines
    found = [1e3 * (latency + per_byte * 25 * MIB) for latency, per_byte in (lines["ring Simple"], lines["tree Simple"])]
    assert found == pytest.approx([ring, tree], abs=0.005)


def test_the_fastest_algorithm_counts() -> None:
    cost = CollectiveCost(V100, 256)
    assert cost.seconds(25 * MIB) == pytest.approx(min(latency + per_byte * 25 * MIB for latency, per_byte in cost.lines.values()))
    assert CollectiveCost(V100, 256, ("ring",)).seconds(25 * MIB) > cost.seconds(25 * MIB)
    assert CollectiveCost(V100, 1).seconds(25 * MIB) == 0.0


def test_a_hierarchy_uses_every_ranks_share_of_the_network() -> None:
    """Where the network is the narrow place, each byte crosses it less often."""
    ring, hierarchy = CollectiveCost(V100, 32, ("ring",)), CollectiveCost(V100, 32, ("hierarchical",))
    assert hierarchy.seconds(400 * MIB) < ring.seconds(400 * MIB)
    assert not CollectiveCost(V100, 8, ("hierarchical", "ring")).lines.keys() - CollectiveCost(V100, 8, ("ring",)).lines.keys()


def test_free_parameters_are_found_again() -> None:
    truth = CollectiveCost(V100, 16, latency_factor=1.7, bandwidth_factor=0.8)
    points = tuple((size, truth.seconds(size)) for size in (1 << 10, MIB, 16 * MIB, 256 * MIB))
    fitted = CollectiveCost(V100, 16).fitted(points)
    assert [fitted.latency_factor, fitted.bandwidth_factor] == pytest.approx([1.7, 0.8], rel=0.02)


def test_a_machine_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(V100.to_json()))
    assert machine(str(path)) == V100
    assert machine("dgx-a100") is MACHINES["dgx-a100"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "no JSON"), ('{"nmae": 1}', "has no nmae"), ('{"name": "x"}', "doesn't fit")],
)
def test_a_machine_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        machine(str(path))


def test_figures_out_of_range() -> None:
    with pytest.raises(ConfigurationError, match="neither a file nor one of"):
        machine("abacus")
    with pytest.raises(ConfigurationError, match="ranks_per_host"):
        Machine("x", 0, "pci", 1e9, 1e9)
    with pytest.raises(ConfigurationError, match="link must be"):
        Machine("x", 1, "string", 1e9, 1e9)
    with pytest.raises(ConfigurationError, match="imbalance"):
        Machine("x", 1, "pci", 1e9, 1e9, imbalance=1.0)
