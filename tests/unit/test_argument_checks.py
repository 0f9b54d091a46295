"""What counts as a flag, and as a device of the module's own kind."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from ddpcomm import create_communicator, env, save_checkpoint
from ddpcomm.argument_checks import LONGEST, check_flag, check_timeout
from ddpcomm.arguments import placement
from ddpcomm.errors import ConfigurationError, ConfigurationTypeError


@pytest.mark.parametrize("value", [True, False, None, 0, 1, np.True_, np.False_], ids=repr)
def test_flags_that_torch_takes(value: object) -> None:
    check_flag("static_graph", value)


@pytest.mark.parametrize("value", ["True", 2, 0.5, np.ones(2, dtype=bool), np.float32(1), torch.tensor(True)], ids=repr)
def test_no_flags(value: object) -> None:
    with pytest.raises(ConfigurationTypeError, match="static_graph must be True or False"):
        check_flag("static_graph", value)


# A device of a kind that every build of torch has, and of which there are several.
PARAMETERS = [torch.empty(3, device="meta:1")]


@pytest.mark.parametrize("device", [1, "meta:1", torch.device("meta", 1)], ids=repr)
def test_a_device_by_its_number_or_name(device: object) -> None:
    found = placement(PARAMETERS, [device], device)
    assert (found.device_ids, found.output_device, found.input_device) == ([1], 1, torch.device("meta", 1))


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        (1.5, ConfigurationTypeError),
        (True, ConfigurationTypeError),
        (None, ConfigurationTypeError),
        ("graphics", ConfigurationError),
        (-1, ConfigurationError),
        ("meta", ConfigurationError),
        ("cpu:1", ConfigurationError),
    ],
    ids=repr,
)
def test_no_device(device: object, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="device_ids and output_device must"):
        placement(PARAMETERS, [device], None)


def test_a_time_limit_is_cut_to_ten_years(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPCOMM_TIMEOUT_SECONDS", "1e10")
    assert check_timeout("timeout", timedelta.max) == env.read().timeout == LONGEST


@pytest.mark.parametrize(
    ("name", "text"), [("DDPCOMM_TIMEOUT_SECONDS", "1e-7"), ("DDPCOMM_TIMELINE", "/tmp"), ("DDPCOMM_TIMELINE", "/tmp/" + "a" * 300)]
)
def test_variables_that_hold_what_they_must_not(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigurationError, match=name):
        env.read()


def test_an_empty_transport_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPCOMM_TRANSPORT", "")
    assert env.read().transport == "auto"


@pytest.mark.parametrize("text", ["abc", "auto ", "fake"])
def test_a_transport_of_the_environment_that_there_is_not(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DDPCOMM_TRANSPORT", text)
    with pytest.raises(ConfigurationError, match="DDPCOMM_TRANSPORT must be one of"):
        create_communicator()


@pytest.mark.parametrize("path", [5, None, b"x"], ids=repr)
def test_a_checkpoint_needs_a_path(path: Path) -> None:
    with pytest.raises(ConfigurationTypeError, match="path must be a path"):
        save_checkpoint({}, path)
