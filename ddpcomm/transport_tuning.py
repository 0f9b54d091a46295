"""Options of the transport that are "auto": each candidate takes turns with what is in use, and stays if backward is faster with it.

One option after the other, in the order of `CANDIDATES`; a candidate that the library at hand can't serve is left out, on all ranks alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from ddpcomm.errors import ConfigurationError
from ddpcomm.transport_choice import CANDIDATES

if TYPE_CHECKING:
    from ddpcomm.comm.base import Communicator
    from ddpcomm.transport_choice import TransportChoice

Turns = Callable[[Callable[[bool], None]], Generator[None, None, tuple[float, float]]]
"""Runs backwards after calling its argument with True and with False in turn; returns the median seconds of each."""


class TransportTuner:
    """Looks for a model's undecided options, once.

    Args:
        model: whose.
        turns: measures one against the other.
        least_gain: the share of backward that a candidate must save to be taken.
    """

    def __init__(self, model: TransportChoice, turns: Turns, least_gain: float) -> None:
        self._model = weakref.ref(model)
        self._turns = turns
        self._least_gain = least_gain
        self.chosen: dict[str, int] = {}
        """What was found better than the transport's own choice, so far."""
        self.seconds = 0.0
        """Of backward, with that; 0 if nothing could be tried."""

    def steps(self) -> Generator[None, None, None]:
        """The search, a backward at each yield. Collective."""
        for option in self._owner()._undecided:
            best: int | None = None
            for value in CANDIDATES[option]:
                if (yield from self._is_better({**self.chosen, option: value})):
                    best = value
                    self.chosen[option] = best

    def summary(self) -> str:
        """For the log."""
        owner = self._owner()
        chosen = [f"{name} {self.chosen.get(name, 'as by default')}" for name in owner._undecided]
        return f"{owner._transport} with {', '.join(chosen)}"

    def _is_better(self, options: dict[str, int]) -> Generator[None, None, bool]:
        present = self._owner()._communicator
        try:
            rival = self._owner()._open_communicator(options)
        except ConfigurationError:  # also a transport that can't be had so; on every rank
            return False
        try:
            rival_seconds, present_seconds = yield from self._turns(lambda rivals: self._use(rival if rivals else present))
            better = rival_seconds < (1 - self._least_gain) * present_seconds
            self._use(rival if better else present)
            self.seconds = min(rival_seconds, present_seconds) if better else present_seconds
            return better
        finally:
            owner = self._model()
            for communicator in (present, rival):
                if owner is None:
                    communicator.close()
                elif communicator is not owner._communicator:
                    owner._give_back_communicator(communicator)

    def _use(self, communicator: Communicator) -> None:
        self._owner()._switch_communicator(communicator)

    def _owner(self) -> TransportChoice:
        model = self._model()
        if model is None:
            raise ReferenceError("the model is gone")
        return model
