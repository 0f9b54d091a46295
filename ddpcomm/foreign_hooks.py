"""Post-accumulate hooks of the user's own, such as an optimizer that steps inside backward: they run when the average is there.

torch calls such a hook as soon as this rank's own gradient has accumulated. A hook that consumed that one would train every rank on its
own gradients. So each stands behind a door in torch's own table of hooks (`handle.remove()` goes on working), which holds the call back
until the gradient has been averaged, and lets it through at once where nothing is going to be averaged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from ddpcomm._native import CountdownHook
from ddpcomm.untraced import untraced

Hook = Callable[[Tensor], Any]


class _Door:
    def __init__(self, hook: Hook, admit: Callable[[Hook, Tensor], None]) -> None:
        self.hook = hook
        self._admit = admit

    @untraced
    def __call__(self, parameter: Tensor) -> None:
        self._admit(self.hook, parameter)


class ForeignHooks:
    """The doors of one reducer.

    Args:
        holds_back: a method, called at each hook's call; whether it has to wait for the average. Its object isn't kept alive.
    """

    def __init__(self, holds_back: Callable[[], bool]) -> None:
        self._holds_back = weakref.WeakMethod(holds_back)
        self._tables: list[dict[int, Hook]] = []
        self._seen: list[tuple[int, int]] = []
        self._waiting: dict[tuple[int, int], tuple[Hook, Tensor]] = {}
        self.in_company = False
        """Whether another reducer averages some of these parameters too, as where two models have a part in common."""

    def watch(self, parameters: Sequence[Tensor]) -> None:
        """The parameters to look after from now on. Each must have a hook already, else torch has no table for it."""
        self._tables = [p._post_accumulate_grad_hooks for p in parameters if p._post_accumulate_grad_hooks]
        self._seen = []
        self.look()

    def look(self) -> None:
        """Puts doors before hooks that came since the last look. Costs 0.1 us a parameter when none did."""
        seen = [(len(table), next(reversed(table), -1)) for table in self._tables]  # keys only grow: one gone, one come is seen, too
        if seen == self._seen:
            return
        self._seen = seen
        self.in_company = False
        for table in self._tables:
            reducers = 0
            for key, hook in table.items():
                if isinstance(hook, CountdownHook):
                    reducers += 1
                elif not isinstance(hook, _Door):
                    table[key] = _Door(hook, self._admit)
            self.in_company = self.in_company or reducers > 1

    def _admit(self, hook: Hook, parameter: Tensor) -> None:
        holds_back = self._holds_back()
        if holds_back is not None and holds_back():  # there will be one average, however often this rank's own gradient comes
            self._waiting[id(hook), id(parameter)] = hook, parameter
        else:
            hook(parameter)

    def run_waiting(self, brought: Iterable[Tensor] = ()) -> None:
        """Calls, in order, what was held back.

        Args:
            brought: parameters that received no gradient of this rank's own, but an average: their hooks run on the other ranks, and so
                have to run here.
        """
        for parameter in brought:
            for door in (parameter._post_accumulate_grad_hooks or {}).values():
                if isinstance(door, _Door):
                    self._waiting[id(door.hook), id(parameter)] = door.hook, parameter
        waiting, self._waiting = self._waiting, {}
        for hook, parameter in waiting.values():
            hook(parameter)

    def drop_waiting(self) -> None:
        """Forgets what was held back: there is no average to call it with."""
        self._waiting = {}

    def close(self) -> None:
        """Takes the doors away."""
        for table in self._tables:
            for key, hook in table.items():
                if isinstance(hook, _Door) and hook._admit.__self__ is self:  # type: ignore[attr-defined]
                    table[key] = hook.hook
        self._tables = []
