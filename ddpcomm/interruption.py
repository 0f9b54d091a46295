"""A backward that an exception ends on this rank: the others are not left waiting, and the next backward meets its own kind."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from ddpcomm.comm.base import Communicator
from ddpcomm.config import ReducerOptions
from ddpcomm.countdown import Countdown
from ddpcomm.errors import CommunicationError, DDPCommError
from ddpcomm.foreign_hooks import ForeignHooks
from ddpcomm.mode import Mode
from ddpcomm.parameters import ParameterSet
from ddpcomm.raised import when_raised
from ddpcomm.record import Record
from ddpcomm.reduction import Reduction
from ddpcomm.reports import Reporter
from ddpcomm.status import Notice


class Interruption:
    """Base of Reducer, which has the attributes named here."""

    communicator: Communicator
    options: ReducerOptions
    parameters: ParameterSet
    countdown: Countdown
    record: Record
    reports: Reporter
    broken: DDPCommError | None
    mode: Mode
    under_way: Reduction | None
    _foreign: ForeignHooks

    def __init__(self) -> None:
        super().__init__()
        self._interrupted = False

    def _rest(self) -> None:
        """No backward is under way any more."""
        raise AttributeError("_rest")

    def _spoilt(self, fires: Sequence[int]) -> Sequence[int]:
        """By parameter, whether a failed backward has left its gradient wrong: one that arrived, or that lies in a bucket."""
        if not self.options.gradient_as_bucket_view or self.mode is Mode.LOCAL:
            return fires
        return [p.grad is not None for p in self.parameters.parameters]

    def _on_loss(self) -> None:
        """The engine dropped the backward: it raised, but what is not known yet. Never blocks."""
        where = self.reports.here()
        self._on_interrupt()
        me = weakref.ref(self)

        def tell(error: BaseException) -> None:
            owner = me()
            if owner is not None:
                owner.reports.raised(error, where)

        when_raised(tell)

    def _on_interrupt(self, error: BaseException | None = None) -> None:
        """Backward raised on this rank. The others wait for its buckets: they go out void, and the last one says so. Never blocks."""
        mode, reduction = self.mode, self.under_way
        if error is not None:
            self.reports.raised(error)
        self._foreign.drop_waiting()
        self.record.gradients_are_own(self.parameters, self._spoilt(self.countdown.fires()), "backward raised an exception")
        self._rest()
        if mode is Mode.LOCAL or reduction is None or self.broken is not None:
            return
        self.under_way = reduction
        self._interrupted = True
        try:
            while reduction.next < len(reduction.arrangement.buckets):
                reduction.launch([False] * len(self.parameters.managed), lambda: {Notice.INTERRUPTED}, void=True)
        except CommunicationError as failure:
            self.broken = failure

    def _recover(self) -> None:
        """Takes an interrupted backward's buckets back in, so that the next ones meet their own kind. Collective, if there was one."""
        if not self._interrupted:
            return
        reduction, self.under_way = self.under_way, None
        self._interrupted = False
        if reduction is None or self.broken is not None:
            return
        try:
            reduction.finish_hooks()
            reduction.wait()
            reduction.failure = None
        except CommunicationError as error:
            self.broken = error
            raise
