"""`ddpcomm plan`, as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ddpcomm.cli.plan import plan
from ddpcomm.errors import ConfigurationError
from ddpcomm.machines import MACHINES

app = typer.Typer()
app.command()(plan)
STEP = {"parameters": [{"numel": 1_000_000, "ready_seconds": 0.001 * (9 - i)} for i in range(9)], "backward_seconds": 0.009}


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def step_file(directory: Path) -> str:
    path = directory / "step.json"
    path.write_text(json.dumps(STEP))
    return str(path)


def test_a_model() -> None:
    found = json.loads(run("--model", "resnet50", "--machine", "v100-one-nic", "--step-ms", "97", "--gpus", "16,8,10000", "--json"))
    assert [point["gpus"] for point in found["gpus"]] == [8, 16, 10000]
    assert found["one_gpu"]["step_seconds"] == pytest.approx(0.097)
    for point in found["gpus"]:
        assert point["best"]["step_seconds"] <= point["default"]["step_seconds"]
        assert 0 < point["default"]["efficiency"] <= 1
        assert sum(point["best"]["bucket_bytes"]) >= found["one_gpu"]["bytes"]


def test_a_step_by_work_and_peak() -> None:
    """Twice the batch, twice the time."""
    steps = [
        json.loads(run("--machine", "dgx-a100", "--batch", batch, "--gpus", "8", "--json"))["one_gpu"]["step_seconds"]
        for batch in ("32", "64")
    ]
    assert steps[1] == pytest.approx(2 * steps[0])


def test_a_recorded_step_with_a_picture(tmp_path: Path) -> None:
    output = run("--timeline", step_file(tmp_path), "--gpus", "8,64", "--picture", str(tmp_path / "new" / "plan.png"))
    assert "step.json on dgx-a100" in output
    assert "Everything below is predicted" in output
    assert "what would help at 64 GPUs, each alone:" in output
    assert (tmp_path / "new" / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_narrow_network_is_said_to_be_one(tmp_path: Path) -> None:
    narrow = MACHINES["dgx-a100"].to_json() | {"name": "narrow", "network_bytes_per_second": 1e8}
    (tmp_path / "machine.json").write_text(json.dumps(narrow))
    output = run("--timeline", step_file(tmp_path), "--machine", str(tmp_path / "machine.json"), "--gpus", "8,16,64")
    assert "exposed communication from 16 GPUs on" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "abacus"), "there is no model 'abacus'"),
        (("--gpus", "many"), "numbers with commas"),
        (("--gpus", "20000"), "1 to 10000 ranks"),
        (("--machine", "abacus"), "neither a file nor one of"),
    ],
)
def test_what_cannot_be_planned(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run(*arguments)


def test_a_machine_without_a_peak_needs_a_measured_step(tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text(json.dumps(MACHINES["dgx-a100"].to_json() | {"flops_per_second": 0.0}))
    with pytest.raises(ConfigurationError, match="a measured --step-ms is needed"):
        run("--machine", str(tmp_path / "machine.json"))
