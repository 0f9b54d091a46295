"""Two models in one backward, over transports that take their collectives in one order: the first one's buckets go out before the second's.

As in `loss(second(first(x)))`. Where the models take other branches on other ranks, their gradients become ready in another order on each
rank, and so would their buckets go out. So the model whose backward begins while another's is under way keeps its buckets back until that
one has ended.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable

_UNDER_WAY: dict[Hashable, weakref.WeakSet[Turn]] = {}
"""By what the transports share, such as a process group, whose backwards are under way. Shared by all models of the process on purpose."""


class Turn:
    """One reducer's."""

    def __init__(self) -> None:
        self._shared: Hashable = None

    def begin(self, shared: Hashable) -> bool:
        """A backward begins.

        Args:
            shared: what the reducer's transport has in common with others', as far as their collectives must go out in one order; or None.

        Returns:
            Whether another one, over the same, is under way.
        """
        self.end()
        if shared is None:
            return False
        under_way = _UNDER_WAY.setdefault(shared, weakref.WeakSet())
        others = len(under_way) > 0
        under_way.add(self)
        self._shared = shared
        return others

    def end(self) -> None:
        """It has ended, however it did. Idempotent."""
        shared, self._shared = self._shared, None
        under_way = _UNDER_WAY.get(shared)
        if under_way is not None:
            under_way.discard(self)
            if not under_way:
                _UNDER_WAY.pop(shared, None)
