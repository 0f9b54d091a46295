"""bench/step_time.py: it divides by torch's best mode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from bench import rivals, step_time, subjects
from bench.models import CASES
from bench.rows import read_rows

pytestmark = pytest.mark.timeout(300)


@pytest.mark.usefixtures("borrowed_pools")
def test_a_short_run_writes_rows_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step_time.main(["--models", "tensors400", "--transport", "process_group", "--steps", "2", "--output", str(tmp_path)])
    rows = read_rows(tmp_path / "step_time.jsonl")
    own = {"ddpcomm process_group", "ddpcomm process_group view", "all-reduce alone process_group", "bare exchange process_group"}
    assert {row.subject for row in rows} - set(rivals.rivals()) == {"none", *subjects.TORCH_MODES, *own}
    assert set(rivals.rivals()) <= {row.subject for row in rows}
    assert {(row.quantity, row.count, row.ranks) for row in rows} == {("step", 2, 2), ("overhead", 2, 2)}
    assert (tmp_path / "step_time.png").read_bytes().startswith(b"\x89PNG")
    assert "ddpcomm process_group view" in capsys.readouterr().out


def test_the_ratio_is_to_torchs_best_mode() -> None:
    samples = {"none": [1.0, 2.0, 3.0], "ddpcomm auto": [2.0, 3.0, 4.0]}
    samples |= {name: [3.0, 4.0, 5.0] for name in subjects.TORCH_MODES} | {"torch static": [5.0, 6.0, 7.0], "torch view": [2.5, 3.5, 4.5]}
    rows = {(row.subject, row.quantity): row for row in step_time.rows_of(CASES["convnet"], samples, ranks=2)}
    assert rows["none", "step"].p50 == 2.0
    assert rows["ddpcomm auto", "overhead"].p50 == 1.0
    assert rows["ddpcomm auto", "overhead"].details["ratio_to_best_torch"] == pytest.approx(1 / 1.5)
    assert ("none", "overhead") not in rows


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_of_every_model_gets_a_gradient(name: str) -> None:
    case = CASES[name]
    model = case.build()
    case.loss(model, case.batch()).backward()
    assert len(subjects.gradients(model)) == len(list(model.parameters()))


def test_twins_share_weights_and_nothing_else() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    other = subjects.twin(model)
    other(torch.randn(4, 2)).sum().backward()
    assert other[0].weight.data_ptr() == model[0].weight.data_ptr()
    assert model[0].weight.grad is None
    assert not torch.equal(other[1].running_mean, model[1].running_mean)
