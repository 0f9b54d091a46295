"""What forked children must let go of.

A child inherits the memory and the sockets of its parent, but not its place among the ranks. What it must not use, it must not tear down
either.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class LeftToParent(Protocol):
    """Something that only the process that made it may use."""

    def leave_to_parent(self) -> None:
        """Called in each forked child."""


_made_here: weakref.WeakSet[LeftToParent] = weakref.WeakSet()
_abandoned: list[object] = []


def leave_to_parent_after_fork(resource: LeftToParent) -> None:
    """From now on `resource` is told in each forked child that it is one. Doesn't keep it alive."""
    _made_here.add(resource)


def abandon(resource: object) -> None:
    """Keeps something until this process ends, because its destructor can't run in a forked child: it would wait for threads that the
    child doesn't have."""
    _abandoned.append(resource)


def _after_fork() -> None:
    for resource in list(_made_here):
        resource.leave_to_parent()
    _made_here.clear()


os.register_at_fork(after_in_child=_after_fork)
