"""Wrong arguments of `ddpcomm` subcommands: an error, and no success with nonsense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ddpcomm.cli import app
from ddpcomm.cli.checks import versions
from ddpcomm.errors import ConfigurationError

pytestmark = pytest.mark.timeout(120)

COMMANDS = [
    ["fly"],
    ["plan", "--gpus", "many"],
    ["plan", "--gpus", "0"],
    ["plan", "--model", "abacus"],
    ["plan", "--machine", "abacus"],
    ["plan", "--contention", "2"],
    ["plan", "--step-ms", "-1"],
    ["plan", "--step-ms", "inf"],
    ["plan", "--step-ms", "1e308"],
    ["plan", "--element-bytes", "-4"],
    ["plan", "--element-bytes", "0"],
    ["plan", "--gpus", "8", "--picture", "runs/plan.xyz"],
    ["plan", "--gpus", "8", "--picture", "."],
    ["plan", "--batch", "0"],
    ["timeline", "/nowhere/trace.json"],
    ["doctor", "--wings"],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_bad_commands(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code != 0
    assert isinstance(done.exception, (SystemExit, ConfigurationError, OSError)), done.exception


PARAMETER = {"numel": 10, "ready_seconds": 0.1}
MACHINE = {"name": "m", "ranks_per_host": 8, "link": "pci", "link_bytes_per_second": 1e9, "network_bytes_per_second": 1e9}
FILES = [
    ("--machine", [1, 2]),
    ("--machine", 5),
    ("--machine", None),
    ("--machine", MACHINE | {"flops_per_second": "fast"}),
    ("--machine", MACHINE | {"memory_bytes_per_second": None}),
    ("--machine", MACHINE | {"ranks_per_host": 1.5}),
    ("--machine", MACHINE | {"link_bytes_per_second": 1e-300}),
    ("--timeline", [1, 2]),
    ("--timeline", {"traceEvents": [5]}),
    ("--timeline", {"backward_seconds": 1.0, "parameters": []}),
    ("--timeline", {"backward_seconds": 1.0, "parameters": [PARAMETER | {"numel": -1}]}),
    ("--timeline", {"backward_seconds": 1.0, "parameters": [PARAMETER | {"numel": float("inf")}]}),
    ("--timeline", {"backward_seconds": 1.0, "parameters": [PARAMETER | {"element_bytes": 0}]}),
    ("--timeline", {"backward_seconds": float("inf"), "parameters": [PARAMETER]}),
    ("--timeline", {"backward_seconds": 1.0, "rest_seconds": -1.0, "parameters": [PARAMETER]}),
    ("timeline", {"otherData": {"ddpcomm": {"format": 1, "ranks": [5]}}, "traceEvents": []}),
]


@pytest.mark.parametrize(("option", "content"), FILES, ids=[f"{option} {json.dumps(content)}"[:60] for option, content in FILES])
def test_bad_files(tmp_path: Path, option: str, content: object) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps(content))
    arguments = ["timeline", str(path)] if option == "timeline" else ["plan", option, str(path), "--gpus", "8"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code != 0
    assert isinstance(done.exception, (SystemExit, ConfigurationError)), done.exception


def test_a_step_that_is_given_twice(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps({"backward_seconds": 1.0, "parameters": [PARAMETER]}))
    assert CliRunner().invoke(app, ["plan", "--timeline", str(path), "--gpus", "8"]).exit_code == 0
    done = CliRunner().invoke(app, ["plan", "--timeline", str(path), "--step-ms", "5"])
    assert isinstance(done.exception, ConfigurationError)


@pytest.mark.parametrize(
    ("variable", "value"), [("DDPCOMM_TRANSPORT", "abc"), ("DDPCOMM_IMPLEMENTATION", "abc"), ("DDPCOMM_TRANSPORT", "fake")]
)
def test_doctor_sees_settings_that_stop_every_model(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    failed = [check for check in versions() if check.state == "failed"]
    assert failed
    assert all(check.required and variable in check.detail and value in check.detail for check in failed)
