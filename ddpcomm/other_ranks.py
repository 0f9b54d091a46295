"""How a reducer goes on over other ranks than before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddpcomm.backward import BackwardWatch
from ddpcomm.comm.base import Communicator
from ddpcomm.countdown import Countdown
from ddpcomm.deferred import DeferredStatus
from ddpcomm.errors import DDPCommError
from ddpcomm.mode import Mode
from ddpcomm.parameters import ParameterSet
from ddpcomm.record import Record


class OtherRanks:
    """Base of Reducer, which has the attributes named here."""

    communicator: Communicator
    divisor: float
    broken: DDPCommError | None
    learned: bool
    parameters: ParameterSet
    record: Record
    watch: BackwardWatch
    countdown: Countdown
    deferred: DeferredStatus | None
    _foreign: Any
    _delayed: frozenset[str]
    _order: list[int]
    mode: Mode
    _interrupted: bool

    def use(self, communicator: Communicator) -> None:
        """Goes on over other ranks. Local. What an interrupted or failed backward has left open among the former ones is given up: its
        gradients stay this rank's own."""
        self._give_up_backward()
        self.communicator = communicator
        self.divisor = float(communicator.world_size)
        self.broken = None
        self.learned = False
        self.stop_tuning()
        self._order = self.parameters.launch_order((), self._delayed)  # the ranks had learned theirs in other company
        self.arrange()

    def _give_up_backward(self) -> None:
        self.deferred = None
        self._interrupted = False
        if self.mode is not Mode.IDLE:
            self._foreign.drop_waiting()
            self.record.gradients_are_own(self.parameters, self._spoilt(self.countdown.fires()), "the ranks changed during backward")
            self.watch.forget()
        self._rest()

    def stop_tuning(self) -> None:
        raise AttributeError("stop_tuning")

    def arrange(self) -> None:
        raise AttributeError("arrange")

    def _spoilt(self, fires: Sequence[int]) -> Sequence[int]:
        raise AttributeError("_spoilt")

    def _rest(self) -> None:
        raise AttributeError("_rest")
