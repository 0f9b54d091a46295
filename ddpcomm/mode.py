"""What a reducer is doing."""

from __future__ import annotations

import enum


class Mode(enum.Enum):
    """What the backward under way does with gradients."""

    IDLE = enum.auto()
    """There is none."""
    LOCAL = enum.auto()
    """They stay on this rank, as under no_sync."""
    DELAYED = enum.auto()
    """They are averaged at its end: how often each parameter fires, and when, is not known yet."""
    OVERLAPPED = enum.auto()
    """Buckets go out while it runs."""
