"""`make bench`: the short form of every benchmark, each in a process of its own. Exits with the names of those that failed."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

SCRIPTS = ("step_time", "allreduce", "kernels", "validate")
LIMIT_SECONDS = 600


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs benchmarks in their short form.")
    parser.add_argument("--only", default=",".join(SCRIPTS), help="some of %(default)s")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="where rows and pictures go (default: %(default)s)")
    options = parser.parse_args()
    failed = [name for name in options.only.split(",") if not succeeds(name, options.output)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def succeeds(name: str, output: Path) -> bool:
    sys.stderr.write(f"bench.{name}\n")
    command = [sys.executable, "-m", f"bench.{name}", "--short", "--output", str(output)]
    try:
        return subprocess.run(command, timeout=LIMIT_SECONDS, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


if __name__ == "__main__":
    main()
