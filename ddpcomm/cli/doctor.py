"""`ddpcomm doctor`: what is installed, what really works here, and a verdict."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from ddpcomm.cli import checks
from ddpcomm.cli.output import OUTPUT, show_table

_STYLES = {"ok": "green", "missing": "yellow", "failed": "bold red"}


def doctor(ranks: Annotated[bool, typer.Option(help="Start two processes that try the transports.")] = True) -> None:
    """Says what is installed, tries every kernel and transport, and exits with 1 if training can't work here."""
    found = [*checks.versions(), *checks.hardware(), *checks.shared_memory(), *checks.kernels(), *checks.nccl()]
    if ranks:
        found += checks.transports()
    lines = [[check.area, check.what, _coloured(check.state), escape(check.detail)] for check in found]
    show_table("ddpcomm doctor", ["", "what", "", "detail"], lines, text_columns=4)
    topology = checks.gpu_topology()
    if topology:
        OUTPUT.print(topology, markup=False, highlight=False)
    verdict, works = judge(found)
    OUTPUT.print(verdict, style="bold green" if works else "bold red", markup=False, highlight=False)
    raise typer.Exit(0 if works else 1)


def _coloured(state: checks.State) -> str:
    return f"[{_STYLES[state]}]{state}[/]" if state else ""


def judge(found: list[checks.Check]) -> tuple[str, bool]:
    """The verdict in words, and whether training can work."""
    failed = [f"{check.area}: {check.what}" for check in found if check.state == "failed" and check.required]
    if failed:
        return f"verdict: NOT fit for training. Failed: {'; '.join(failed)}", False
    transports = [check.what for check in found if check.area == "transport" and check.state == "ok"]
    over = f" over {', '.join(transports)}" if transports else ""
    impaired = [f"{check.area}: {check.what}" for check in found if check.state == "failed"]
    beside = f" Impaired: {'; '.join(impaired)}." if impaired else ""
    gpus = checks.gpu_count()
    where = f"{gpus} GPU{'s' if gpus > 1 else ''} and CPU ranks" if gpus else "CPU ranks (no GPU here)"
    return f"verdict: fit for training on {where}{over}.{beside}", True
