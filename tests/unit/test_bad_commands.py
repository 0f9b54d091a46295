"""Wrong arguments of `ddpcomm` subcommands: an error, and no success with nonsense."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from ddpcomm.cli import app
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
    ["plan", "--batch", "0"],
    ["timeline", "/nowhere/trace.json"],
    ["doctor", "--wings"],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_bad_commands(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code != 0
    assert isinstance(done.exception, (SystemExit, ConfigurationError, OSError)), done.exception
