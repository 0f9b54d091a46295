"""Tells models apart that reduce over one process group: buckets of one must not be summed with another's."""

from __future__ import annotations

from collections.abc import Hashable

from ddpcomm.comm.base import Communicator
from ddpcomm.comm.exchange import all_gather_objects
from ddpcomm.status import TAGS

_NEXT: dict[Hashable, int] = {}
"""By what the transports share, such as a process group. Shared by all models of the process on purpose."""


def next_tag(communicator: Communicator) -> int:
    """The next model's tag, from 0 to TAGS - 1, the same on all ranks. Collective where transports share their order of collectives."""
    shared = communicator.shares_order_with
    if shared is None or communicator.world_size == 1:
        return 0
    number = max(all_gather_objects(communicator, _NEXT.get(shared, 0)))  # a rank may have failed to build a model that others have
    _NEXT[shared] = number + 1
    return number % TAGS
