"""Checks the size of every source file, and that the product holds nothing unfinished. Exits with the list of what is wrong."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.sources import ROOT, files

MAXIMUM_LINES = 400
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
PRODUCT = ("ddpcomm", "kernels", "csrc")


def problems(root: Path) -> Iterator[str]:
    for path in files(root, ".py", ".h", ".cpp", ".cu", ".inc", ".cuh", ".sh"):
        name = path.relative_to(root)
        lines = path.read_text(encoding="utf-8").splitlines()
        if len(lines) > MAXIMUM_LINES:
            yield f"{name}: {len(lines)} lines; split it, the limit is {MAXIMUM_LINES}"
        if name.parts[0] in PRODUCT:
            for number, line in enumerate(lines, start=1):
                if found := UNFINISHED.search(line):
                    yield f"{name}:{number}: {found[0]}; finish it, or raise a typed error that says what to do"


if __name__ == "__main__":
    sys.exit("\n".join(problems(ROOT)) or None)
