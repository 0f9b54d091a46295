"""The order in which a rank issues collectives, as a number and a digest that ranks can compare."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Operation(NamedTuple):
    """One collective, as errors name it. `tag` is the caller's own name for it, such as "bucket 3"."""

    number: int
    name: str
    nbytes: int
    dtype: torch.dtype
    detail: str
    tag: str

    def __str__(self) -> str:
        tag = f" of {self.tag}" if self.tag else ""
        return f"{self.name}{tag} ({self.nbytes} bytes, {self.dtype}, {self.detail}; collective number {self.number})"


@dataclass(frozen=True)
class Position:
    """How many collectives a rank has issued, a digest of them all, and the last in words."""

    count: int
    digest: int
    last: str


class CollectiveOrder:
    """Counts and digests what this rank issues. Two ranks that issued the same have the same digest, else another one (but for chance,
    one in 2^32).

    Digests are kept where the count is a power of two: comparing those now and then costs next to nothing, and finds a difference
    before twice as many collectives have been issued.
    """

    def __init__(self) -> None:
        self.checkpoints: list[tuple[int, int]] = []
        self._count = 0
        self._digest = 0
        self._last: Operation | None = None

    def add(self, name: str, nbytes: int, dtype: torch.dtype, detail: str, tag: str) -> Operation:
        """Takes note of the next collective. The tag may differ between ranks."""
        operation = Operation(self._count, name, nbytes, dtype, detail, tag)
        self._digest = zlib.crc32(f"{name},{nbytes},{dtype},{detail};".encode(), self._digest)
        self._count += 1
        self._last = operation
        if self._count & (self._count - 1) == 0:
            self.checkpoints.append((self._count, self._digest))
        return operation

    def position(self) -> Position:
        return Position(self._count, self._digest, str(self._last) if self._last else "none")
