"""Lists in messages: long enough to help, short enough to read."""

from __future__ import annotations

from collections.abc import Sequence

_MOST = 10


def listed(items: Sequence[str], joint: str = ", ") -> str:
    """The first ten, and how many there are beyond them."""
    more = [f"and {len(items) - _MOST} more"] if len(items) > _MOST else []
    return joint.join([*items[:_MOST], *more])
