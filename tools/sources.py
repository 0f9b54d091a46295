"""Which files of this repository are sources, for the checks in this directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_SOURCES = {"build", "dist", "runs", "__pycache__"}


def files(root: Path, *suffixes: str) -> Iterator[Path]:
    """Every file below `root` with one of the suffixes, sorted; build outputs, eggs and hidden directories left out."""
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if path.name.startswith(".") or path.name in NOT_SOURCES or path.name.endswith(".egg-info"):
            continue
        if path.is_dir():
            yield from files(path, *suffixes)
        elif path.suffix in suffixes:
            yield path
