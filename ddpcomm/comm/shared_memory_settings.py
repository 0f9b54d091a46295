"""What tunes the shared-memory transport, with the measurements behind the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from ddpcomm.errors import ConfigurationError


@dataclass(frozen=True)
class SharedMemorySettings:
    """The same on all ranks. The defaults are from bench/allreduce.py on two Ice Lake cores with 48 MiB of shared cache.

    Args:
        piece_bytes: tensors that are not from `empty()` travel in pieces of this size. Tests make it small to reach many pieces.
        small_bytes: all-reduces up to this size take one step, through a copy.
        longest_spin: how long a wait may look for news before it sleeps. It sleeps sooner where spinning has found nothing of late, as on
            cores that are busy otherwise.
        instruction_set: "avx512", "avx2" or "baseline"; empty means the best one here.
    """

    piece_bytes: int = 128 << 10
    small_bytes: int = 32 << 10
    longest_spin: timedelta = timedelta(microseconds=100)
    instruction_set: str = ""

    def __post_init__(self) -> None:
        for name in ("piece_bytes", "small_bytes"):
            if getattr(self, name) < 64:
                raise ConfigurationError(f"{name} must be at least 64, got {getattr(self, name)}")
