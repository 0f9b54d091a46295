"""Who shall make the shared-memory all-reduces progress: the caller alone, calls in between, or a thread?

    python -m bench.progress --ranks 2 --buckets 8 --bucket-mib 4

Each rank plays a backward: matrix products, and after each eighth of them (say) a bucket that is all-reduced; at the end it waits for all.
The ranks' products take turns in being a little slower, as in practice. "caller" makes progress in all_reduce() and in the last wait();
"calls" also calls progress() after every product, as a gradient's hook could; "thread" has a thread that waits for each bucket as soon as
it is out. All take turns in the same processes; what is reported is the step less that without any exchange.
"""

from __future__ import annotations

import argparse
import queue
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bench.report import bar_chart, show_table
from bench.rows import Row, percentiles, write_rows
from ddpcomm.comm.base import Communicator, Work
from ddpcomm.comm.factory import create_communicator
from examples.arguments import at_least, directory, several
from tests.ranks import RankContext, RankPool

NOTHING, CALLER, CALLS, THREAD = "nothing", "caller", "calls", "thread"
MODES = (NOTHING, CALLER, CALLS, THREAD)
WIDTH = 384
PRODUCTS = 6  # between two buckets


class Waiter:
    """A thread that waits for one work after another."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, work: Work) -> None:
        self._works.put(work)

    def close(self) -> None:
        self._works.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            work.wait()


def step(mode: str, communicator: Communicator, buckets: Sequence[Tensor], matrix: Tensor, waiter: Waiter, slow: bool) -> float:
    began = time.perf_counter()
    works = []
    for bucket in buckets:
        for _ in range(PRODUCTS + slow):
            torch.mm(matrix, matrix)
            if mode == CALLS:
                communicator.progress()
        if mode != NOTHING:
            works.append(communicator.all_reduce(bucket))
            if mode == THREAD:
                waiter.add(works[-1])
    for work in works:
        work.wait()
    return time.perf_counter() - began


def measure(context: RankContext, buckets: int, bucket_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Runs on each rank: seconds a step, by mode."""
    samples: dict[str, list[float]] = {mode: [] for mode in MODES}
    matrix = torch.zeros(WIDTH, WIDTH)
    waiter = Waiter()
    with create_communicator(context.process_group, "cpu", "shared_memory", timedelta(seconds=60)) as communicator:
        memory = [communicator.empty(bucket_bytes // 4, torch.float32).zero_() for _ in range(buckets)]
        for number in range(-3, rounds):
            turn = number % len(MODES)
            for mode in MODES[turn:] + MODES[:turn]:
                communicator.barrier().wait()
                seconds = step(mode, communicator, memory, matrix, waiter, slow=number % context.world_size == context.rank)
                if number >= 0:
                    samples[mode].append(seconds)
        waiter.close()
    dist.barrier()
    return samples


def rows_of(by_rank: Sequence[dict[str, list[float]]], buckets: int, bucket_bytes: int) -> list[Row]:
    """What each mode adds to the slowest rank's step."""
    slowest = {mode: np.max([samples[mode] for samples in by_rank], axis=0) for mode in MODES}
    ranks, sizes = len(by_rank), {"bytes": bucket_bytes, "buckets": buckets}
    case = f"{buckets} x {bucket_bytes >> 20} MiB"
    details = {"step_without": float(np.median(slowest[NOTHING]))}
    return [
        Row(
            *("progress", case, mode, "overhead", "s", ranks, "float32", sizes),
            **percentiles((slowest[mode] - slowest[NOTHING]).tolist()),  # type: ignore[arg-type]
            details=details,
        )
        for mode in MODES[1:]
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=at_least(1), default=2)
    parser.add_argument("--buckets", type=at_least(1), default=8)
    parser.add_argument("--bucket-mib", type=several(at_least(1)), default="1,4,25", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=at_least(1), default=60)
    parser.add_argument("--short", action="store_true", help="few rounds: shows that it works, says little")
    parser.add_argument("--output", type=directory, default="runs/bench", help="where the rows and the picture go (default: %(default)s)")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    with RankPool(options.ranks, timeout=timedelta(minutes=10)) as pool:
        for mib in options.bucket_mib:
            arguments_of_rank = (options.buckets, mib << 20, min(options.rounds, 8) if options.short else options.rounds)
            rows += rows_of(pool.run(measure, *arguments_of_rank), options.buckets, mib << 20)
    lines = [[f"{row.case}, {row.subject}", *(f"{value * 1e3:.2f}" for value in (row.p50, row.p20, row.p80))] for row in rows]
    show_table(f"what the exchange adds to a step, CPU, {options.ranks} ranks", ["who makes progress", "ms", "p20", "p80"], lines)
    write_rows(rows, options.output / "progress.jsonl")
    values: dict[str, dict[str, float]] = {}
    for row in rows:
        values.setdefault(row.subject, {})[row.case] = row.p50 * 1e3
    bar_chart(values, options.output / "progress.png", title="Who makes all-reduces progress (CPU ranks)", label="added to a step, ms")


if __name__ == "__main__":
    main()
