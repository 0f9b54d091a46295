"""What has changed between two runs?

    python -m bench.diff runs/before runs/after

Takes two files of rows, or two directories of such files, and compares row by row what both have. A ratio below 1 means that the second has
less: less time, or less loss. Whether the ranges from p20 to p80 overlap says whether the difference can be told from noise. Rows of
different machines are not comparable: that ends it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

from bench.report import Table
from bench.rows import Row, read_rows

Pair = tuple[Row, Row]


class NotComparableError(ValueError):
    """Two runs that must not, or can't, be compared."""


def load(path: Path) -> list[Row]:
    """The rows of a file, or of all files of rows in a directory.

    Raises:
        NotComparableError: there are none.
        ValueError: a row of another schema.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path] if path.is_file() else []
    rows = [row for file in files for row in read_rows(file)]
    if not rows:
        raise NotComparableError(f"{path} holds no rows: give a file that a benchmark wrote, or a directory with such files")
    return rows


def key(row: Row) -> Hashable:
    """What was measured, apart from when, where and by which version."""
    sizes = tuple(sorted(row.sizes.items()))
    return row.bench, row.case, row.subject, row.quantity, row.unit, row.ranks, row.dtype, row.device, row.measured, sizes


def pairs(before: Sequence[Row], after: Sequence[Row]) -> list[Pair]:
    """Rows of the same thing, in the order of the first run; where a run has it several times, its last.

    Raises:
        NotComparableError: the runs have nothing in common, or were made on different machines.
    """
    later = {key(row): row for row in after}
    found = [(row, later[name]) for name, row in {key(row): row for row in before}.items() if name in later]
    if not found:
        raise NotComparableError(f"nothing was measured in both: the first has {named(before)}, the second {named(after)}")
    for one, other in found:
        if one.machine != other.machine:
            raise NotComparableError(
                f"{one.bench}, {one.case}, {one.subject} was measured on different machines, so a difference would say nothing:\n"
                f"  {json.dumps(one.machine)}\n  {json.dumps(other.machine)}"
            )
    return found


def named(rows: Iterable[Row]) -> str:
    return ", ".join(sorted({f"{row.bench} ({row.device})" for row in rows}))


def overlap(one: Row, other: Row) -> bool:
    return one.p20 <= other.p80 and other.p20 <= one.p80


def table(found: Sequence[Pair]) -> Table:
    lines = []
    for one, other in found:
        what = ", ".join(f"{name} {size}" for name, size in one.sizes.items() if name in DISTINGUISHING)
        name = f"{one.bench}: {one.case}, {one.subject}, {one.quantity}, {one.ranks} ranks{', ' + what if what else ''}"
        ratio = f"{other.p50 / one.p50:.3f}" if one.p50 > 0 and other.p50 > 0 else "-"
        lines.append([name, f"{one.p50:.4g} {one.unit}", f"{other.p50:.4g} {other.unit}", ratio, "yes" if overlap(one, other) else "no"])
    first, second = found[0]
    title = f"medians at commit {first.commit} and at {second.commit}, {len(found)} rows that both have"
    return Table(title, ["row", "first", "second", "ratio", "p20 to p80 overlap"], lines)


DISTINGUISHING = ("bucket_bytes", "communicators", "every")
"""Sizes that the case doesn't tell."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("first", type=Path, help="file or directory of rows")
    parser.add_argument("second", type=Path, help="file or directory of rows")
    options = parser.parse_args(arguments)
    try:
        table(pairs(load(options.first), load(options.second))).show()
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
