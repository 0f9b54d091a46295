"""The command line that the benchmarks share, and what they leave behind: a table, rows, a picture."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.models import CASES
from bench.report import Table
from bench.rows import Row, write_rows
from bench.subjects import TRANSPORTS
from examples.arguments import at_least, directory, one_of, several


def parser(
    description: str | None,
    *,
    rounds: int | None,
    models: str = "",
    transports: str = "",
    ranks: int | None = 2,
    output: str = "runs/bench",
) -> argparse.ArgumentParser:
    """Options of every script; --models, --transport and --ranks where it has them. The description is a docstring, of which the first line
    is shown."""
    made = argparse.ArgumentParser(description=description.splitlines()[0] if description else None)
    if models:
        made.add_argument(
            "--models", type=several(one_of(CASES)), default=models, help=f"some of {','.join(CASES)}, with commas (default: %(default)s)"
        )
    if transports:
        made.add_argument(
            "--transport",
            type=several(one_of(TRANSPORTS)),
            default=transports,
            help=f"some of {','.join(TRANSPORTS)}, with commas (default: %(default)s)",
        )
    if ranks is not None:
        made.add_argument("--ranks", type=at_least(1), default=ranks, help="(default: %(default)s)")
    if rounds is not None:
        made.add_argument("--steps", type=at_least(1), default=rounds, help="rounds to measure (default: %(default)s)")
    made.add_argument("--short", action="store_true", help="few rounds: shows that it works, says little")
    made.add_argument("--output", type=directory, default=output, help="where the rows and the picture go (default: %(default)s)")
    return made


def publish(
    name: str,
    rows: Sequence[Row],
    output: Path,
    tables: Callable[[Sequence[Row]], Sequence[Table]] | None,
    plot: Callable[[Sequence[Row], Path], None],
) -> None:
    """Shows the tables, unless they were shown already, and writes NAME.jsonl and NAME.png."""
    for table in tables(rows) if tables else ():
        table.show()
    write_rows(rows, output / f"{name}.jsonl")
    plot(rows, output / f"{name}.png")
