"""`ddpcomm bench`: the benchmarks, which are part of the source tree and not of the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import typer

import ddpcomm
from ddpcomm.errors import ConfigurationError

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def bench(context: typer.Context) -> None:
    """Runs the benchmarks in their short form: `python -m bench` in the source tree, with the same arguments."""
    raise typer.Exit(subprocess.run([sys.executable, "-m", "bench", *context.args], cwd=source_tree(), check=False).returncode)


def source_tree() -> Path:
    """The current directory or the one that this package was imported from, if it is a checkout.

    Raises:
        ConfigurationError: neither is.
    """
    for root in (Path.cwd(), Path(ddpcomm.__file__).resolve().parent.parent):
        if (root / "bench" / "__main__.py").is_file() and (root / "ddpcomm").is_dir():
            return root
    raise ConfigurationError("the benchmarks are not part of the installed package: run this in a checkout of ddpcomm's source")
