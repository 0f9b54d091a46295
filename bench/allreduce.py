"""How fast is an all-reduce among CPU ranks, beside Gloo, MPI and a plain copy of the same bytes?

    python -m bench.allreduce --ranks 2,4,8 --rounds 40

All subjects are in the same processes and take turns, in an order that rotates; each sample is the slowest rank's. algbw and busbw are as
nccl-tests define them: bytes / time, and algbw * 2 (n - 1) / n.

The limit is a count of bytes: an all-reduce in place reads S bytes and writes S bytes on each rank, however many there are (S / n from
each rank's tensor, S / n into each). Two subjects move just as many, on all ranks at the same time: "copy" is memcpy, whose stores may
also read what they overwrite; "rewrite" is a pass over one tensor in place, whose stores never have to. The faster of the two is the
limit, and a figure's share of it is that one's time over its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from bench import mpi
from bench.allreduce_rank import COPY, GLOO, MPI, OWN, REWRITE
from bench.cli import publish
from bench.report import Table, save
from bench.rows import Row, percentiles
from examples.arguments import at_least, directory, one_of, several

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB, 25 * MIB, 128 * MIB)
DTYPES = ("float32", "bfloat16")
LIMIT_SECONDS = 1200


def run(ranks: int, cases: Sequence[tuple[int, str]], rounds: int, with_mpi: bool) -> list[Row]:
    """Measures in fresh processes.

    Raises:
        subprocess.CalledProcessError: a rank failed; its output was shown.
        subprocess.TimeoutExpired: it took too long; the ranks were killed.
    """
    with tempfile.TemporaryDirectory() as directory:
        task, result = Path(directory) / "task.json", Path(directory) / "result.json"
        content = {"ranks": ranks, "cases": cases, "rounds": rounds, "mpi": with_mpi, "store": f"{directory}/store", "result": str(result)}
        task.write_text(json.dumps(content))
        command = [sys.executable, "-m", "bench.allreduce_rank", "--task", str(task)]
        if with_mpi:
            subprocess.run([*mpi.launcher(ranks), *command], check=True, timeout=LIMIT_SECONDS)
        else:
            _run_ranks(command, ranks)
        return [row for size, dtype, samples in json.loads(result.read_text()) for row in rows_of(ranks, size, dtype, samples)]


def _run_ranks(command: list[str], ranks: int) -> None:
    processes = [subprocess.Popen(command, env=os.environ | {"RANK": str(rank)}) for rank in range(ranks)]
    try:
        codes = [process.wait(LIMIT_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        raise subprocess.CalledProcessError(next(code for code in codes if code), command)


def rows_of(ranks: int, size_bytes: int, dtype: str, samples: dict[str, list[float]]) -> list[Row]:
    """A row a subject: seconds a call, with bandwidths and ratios of the medians."""
    medians = {name: percentiles(times)["p50"] for name, times in samples.items()}
    rows = []
    for name, times in samples.items():
        algbw = size_bytes / medians[name]
        details = {
            "algbw": algbw,
            "busbw": algbw * 2 * (ranks - 1) / ranks,
            "share_of_limit": min(medians[COPY], medians[REWRITE]) / medians[name],
            "times_gloo": medians[GLOO] / medians[name],
            "times_mpi": medians[MPI] / medians[name] if MPI in medians else None,
        }
        case = f"{size_name(size_bytes)} {dtype}"
        sizes = {"bytes": size_bytes}
        rows.append(Row("allreduce", case, name, "time", "s", ranks, dtype, sizes, **percentiles(times), details=details))
    return rows


def size_name(size_bytes: int) -> str:
    return f"{size_bytes // MIB} MiB" if size_bytes >= MIB else f"{size_bytes // KIB} KiB"


def tables(rows: Sequence[Row]) -> list[Table]:
    lines = []
    for row in rows:
        details = row.details
        line = [f"{row.ranks} ranks, {row.case}, {row.subject}", f"{row.p50 * 1e6:.1f}", f"{row.p20 * 1e6:.1f}", f"{row.p80 * 1e6:.1f}"]
        line += [f"{details['algbw'] / 1e9:.2f}", f"{details['busbw'] / 1e9:.2f}", f"{details['share_of_limit']:.2f}"]
        line += [f"{details['times_gloo']:.2f}", "-" if details["times_mpi"] is None else f"{details['times_mpi']:.2f}"]
        lines.append(line)
    columns = ["all-reduce on CPU ranks", "us", "p20", "p80", "algbw GB/s", "busbw GB/s", "share of limit", "times Gloo", "times MPI"]
    return [Table("slowest rank's time a call; the limit is the faster of copy and rewrite", columns, lines)]


def plot(rows: Sequence[Row], path: Path) -> None:
    """A picture a number of ranks and dtype: bandwidth over size."""
    panels = list(dict.fromkeys((row.ranks, row.dtype) for row in rows))
    figure = Figure(figsize=(1 + 4.5 * len(panels), 4.5), layout="constrained")
    for axes, (ranks, dtype) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        chosen = [row for row in rows if (row.ranks, row.dtype) == (ranks, dtype)]
        for subject in dict.fromkeys(row.subject for row in chosen):
            points = [(row.sizes["bytes"], row.details["algbw"] / 1e9) for row in chosen if row.subject == subject]
            axes.plot(*zip(*points, strict=True), marker="o", linestyle="--" if subject in (COPY, REWRITE) else "-", label=subject)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("bytes a rank")
        axes.set_ylabel("bytes / time, GB/s")
        axes.set_title(f"all-reduce, {ranks} CPU ranks, {dtype}", fontsize=10)
        axes.legend(fontsize=8)
    save(figure, path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=several(at_least(2)), default="2,4,8", help="(default: %(default)s)")
    parser.add_argument(
        "--sizes", type=several(at_least(4)), default=",".join(str(size) for size in SIZES), help="bytes (default: %(default)s)"
    )
    parser.add_argument("--dtypes", type=several(one_of(DTYPES)), default=",".join(DTYPES), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=at_least(1), default=40, help="samples of each subject (default: %(default)s)")
    parser.add_argument("--no-mpi", action="store_true", help="leave MPI out, and don't install it")
    parser.add_argument("--short", action="store_true", help="two ranks, few rounds, up to 25 MiB")
    parser.add_argument("--output", type=directory, default="runs/bench", help="where the rows and the picture go (default: %(default)s)")
    options = parser.parse_args(arguments)
    obstacle = "left out" if options.no_mpi else mpi.set_up()
    if obstacle:
        sys.stderr.write(f"without MPI: {obstacle}\n")
    ranks = [2] if options.short else options.ranks
    rows: list[Row] = []
    for count in ranks:
        largest = 25 * MIB if options.short or count > 2 else max(options.sizes)  # the memory of many ranks would be too much
        cases = [(size, dtype) for dtype in options.dtypes for size in options.sizes if size <= largest]
        rows += run(count, cases, min(options.rounds, 10) if options.short else options.rounds, not obstacle)
    publish("allreduce", rows, options.output, tables, plot)
    if not any(row.subject == OWN for row in rows):
        sys.exit("nothing was measured")


if __name__ == "__main__":
    main()
