"""What counts as a flag."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ddpcomm.argument_checks import check_flag
from ddpcomm.errors import ConfigurationTypeError


@pytest.mark.parametrize("value", [True, False, None, 0, 1, np.True_, np.False_], ids=repr)
def test_flags_that_torch_takes(value: object) -> None:
    check_flag("static_graph", value)


@pytest.mark.parametrize("value", ["True", 2, 0.5, np.ones(2, dtype=bool), np.float32(1), torch.tensor(True)], ids=repr)
def test_no_flags(value: object) -> None:
    with pytest.raises(ConfigurationTypeError, match="static_graph must be True or False"):
        check_flag("static_graph", value)
