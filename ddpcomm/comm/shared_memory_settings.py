"""What tunes the shared-memory transport, with the measurements behind the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from ddpcomm.argument_checks import check_integer
from ddpcomm.errors import ConfigurationError, ConfigurationTypeError

_INSTRUCTION_SETS = ("avx512", "avx2", "baseline")


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
            check_integer(name, getattr(self, name), least=64)
        if not isinstance(self.longest_spin, timedelta):
            raise ConfigurationTypeError(f"longest_spin must be a datetime.timedelta, got {self.longest_spin!r}")
        if self.longest_spin < timedelta(0):
            raise ConfigurationError(f"longest_spin must not be negative, got {self.longest_spin}")
        if self.instruction_set != "" and self.instruction_set not in _INSTRUCTION_SETS:
            raise ConfigurationError(f"instruction_set must be one of {', '.join(_INSTRUCTION_SETS)}, got {self.instruction_set!r}")
