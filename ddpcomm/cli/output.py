"""Where the subcommands write, and how their tables look."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

_PAGE_WIDTH = 120  # of a log file

OUTPUT = Console(width=None if sys.stdout.isatty() else _PAGE_WIDTH)
ERRORS = Console(stderr=True, width=None if sys.stderr.isatty() else _PAGE_WIDTH)


def show_table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]], *, text_columns: int = 1) -> None:
    """The first `text_columns` columns hold text, all others numbers."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < text_columns else "right")
    for line in lines:
        table.add_row(*line)
    OUTPUT.print(table)
