"""What tunes the shared-memory transport, with the measurements behind the defaults."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

from ddpcomm.errors import ConfigurationError


@dataclass(frozen=True)
class SharedMemorySettings:
    """The same on all ranks. The defaults are from bench/allreduce.py on two Ice Lake cores with 48 MiB of shared cache.

    Args:
        piece_bytes: tensors that are not from `empty()` travel in pieces of this size. Tests make it small to reach many pieces.
        small_bytes: all-reduces up to this size take one step, through a copy.
        stream_bytes: from this size on results are written around the caches.
        spin: how long a wait looks for news before it sleeps; None means 20 us where every rank has a core, 0 otherwise.
        instruction_set: "avx512", "avx2" or "baseline"; empty means the best one here.
    """

    piece_bytes: int = 1 << 20
    small_bytes: int = 32 << 10
    stream_bytes: int = 16 << 20
    spin: timedelta | None = None
    instruction_set: str = ""

    def __post_init__(self) -> None:
        for name in ("piece_bytes", "small_bytes", "stream_bytes"):
            if getattr(self, name) < 64:
                raise ConfigurationError(f"{name} must be at least 64, got {getattr(self, name)}")

    def spin_for(self, world_size: int) -> timedelta:
        """How long to spin with this many ranks on the cores that this process may use."""
        if self.spin is not None:
            return self.spin
        cores = len(os.sched_getaffinity(0))
        return timedelta(microseconds=20 if world_size <= cores else 0)
