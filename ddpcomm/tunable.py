"""What a tuner may change of a reducer, and when it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcomm.comm.base import Communicator
from ddpcomm.errors import CommunicationError, DDPCommError

if TYPE_CHECKING:
    from ddpcomm.auto_tuning import AutoTuner


class Tunable:
    """Base of Reducer."""

    broken: DDPCommError | None
    communicator: Communicator

    def __init__(self) -> None:
        self.tuner: AutoTuner | None = None
        self.bucket_ends: frozenset[str] | None = None
        """Names of the parameters after which buckets end, in place of the sizes in the options."""
        self.holds_buckets_back = False
        """Whether no bucket goes out before the end of backward, so that backward's own times can be taken."""

    def stop_tuning(self) -> None:
        """Ends what the tuner has under way; the next layout goes by sizes. Local, idempotent; all ranks must do so at one time."""
        tuner, self.tuner = self.tuner, None
        if tuner is not None:
            tuner.close()
        self.bucket_ends = None
        self.holds_buckets_back = False

    def switch_to(self, communicator: Communicator) -> None:
        """Goes on by another communicator over the same ranks. Collective where its `empty` is; no backward may be under way."""
        communicator.timer, self.communicator.timer = self.communicator.timer, None
        self.communicator = communicator
        self.arrange()

    def arrange(self) -> None:
        """Makes the buckets anew."""
        raise AttributeError("arrange")

    def _tune(self, *, took_part: bool) -> None:
        """A backward that synchronised has ended well, on all ranks."""
        tuner = self.tuner
        if tuner is None:
            return
        try:
            tuner.backward_ended(took_part=took_part)
        except CommunicationError as error:
            self.broken = error
            raise
        if not tuner.running and self.tuner is tuner:
            self.tuner = None
