"""What the ranks know of each other when a wait fails: where each was, and what it had raised.

While all goes well a rank puts up where it is about once a second, from a thread, if that has changed. What ends a forward or a backward
early is put up at once. Nobody reads any of it before something has failed.
"""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ddpcomm.comm.report_board import ReportBoard
from ddpcomm.errors import BackwardInterruptedError, CollectiveTimeoutError, CommunicationError, DDPCommError, PeerLostError
from ddpcomm.whereabouts import CONSTRUCTION, OWN_CODE, Whereabouts, whereabouts

if TYPE_CHECKING:
    from ddpcomm.comm.torch_ddp import ProcessGroup
    from ddpcomm.reducer import Reducer

_LONGEST_TEXT = 2000
_MOST_RANKS = 10
_LEAD = "What the ranks had said before: "
_QUICK, _PATIENT = timedelta(seconds=0.5), timedelta(seconds=2)
_POLL_SECONDS = 0.02


class Reporter:
    """One model's, on one rank. Owns a thread once it is connected to other ranks.

    `phase`, what this rank is doing outside of backward, is set by the model.
    """

    def __init__(self) -> None:
        self.phase = CONSTRUCTION
        self._reducer: weakref.ref[Reducer] | None = None
        self._board: ReportBoard | None = None
        self._last_raised: tuple[int, str] | None = None
        self._former_end = id(_end_of_program())

    def connect(self, process_group: ProcessGroup) -> None:
        """Shares what it knows with the ranks of a group, and with no others any more. They all do so in the same order; nothing is waited
        for."""
        if self._board is not None:
            self._board.close()
        self._board = None
        if process_group.size() == 1:
            return
        me = weakref.ref(self)

        def describe() -> dict[str, Any] | None:
            owner = me()
            return None if owner is None else asdict(owner.here())

        self._board = ReportBoard.of(process_group, describe)

    def follow(self, reducer: Reducer) -> None:
        """Construction is over: from now on this reducer tells where the rank is."""
        self._reducer = weakref.ref(reducer)
        self.phase = OWN_CODE

    def close(self) -> None:
        """Puts up the exception that ends this process, if one does, and ends the thread. Idempotent."""
        error = _end_of_program()
        if error is not None and id(error) != self._former_end:
            self.raised(error)
        if self._board is not None:
            self._board.close()

    def here(self) -> Whereabouts:
        """Where this rank is now."""
        reducer = self._reducer() if self._reducer is not None else None
        return Whereabouts(self.phase) if reducer is None else whereabouts(reducer, self.phase)

    # ---- this rank tells --------------------------------------------------------------------------------------------

    def raised(self, error: BaseException, where: Whereabouts | None = None, wait: timedelta | None = None) -> None:
        """Tells of an exception, once, and where it was raised. What merely passes on another rank's is not told.

        Args:
            where: None means here.
            wait: until it has been told, at most this long.
        """
        if self._board is None or isinstance(error, (CommunicationError, BackwardInterruptedError)):
            return
        text, where = f"{type(error).__name__}: {error}"[:_LONGEST_TEXT], where or self.here()
        if self._last_raised != (where.backwards, text):  # the exception itself isn't kept: it would keep all that it has come by
            self._last_raised = where.backwards, text
            self._board.post("raised", [time.time(), asdict(where), text], wait)

    @contextlib.contextmanager
    def watching(self, doing: str) -> Iterator[None]:
        """Deals with whatever ends the block: what this rank raised is told to the others, what it heard is explained."""
        try:
            yield
        except BaseException as error:
            self.failed(error, doing)
            raise

    def failed(self, error: BaseException, doing: str = "") -> None:
        """Tells the others of this rank's exception; explains one that came from them."""
        if isinstance(error, (CommunicationError, BackwardInterruptedError)):
            self.explain(error, doing)
        else:
            self.raised(error, wait=_QUICK)

    # ---- this rank asks ---------------------------------------------------------------------------------------------

    def explain(self, error: DDPCommError, doing: str = "") -> None:
        """Adds to an error what the other ranks had said, in milliseconds; where the store doesn't answer, in two and a half seconds at
        most, or one if the rank that is lost is known.

        Args:
            error: is changed in place.
            doing: what could not be done, for the head of the message.
        """
        if _LEAD in str(error) or not isinstance(error, (CommunicationError, BackwardInterruptedError)):
            return
        head = f"{doing} failed: {error}" if doing else str(error)
        known = "; ".join(self._known(error))
        error.args = (f"{head} {_LEAD}{known}." if known else head, *error.args[1:])

    def _known(self, error: DDPCommError) -> Iterator[str]:
        board = self._board
        if board is None:
            return
        here = self.here()
        others = [rank for rank in range(board.world_size) if rank != board.rank]
        if isinstance(error, BackwardInterruptedError):
            yield from self._raised_by(others, here.backwards, wait=True)
            return
        yield from self._raised_by(others, here.backwards, wait=False)
        suspects: tuple[int, ...] = ()
        limit = _PATIENT
        if isinstance(error, PeerLostError):
            yield from self._who_is_lost(board, error, others)
            suspects, limit = (() if error.lost_rank is None else (error.lost_rank,)), _QUICK
        elif isinstance(error, CollectiveTimeoutError):
            suspects = error.missing_ranks
        told = board.read("where", others, limit)
        places = {rank: (at, Whereabouts(**where)) for rank, (at, where) in told.items()}
        behind = [rank for rank, (_, place) in places.items() if place.is_behind(here)]
        if isinstance(error, PeerLostError) and suspects:
            behind = []  # who is lost is known
        shown = list(dict.fromkeys([*(rank for rank in suspects if rank in others), *behind]))
        for rank in shown[:_MOST_RANKS]:
            if rank in places:
                at, place = places[rank]
                yield f"rank {rank} {place} ({_age(at)})"
            else:
                yield f"rank {rank} had said nothing"
        if len(shown) > _MOST_RANKS:
            yield f"{len(shown) - _MOST_RANKS} more ranks were behind as well"

    def _who_is_lost(self, board: ReportBoard, error: PeerLostError, others: list[int]) -> Iterator[str]:
        """Some ranks can tell which one is lost, and the others hear it from them."""
        if error.lost_rank is not None:
            board.post("lost", error.lost_rank)
            return
        for rank, lost in board.read("lost", others, _QUICK).items():
            error.lost_rank = lost if lost != board.rank else None
            yield f"rank {rank} found rank {lost} to be lost"
            return

    def _raised_by(self, others: list[int], backwards: int, *, wait: bool) -> Iterator[str]:
        """What the ranks have raised in this step. A rank that is interrupted learns of its own exception a moment after the others do."""
        board = self._board
        deadline = time.monotonic() + (1.0 if wait else 0.0)
        while board is not None:
            told = board.read("raised", others, _QUICK)
            found = {rank: note for rank, note in told.items() if note[1]["backwards"] >= backwards - (not wait)}
            if found or time.monotonic() >= deadline:
                for rank, (at, where, text) in list(found.items())[:_MOST_RANKS]:
                    yield f"rank {rank} {Whereabouts(**where)}, and raised {text} ({_age(at)})"
                return
            time.sleep(_POLL_SECONDS)


def _end_of_program() -> BaseException | None:
    """The exception that was last printed because nobody caught it. In an interactive session it may be an old one."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None


def _age(at: float) -> str:
    return f"{max(time.time() - at, 0.0):.1f} s ago, by its clock"
