"""Every error that ddpcomm raises.

An error says what happened, to which parameter, bucket and rank, and what to do about it. All derive from `DDPCommError`, which is a
`RuntimeError`, so that code written for torch's own DDP goes on catching them.
"""

from __future__ import annotations

from collections.abc import Sequence


class DDPCommError(RuntimeError):
    """Base of every error of this package."""


class ConfigurationError(DDPCommError, ValueError):
    """An argument, or a combination of arguments, that ddpcomm can't serve. Raised before anything is changed."""


class ConfigurationTypeError(DDPCommError, TypeError):
    """An argument of the wrong type. Raised before anything is changed."""


class TransportUnavailableError(ConfigurationError):
    """A transport can't serve these ranks on these machines. Raised on every rank of the group; another transport may do."""


class SharedMemoryFullError(DDPCommError, MemoryError):
    """There is no memory left for a tensor that all ranks of the host can reach. Nothing was sent."""


class PlanError(ConfigurationError):
    """A saved plan of the buckets can't be read, or was made for another model. The message names the first thing that doesn't fit."""


class ClosedError(DDPCommError):
    """A resource was used after its `close()`."""


class RankMismatchError(DDPCommError):
    """The ranks hold different models or options. Raised with the same message on every rank."""


class CommunicationError(DDPCommError):
    """A collective failed. The communicator can't be used any further unless the message says so."""


class PeerLostError(CommunicationError):
    """A rank died, or its connection broke, during a collective.

    `lost_rank` is that rank where the transport can tell, else None.
    """

    def __init__(self, message: str, lost_rank: int | None = None) -> None:
        super().__init__(message)
        self.lost_rank = lost_rank


class CollectiveTimeoutError(CommunicationError, TimeoutError):
    """A collective did not end within its time limit.

    `missing_ranks` are those that had not arrived, where the transport can tell, else empty.
    """

    def __init__(self, message: str, missing_ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing_ranks = tuple(missing_ranks)


class CollectiveMismatchError(CommunicationError):
    """The ranks issued different collectives at the same place in their sequence."""


class SynchronizationError(DDPCommError):
    """Gradients could not be averaged as promised. Raised on every rank, at the end of the same backward."""


class LateGradientError(SynchronizationError):
    """A parameter received a gradient after its bucket had gone out, in memory that could not be reduced again."""


class LostGradientError(SynchronizationError):
    """A parameter's gradient was taken away or changed in kind before its bucket went out."""


class BackwardInterruptedError(SynchronizationError):
    """On some rank backward ended early, with an exception, so that this backward has no average."""


class StepMismatchError(SynchronizationError):
    """The ranks synchronise different steps: one of them skipped a backward, or ran one more."""


class NonFiniteGradientError(SynchronizationError):
    """Gradients hold infinities or not-a-numbers: those of a backward, with `nonfinite="raise"`, or those whose norm was asked for."""


class CommHookError(DDPCommError):
    """A communication hook broke its contract: what it returned is not a future of one tensor of the bucket's size."""


class UnsynchronizedGradientError(DDPCommError):
    """An optimizer was about to step on gradients that are not the average over the ranks."""
