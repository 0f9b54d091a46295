"""The status words: what the ranks tell each other at the end of every backward, summed by the last bucket's own all-reduce.

One word is one element of the bucket, which may be of a 16-bit type, and is divided like a gradient. So a word says no more than "0" or
"not 0", but for the digits of a rank, small enough to survive both.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Notice(enum.IntEnum):
    """What one rank has to say. The value is the word's place."""

    INTERRUPTED = 0
    """Its backward raised; what it sent is void."""
    FAILED = 1
    """It met an error that it keeps until now, so that all ranks raise together."""
    LATE = 2
    """A parameter received a gradient after its bucket had gone out."""
    CHANGED = 3
    """Its set of trainable parameters is no longer the one that the buckets were laid out for."""
    LEARNED = 4
    """It has seen the order in which gradients become ready (rank 0 alone says so)."""
    NONFINITE = 5
    """Some of its gradients are not finite; said only where the user wants to know."""


TAGS = 4
_DIGITS = 3
_DIGIT_BASE = 32
_DIGITS_AT = len(Notice)
_TAG_AT = _DIGITS_AT + _DIGITS
STATUS_NUMEL = _TAG_AT + TAGS


@dataclass(frozen=True)
class Status:
    """What all ranks together said.

    `interrupted_rank` is known when one rank alone was interrupted, else None. `mixed` means that the ranks reduced buckets of
    different models with one another.
    """

    notices: frozenset[Notice]
    interrupted_rank: int | None
    mixed: bool

    def __contains__(self, notice: Notice) -> bool:
        return notice in self.notices


def encode(notices: set[Notice], rank: int, tag: int) -> tuple[float, ...]:
    """This rank's words. `tag`, from 0 to TAGS - 1, is the same on all ranks and differs between models."""
    words = [0.0] * STATUS_NUMEL
    for notice in notices:
        words[notice] = 1.0
    if Notice.INTERRUPTED in notices:
        for digit in range(_DIGITS):
            words[_DIGITS_AT + digit] = float(rank // _DIGIT_BASE**digit % _DIGIT_BASE)
    words[_TAG_AT + tag] = 1.0
    return tuple(words)


def decode(words: Sequence[float], divisor: float) -> Status:
    """Reads the sum over the ranks of their words, which was divided by `divisor`."""
    notices = frozenset(notice for notice in Notice if words[notice] != 0)
    interrupted_rank = None
    if round(words[Notice.INTERRUPTED] * divisor) == 1:
        interrupted_rank = sum(round(words[_DIGITS_AT + digit] * divisor) * _DIGIT_BASE**digit for digit in range(_DIGITS))
    mixed = sum(word != 0 for word in words[_TAG_AT : _TAG_AT + TAGS]) > 1
    return Status(notices, interrupted_rank, mixed)
