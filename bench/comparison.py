"""Predicted figures beside published ones, and how far apart they are. `bench/data` holds the published figures with their sources."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from bench.rows import Row, percentiles

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Comparison:
    """One predicted figure beside the published one.

    Args:
        what: which of the validations.
        case: of what.
        ranks: how many GPUs.
        unit: of both figures.
        predicted, published: the figures.
        error: relative for times; in points for efficiencies and gains.
    """

    what: str
    case: str
    ranks: int
    unit: str
    predicted: float
    published: float
    error: float

    def row(self) -> Row:
        details: dict[str, Any] = {"published": self.published, "error": self.error}
        statistics = percentiles([self.predicted])
        return Row(
            *("validate", self.case, "ddpcomm", self.what, self.unit, self.ranks, "float32", {}),
            **statistics,
            measured=False,
            details=details,
            device="cuda",
        )


def read(name: str) -> list[dict[str, str]]:
    """A file of published figures, without its comments."""
    lines = (DATA / name).read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


@cache
def published_steps() -> Mapping[str, Mapping[int, float]]:
    """Seconds a step, by model and number of GPUs; 0 stands for one GPU without DDP."""
    found: dict[str, dict[int, float]] = {}
    for row in read("ddp_published.csv"):
        found.setdefault(row["model"], {})[int(row["gpus"])] = float(row["seconds"])
    return found


def pairs_in_order(comparisons: Sequence[Comparison]) -> tuple[int, int]:
    """How many pairs of cases stand in the published order, and of how many."""
    pairs = [(a, b) for i, a in enumerate(comparisons) for b in comparisons[i + 1 :] if a.published != b.published]
    return sum((a.predicted - b.predicted) * (a.published - b.published) > 0 for a, b in pairs), len(pairs)


def mean_error(comparisons: Sequence[Comparison]) -> float:
    """Of the errors' sizes."""
    return mean(abs(comparison.error) for comparison in comparisons)


def largest_error(comparisons: Sequence[Comparison]) -> float:
    """Of the errors' sizes."""
    return max(abs(comparison.error) for comparison in comparisons)
