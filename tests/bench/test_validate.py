"""The tolerances that the simulator keeps to, against published figures; and the whole measurement in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import overlap_gains, validate, validation
from bench.comparison import largest_error, mean_error, pairs_in_order
from bench.rows import read_rows
from bench.validate_machine import CAPS_MIB, measured_rows
from ddpcomm.layout import Caps
from ddpcomm.simulate import Exchange, simulate


def test_all_reduces_that_were_left_out() -> None:
    found = validation.leave_one_out()
    assert len(found) == 22
    assert mean_error(found) < 0.075
    for system in validation.all_reduce_times():
        assert mean_error([c for c in found if c.case.startswith(system)]) < 0.10


def test_torch_ddps_published_steps() -> None:
    """Within 3 points on four models, of one GPU with DDP. Of one without, torch's own work on one GPU is missing from the model."""
    found = validation.ddp_steps()
    assert len(found) == 16
    assert largest_error(found) < 2.6
    assert largest_error(validation.ddp_steps(base=0)) < 5.4


def test_the_imbalance_is_not_fitted_to_what_it_is_judged_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other steps of a model change nothing of its own imbalance."""
    before = validation.imbalance_without("resnet50")
    steps = {model: dict(times) for model, times in validation.published_steps().items()}
    steps["resnet50"] = {gpus: 3 * seconds if gpus > 1 else seconds for gpus, seconds in steps["resnet50"].items()}
    monkeypatch.setattr(validation, "published_steps", lambda: steps)
    validation.efficiency.cache_clear()
    assert validation.imbalance_without("resnet50") == before
    assert validation.imbalance_without("resnet101") != before
    validation.efficiency.cache_clear()


def test_gains_of_overlap() -> None:
    """All signs and the whole order, from inputs that are none of the gains."""
    found = overlap_gains.gains()
    assert [c.case for c in found] == ["resnet50, nccl", "bert, nccl", "resnet50, gloo", "bert, gloo"]
    assert all(c.predicted > 0 for c in found)
    assert pairs_in_order(found) == (6, 6)
    assert largest_error(found) < 6.8


def test_what_explains_a_breakdown_leads_back_to_it() -> None:
    for breakdown in overlap_gains.breakdowns():
        assert breakdown.forward + breakdown.backward + breakdown.optimizer == pytest.approx(1)
        profile, cost_of = overlap_gains.explained(breakdown)
        step = simulate(profile, Caps.of_mb(None), Exchange(cost_of(breakdown.gpus)))
        assert step.backward_seconds / step.step_seconds == pytest.approx(breakdown.backward, abs=0.002)


def test_a_breakdown_that_nothing_explains() -> None:
    """Backward alone takes twice forward: there is no exchange that leaves less of the step to it."""
    breakdown = overlap_gains.Breakdown("nccl", "resnet50", 16, forward=0.4, backward=0.5, optimizer=0.1)
    with pytest.raises(ValueError, match="no bandwidth from 10000000 to 100000000000 bytes a second explains"):
        overlap_gains.explained(breakdown)


def test_gains_of_overlap_by_constants_alone() -> None:
    """All signs; of the order only what follows from these inputs: BERT gains less over Gloo than over NCCL, and less than ResNet-50."""
    found = overlap_gains.gains_by_constants()
    assert all(c.predicted > 0 for c in found)
    gain = {c.case: c.predicted for c in found}
    assert gain["bert, gloo"] < min(gain["bert, nccl"], gain["resnet50, gloo"])
    assert pairs_in_order(found) == (2, 6)


def test_published_tables_and_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    validate.main(["--output", str(tmp_path)])
    assert "each left out of its own model: mean error" in capsys.readouterr().out
    rows = read_rows(tmp_path / "validate.jsonl")
    assert rows
    assert not any(row.measured for row in rows)
    assert len(validate.tables(rows)) == len({row.quantity for row in rows})
    assert sum(len(table.lines) for table in validate.tables(rows)) == len(rows)
    assert (tmp_path / "validate.png").exists()


def test_a_small_measurement() -> None:
    """It predicts something of the right size for every bucket size. How well is no matter of two rounds."""
    rows = measured_rows([2], ["shared_memory"], rounds=2)
    assert [row.details["bucket_cap_mib"] for row in rows] == list(CAPS_MIB)
    assert all(row.measured and row.details["predicted"] > row.details["without_exchange"] for row in rows)
    assert len(validate.tables(rows)[0].lines) == len(rows)
