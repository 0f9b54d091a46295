"""`ddpcomm timeline`: the summary of a trace file, and its picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddpcomm.cli.output import OUTPUT, show_table
from ddpcomm.trace import merge, write
from ddpcomm.trace_picture import draw
from ddpcomm.trace_summary import Summary, summarize


def timeline(
    traces: Annotated[list[Path], typer.Argument(help="A trace file, or one for each rank.", exists=True, dir_okay=False)],
    png: Annotated[Path | None, typer.Option(help="Where the picture goes; by default beside the first file.")] = None,
    picture: Annotated[bool, typer.Option(help="Draw one.")] = True,
    merged: Annotated[Path | None, typer.Option(help="Also write all ranks into this file.")] = None,
) -> None:
    """Prints what a timeline comes to, and draws a typical step."""
    found = merge(traces)
    summary = summarize(found)
    show(summary)
    if merged is not None:
        write(found, merged)
        OUTPUT.print(f"all ranks: {merged}", soft_wrap=True, markup=False, highlight=False)
    if picture:
        target = png or traces[0].with_suffix(".png")
        draw(found, summary, target)
        OUTPUT.print(f"picture: {target}", soft_wrap=True, markup=False, highlight=False)


def show(summary: Summary) -> None:
    """Prints tables by rank and by bucket, and the four findings."""
    where = f"{summary.world_size} ranks on {summary.device}, {summary.transport}"
    ranks = [
        [
            str(rank.rank),
            str(rank.steps),
            *(f"{ms:.2f}" for ms in (rank.backward_ms, rank.communication_ms)),
            f"{rank.overlap_share:.0%}",
            *(f"{ms:.2f}" for ms in (rank.exposed_ms, rank.wait_ms, rank.lateness_ms)),
        ]
        for rank in summary.ranks
    ]
    columns = ["rank", "steps", "backward ms", "communication ms", "overlap", "exposed ms", "waiting ms", "late by ms"]
    show_table(f"{where}; medians over steps", columns, ranks)
    buckets = [
        [
            str(bucket.bucket),
            bucket.parameters or "(status alone)",
            f"{bucket.nbytes / 2**20:.3f}",
            *(f"{ms:.3f}" for ms in (bucket.ready_ms, bucket.flatten_ms, bucket.all_reduce_ms)),
            f"{bucket.busbw_bytes_per_second / 1e9:.2f}",
            f"{bucket.unflatten_ms:.3f}",
        ]
        for bucket in summary.buckets
    ]
    columns = ["bucket", "parameters", "MiB", "ready ms", "flatten ms", "all-reduce ms", "busbw GB/s", "unflatten ms"]
    show_table("buckets; medians over steps and ranks", columns, buckets, text_columns=2)
    for line in findings(summary):
        OUTPUT.print(line, markup=False, highlight=False)


def findings(summary: Summary) -> list[str]:
    """Overlap share, exposed time, slowest bucket, straggling rank: a line each."""
    slowest, straggler = summary.slowest_bucket, summary.straggler
    lines = [
        f"overlap share: {summary.overlap_share:.0%} of the communication lay within backward",
        f"exposed: {summary.exposed_ms:.2f} ms a step, on the rank where it is the most",
        f"slowest bucket: {slowest.bucket} ({slowest.nbytes / 2**20:.3f} MiB), {slowest.all_reduce_ms:.3f} ms",
    ]
    if straggler is not None:
        lines.append(
            f"straggling rank: {straggler.rank}, the last in {straggler.last_share:.0%} of the all-reduces, "
            f"{straggler.lateness_ms:.2f} ms behind the first on average"
        )
    if summary.clock_error_ms:
        lines.append(f"clocks of different hosts: laid over each other to within {summary.clock_error_ms:.3f} ms")
    return lines
