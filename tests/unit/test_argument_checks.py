"""What counts as a flag, and as a device of the module's own kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ddpcomm.argument_checks import check_flag
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
