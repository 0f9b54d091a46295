"""Why a reducer no longer synchronises: its communication failed, or it was closed."""

from __future__ import annotations

import copy

from ddpcomm.errors import ClosedError, CommunicationError, DDPCommError


def name_cause(error: DDPCommError, failure: DDPCommError | None) -> None:
    """Says in a communication's error what had failed on this rank before, such as a hook: the other ranks may have waited for it."""
    if failure is not None and isinstance(error, CommunicationError) and error is not failure:
        error.args = (f"{error}. Before that, on this rank, {failure}", *error.args[1:])
        error.__cause__ = failure


class Failure:
    """Base of Reducer."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False
        self._broken: DDPCommError | None = None

    @property
    def broken(self) -> DDPCommError | None:
        """What ended the synchronisation for good. A copy: the error itself holds on to every frame that it has come by, and those to
        the buckets, this reducer and whatever the training loop has at hand."""
        return self._broken

    @broken.setter
    def broken(self, error: DDPCommError | None) -> None:
        self._broken = None if error is None else copy.copy(error)

    def require_usable(self) -> None:
        """
        Raises:
            ClosedError: the reducer is closed.
            DDPCommError: of the type of an earlier failure.
        """
        if self.closed:
            raise ClosedError("this model is closed and averages no gradients any more; train the module inside it, or wrap it again")
        if self._broken is not None:
            raise type(self._broken)(f"an earlier failure left this model without synchronisation: {self._broken}")
