"""The exception that ended a backward: autograd's engine lets go of the backward before Python sees it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

_MOST_LOOKS = 2000  # the interpreter looks 32 times at every turn that it takes; it takes a few before the exception has arrived


class _Look:
    """Waits for an exception that wasn't there when this was made."""

    def __init__(self, tell: Callable[[BaseException], None]) -> None:
        self._tell = tell
        self._known = _visible()
        self._left = _MOST_LOOKS

    def is_done(self) -> bool:
        """Looks once. Whether the exception has been told of, or is given up."""
        self._left -= 1
        for error in _visible():
            if error is not None and not any(error is known for known in self._known):
                self._tell(error)
                return True
        return self._left <= 0


_looks: list[_Look] = []  # of this process's main thread: the interpreter keeps no reference


def _look_around(_: object) -> int:
    _looks[:] = [look for look in _looks if not look.is_done()]
    if _looks:
        _ask()
    return 0


_LOOK_AROUND = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_look_around)


def when_raised(tell: Callable[[BaseException], None]) -> None:
    """Calls `tell`, soon and in the main thread, with the exception that is about to be raised there. Never, if none is seen.

    An exception that is being handled already when this is called doesn't count.
    """
    _looks.append(_Look(tell))
    _ask()


def _ask() -> None:
    """For a look as soon as the interpreter runs Python code in the main thread."""
    if ctypes.pythonapi.Py_AddPendingCall(_LOOK_AROUND, None) != 0:
        _looks.clear()  # too many calls wait already


def _visible() -> tuple[BaseException | None, BaseException | None]:
    """What is being handled, and what has ended the program."""
    return sys.exc_info()[1], getattr(sys, "last_value", None)
