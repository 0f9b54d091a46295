"""`make bench`: the short form of every benchmark, each in a process of its own, and a page of their results. Exits with the names of those
that failed."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from bench.results import SCRIPTS, write_page
from examples.arguments import directory, one_of, several

LIMIT_SECONDS = 600
OPTIONS = {"step_time": ["--transport", "process_group,shared_memory"]}
"""What the short form is given besides --short."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Runs benchmarks in their short form.")
    parser.add_argument("--only", type=several(one_of(SCRIPTS)), default=",".join(SCRIPTS), help="some of %(default)s")
    parser.add_argument("--output", type=directory, default="docs/results", help="where results go (default: %(default)s)")
    options = parser.parse_args(arguments)
    failed = [name for name in options.only if not succeeds(name, options.output)]
    if any(options.output.glob("*.jsonl")):
        sys.stderr.write(f"results: {write_page(options.output, 'make bench')}\n")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def succeeds(name: str, output: Path) -> bool:
    command = [sys.executable, "-m", f"bench.{name}", "--short", "--output", str(output), *OPTIONS.get(name, [])]
    started = time.monotonic()
    try:
        succeeded = subprocess.run(command, timeout=LIMIT_SECONDS, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        succeeded = False
    sys.stderr.write(f"bench.{name}: {time.monotonic() - started:.0f} s\n")
    return succeeded


if __name__ == "__main__":
    main()
