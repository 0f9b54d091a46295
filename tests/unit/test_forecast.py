"""Workloads, recorded steps and forecasts."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from ddpcomm.errors import ConfigurationError
from ddpcomm.forecast import Forecast, Options, communication_bound_from, forecast, remedies, slowest
from ddpcomm.machines import MACHINES
from ddpcomm.step_source import PIECES_OF_A_BUCKET, read_step
from ddpcomm.workloads import BACKWARD_SHARE, WORKLOADS

MACHINE = MACHINES["v100-one-nic"]
RESNET = WORKLOADS["resnet50"]().profile(0.1)


@pytest.mark.parametrize(
    ("name", "tensors", "numel"),
    [
        ("resnet50", 161, 25_557_032),
        ("resnet101", 314, 44_549_160),
        ("resnext50_32x4d", 161, 25_028_904),
        ("resnext101_32x8d", 314, 88_791_336),
        ("bert_large", 391, 335_141_888),
        ("gpt2_xl", 580, 1_557_611_200),
    ],
)
def test_workloads_have_their_models_sizes(name: str, tensors: int, numel: int) -> None:
    """As torchvision and transformers count them."""
    workload = WORKLOADS[name]()
    assert len(workload.shapes) == tensors
    assert sum(prod(shape) for shape in workload.shapes) == sum(layer.numel for layer in workload.layers) == numel


def test_work_of_resnet50() -> None:
    """torchvision gives 4.09 thousand million multiply-adds."""
    assert WORKLOADS["resnet50"]().flops == pytest.approx(2 * 4.09e9, rel=0.005)


def test_profiles_end_with_the_first_layer() -> None:
    assert RESNET.backward_seconds == pytest.approx(0.1 * BACKWARD_SHARE)
    assert RESNET.step_seconds == pytest.approx(0.1)
    assert RESNET.ready_seconds[0] == RESNET.backward_seconds
    assert list(RESNET.ready_seconds) == sorted(RESNET.ready_seconds, reverse=True)
    assert 0 < RESNET.ready_seconds[-1] < 0.01 * RESNET.backward_seconds  # the last layer multiplies least
    with pytest.raises(ConfigurationError, match="more than 0 s"):
        WORKLOADS["resnet50"]().profile(0.0)


def test_more_ranks_never_make_a_step_shorter() -> None:
    steps = [forecast(RESNET, MACHINE, ranks).step_seconds for ranks in (1, 2, 8, 16, 64, 1024, 10_000)]
    assert steps == sorted(steps)
    assert forecast(RESNET, MACHINE, 1).efficiency == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("ranks", [8, 64, 10_000])
def test_best_buckets_are_no_worse(ranks: int) -> None:
    assert forecast(RESNET, MACHINE, ranks, Options(best_buckets=True)).step_seconds <= forecast(RESNET, MACHINE, ranks).step_seconds


def test_the_slowest_of_many() -> None:
    """Expected maxima of 2, 8 and 10000 normal variables: 0.564, 1.424, 3.852 (Blom's approximation)."""
    assert [slowest(ranks, 1.0) - 1 for ranks in (1, 2, 8, 10_000)] == pytest.approx([0.0, 0.564, 1.424, 3.852], abs=0.03)
    assert forecast(RESNET, replace(MACHINE, imbalance=0.05), 64).step_seconds > forecast(RESNET, MACHINE, 64).step_seconds


def test_options_count() -> None:
    base = forecast(RESNET, MACHINE, 64)
    assert forecast(RESNET, MACHINE, 64, Options(wire_factor=0.5)).exposed_seconds < base.exposed_seconds
    assert forecast(RESNET, MACHINE, 64, Options(synchronize_every=4)).exposed_seconds == pytest.approx(base.exposed_seconds / 4)
    assert forecast(RESNET, MACHINE, 64, Options(contention=1.0)).exposed_seconds > base.exposed_seconds
    with pytest.raises(ConfigurationError, match="1 to 10000 ranks"):
        forecast(RESNET, MACHINE, 10_001)


def test_remedies_come_in_order() -> None:
    found = remedies(RESNET, MACHINE, 256)
    assert [r.step_seconds for r in found] == sorted(r.step_seconds for r in found)
    assert [r.name for r in found if r.changes_training] == ["synchronise every 4 steps"]
    assert len(found) == 5


def test_where_a_curve_becomes_communication_bound() -> None:
    def point(ranks: int, exposed: float) -> Forecast:
        return replace(forecast(RESNET, MACHINE, 8), ranks=ranks, exposed_seconds=exposed, step_seconds=1.0)

    assert communication_bound_from([point(2, 0.2), point(4, 0.05), point(8, 0.2), point(16, 0.3)]) == 8
    assert communication_bound_from([point(2, 0.2), point(4, 0.05)]) is None


# ---- recorded steps -------------------------------------------------------------------------------------------------


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def event(name: str, category: str, start: float, length: float, rank: int = 0, **args: int) -> dict[str, Any]:
    """Times in microseconds."""
    return {"name": name, "cat": category, "ph": "X", "ts": start, "dur": length, "pid": rank, "tid": 0, "args": {"step": 0, **args}}


def trace(rank: int) -> list[dict[str, Any]]:
    """Two buckets of 4 and 8 KiB, ready after 1 and 3 ms of a backward of 4 ms, of which 0.5 ms are spent on the first one's copy."""
    start = 1000.0
    return [
        event("forward", "step", 0.0, 1000.0, rank),
        event("backward", "step", start, 4000.0, rank),
        event("bucket 0 ready", "ready", start + 1000, 0.0, rank, bucket=0, bytes=4096),
        event("flatten 0", "flatten", start + 1001, 500.0, rank, bucket=0, bytes=4096),
        event("bucket 1 ready", "ready", start + 3000, 0.0, rank, bucket=1, bytes=8192),
        event("all-reduce 0", "all_reduce", start + 1500, 100.0 + 50 * rank, rank, bucket=0, bytes=4096),
        event("all-reduce 1", "all_reduce", start + 4000, 170.0 - 20 * rank, rank, bucket=1, bytes=8192),
    ]


def test_a_trace(tmp_path: Path) -> None:
    source = read_step(write(tmp_path / "trace.json", {"traceEvents": [*trace(0), {"ph": "M", "name": "process_name"}, *trace(1)]}))
    found = source.profile
    assert (found.rest_seconds, found.backward_seconds) == pytest.approx((1e-3, 3.5e-3))
    assert len(found.sizes) == 2 * PIECES_OF_A_BUCKET
    assert found.total_bytes == 4096 + 8192
    ends = found.ready_seconds[PIECES_OF_A_BUCKET - 1], found.ready_seconds[-1]
    assert ends == pytest.approx((1e-3, 2.5e-3))
    assert source.cost is not None
    assert [size for size, _ in source.cost.points] == [4096, 8192]
    assert [seconds for _, seconds in source.cost.points] == pytest.approx([100e-6, 150e-6])


def test_a_trace_without_a_wrapper(tmp_path: Path) -> None:
    assert read_step(write(tmp_path / "trace.json", trace(0))).profile.backward_seconds == pytest.approx(3.5e-3)


def test_a_description(tmp_path: Path) -> None:
    parameters = [{"numel": 10, "ready_seconds": 0.02}, {"numel": 5, "ready_seconds": 0.01, "element_bytes": 2}]
    content = {"parameters": parameters, "backward_seconds": 0.03, "rest_seconds": 0.01, "all_reduce": [[0, 1e-5], [1000, 2e-5]]}
    source = read_step(write(tmp_path / "step.json", content))
    assert source.profile.total_bytes == 50
    assert source.profile.step_seconds == pytest.approx(0.04)
    assert source.cost is not None
    assert source.cost.seconds(500) == pytest.approx(1.5e-5)
    del content["all_reduce"]
    assert read_step(write(tmp_path / "step.json", content)).cost is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "there is no 'parameters'"),
        ({"traceEvents": []}, "no backward"),
        ([event("backward", "step", 0.0, 1.0)], "no bucket"),
        ({"parameters": [{"numel": 1, "ready_seconds": 2.0}], "backward_seconds": 1.0}, "parameter 0 is ready after"),
    ],
)
def test_files_that_say_too_little(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_step(write(tmp_path / "step.json", content))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="can't be used for a forecast"):
        read_step(tmp_path / "nothing.json")
