"""Keeps torch.compile away from functions that torch calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Runs as it is, and all that it calls, also where dynamo is at work: a compiled function that calls `backward` would have it trace
    autograd's hooks and callbacks as well. For functions of modules and classes alone: each keeps a wrapper that refers to it, which makes
    garbage of one that is defined anew at each call."""
    return torch._disable_dynamo(function)  # type: ignore[attr-defined]
