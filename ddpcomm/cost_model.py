"""What one all-reduce costs, over its size: the piece that the simulator and the tuner have in common.

Times are seconds and integers of nanoseconds, not `timedelta`, whose microseconds are too coarse for an all-reduce.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ddpcomm.errors import ConfigurationError

NANOSECONDS = 1_000_000_000


class CostModel(Protocol):
    """Seconds of one all-reduce of `size_bytes` bytes on every rank, alone on the machine."""

    def seconds(self, size_bytes: float) -> float: ...


@dataclass(frozen=True)
class LinearCost:
    """Latency + size / bandwidth."""

    latency_seconds: float
    bytes_per_second: float

    def seconds(self, size_bytes: float) -> float:
        return self.latency_seconds + size_bytes / self.bytes_per_second


@dataclass(frozen=True)
class MeasuredCost:
    """Latency + size / bandwidth in pieces, through measured points.

    A transport changes its algorithm as sizes grow, each with more latency and more bandwidth than the one before: no single line fits.
    Between two points the model goes along their chord, and beyond the last one on as between the last two.

    Args:
        points: bytes and seconds, at least two, of different sizes.

    Raises:
        ConfigurationError: fewer than two sizes, a size below 0, or a time that is not above 0.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        if len({size for size, _ in self.points}) < 2:
            raise ConfigurationError(f"a cost model needs times at two sizes or more, got {self.points}")
        for size, seconds in self.points:
            if size < 0 or not seconds > 0:
                raise ConfigurationError(f"an all-reduce of {size} bytes can't take {seconds} s")
        by_size = {size: [t for s, t in self.points if s == size] for size, _ in sorted(self.points)}
        # A larger all-reduce that seems faster than a smaller one is noise, and would mislead a search for the best buckets.
        points: list[tuple[int, float]] = []
        for size, times in by_size.items():
            points.append((size, max(sorted(times)[len(times) // 2], points[-1][1] if points else 0.0)))
        object.__setattr__(self, "points", tuple(points))

    def seconds(self, size_bytes: float) -> float:
        points = self.points
        index = min(max(bisect_left(points, (size_bytes,)), 1), len(points) - 1)
        (left, low), (right, high) = points[index - 1], points[index]
        return low + (high - low) * max(size_bytes - left, 0.0) / (right - left)

    def to_json(self) -> dict[str, Any]:
        return {"points": [list(point) for point in self.points]}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> MeasuredCost:
        return cls(tuple((int(size), float(seconds)) for size, seconds in content["points"]))
