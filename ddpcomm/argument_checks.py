"""Checks of single arguments: each raises a typed error that names the argument and what was given, before anything is changed.

What comes back is the argument itself. A bool is not taken for a number, nor a text for a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ddpcomm.errors import ConfigurationError, ConfigurationTypeError


def check_number(name: str, value: Any, *, above: float | None = None, least: float | None = None) -> float:
    """A finite number.

    Raises:
        ConfigurationTypeError: it is none.
        ConfigurationError: it is not finite, or too small.
    """
    if isinstance(value, bool) or not hasattr(value, "__float__") or isinstance(value, torch.Tensor):
        raise ConfigurationTypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ConfigurationError(f"{name} must be finite, got {value}")
    if above is not None and not value > above:
        raise ConfigurationError(f"{name} must be more than {above:g}, got {value}")
    if least is not None and value < least:
        raise ConfigurationError(f"{name} must be at least {least:g}, got {value}")
    return value  # type: ignore[no-any-return]  # a number, as it came


def check_integer(name: str, value: Any, *, least: int | None = None) -> int:
    """A whole number, numpy's among them.

    Raises:
        ConfigurationTypeError: it is none.
        ConfigurationError: it is too small.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or isinstance(value, torch.Tensor):
        raise ConfigurationTypeError(f"{name} must be an integer, got {value!r}")
    if least is not None and value < least:
        raise ConfigurationError(f"{name} must {f'be at least {least}' if least else 'not be negative'}, got {value}")
    return value  # type: ignore[no-any-return]  # an integer, as it came


def check_flag(name: str, value: Any) -> None:
    """True or False; None, 0, 1 and numpy's bool pass, as torch lets them.

    Raises:
        ConfigurationTypeError: anything else, such as the text "False", which would count as true.
    """
    is_numpys = getattr(getattr(value, "dtype", None), "kind", None) == "b" and value.ndim == 0
    if value is not None and not is_numpys and not (isinstance(value, int) and value in (0, 1)):
        raise ConfigurationTypeError(f"{name} must be True or False, got {value!r}")


LONGEST = timedelta(days=3650)
"""Of time limits. Longer ones overflow in some backends, and would end at once."""


def check_timeout(name: str, value: Any) -> timedelta:
    """A time limit, of ten years at most.

    Raises:
        ConfigurationTypeError: it is no timedelta.
        ConfigurationError: it is zero or negative.
    """
    if not isinstance(value, timedelta):
        raise ConfigurationTypeError(f"{name} must be a datetime.timedelta, got {value!r}")
    if value <= timedelta(0):
        raise ConfigurationError(f"{name} must be more than 0, got {value}")
    return min(value, LONGEST)


def check_path(name: str, value: Any) -> Path:
    """
    Raises:
        ConfigurationTypeError: it is no path.
    """
    if not isinstance(value, (str, PathLike)):
        raise ConfigurationTypeError(f"{name} must be a path, got {value!r}")
    return Path(value)


def check_sequence(name: str, value: Any) -> Sequence[Any]:
    """
    Raises:
        ConfigurationTypeError: it is no list or other sequence, or a text, or one tensor.
    """
    if isinstance(value, (str, bytes, torch.Tensor)) or not (hasattr(value, "__len__") and hasattr(value, "__iter__")):
        raise ConfigurationTypeError(f"{name} must be a list, got {_short(value)}")
    return value  # type: ignore[no-any-return]  # a sequence, as it came


def check_device(name: str, value: Any) -> torch.device:
    """
    Raises:
        ConfigurationTypeError: it is nothing that names a device.
        ConfigurationError: torch knows no such device.
    """
    if isinstance(value, bool) or not isinstance(value, (torch.device, str, int)):
        raise ConfigurationTypeError(f"{name} must be a device, got {_short(value)}")
    try:
        return torch.device(value)
    except RuntimeError as error:
        raise ConfigurationError(f"{name} must name a device, got {value!r}: {str(error).splitlines()[0]}") from None


def _short(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)
