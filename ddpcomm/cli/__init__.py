"""The command line, `ddpcomm`: one module for each subcommand."""

from __future__ import annotations

import sys

import typer

from ddpcomm.cli import bench, doctor, plan, timeline
from ddpcomm.cli.output import ERRORS
from ddpcomm.errors import DDPCommError

COMMANDS = (doctor.doctor, timeline.timeline, plan.plan)

app = typer.Typer(
    help="Gradient synchronisation for data-parallel PyTorch training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # an error of the user's is told in a line by `main`, one of ours by its plain stack
)
for command in COMMANDS:
    app.command()(command)
app.command(context_settings=bench.PASS_ON)(bench.bench)


def main() -> None:
    """Runs a subcommand. Exits with 1 where its verdict is bad, with 2 where it was called wrongly or a file can't be had."""
    try:
        app()
    except (DDPCommError, OSError) as error:
        ERRORS.print(f"ddpcomm: {error}", style="bold red", markup=False, highlight=False)
        sys.exit(2)
