"""How fast are the kernels, beside the copy bandwidth of the machine and beside torch?

    python -m bench.kernels flatten --impl triton,cuda,native,torch --shapes resnet50 --dtype bf16

Each implementation is checked against kernels/reference.py before it is timed. All take turns, call by call, in an order that rotates;
before each call the caches are flushed. The ceiling is a plain copy that moves as many bytes, taken in the same turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.cli import publish
from bench.kernel_subjects import OPERATIONS, Call, Problem, implementation_call, rivals
from bench.report import Table, bar_chart
from bench.rows import Row, percentiles
from bench.shapes import SHAPES, numels
from ddpcomm import ops
from ddpcomm.kernels import reference
from examples.arguments import at_least, directory, one_of, several

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
COPY = "copy"
CPU_LIMIT = 32 << 20
"""Elements of a list of shapes at most, on CPU: more says nothing new and takes long."""
Samples = dict[str, list[float]]


class Clock:
    """Seconds that a call takes, and that its launch takes the CPU; with the caches flushed before."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._flush = torch.empty((256 if self._cuda else 128) << 20, dtype=torch.uint8, device=device)

    def __call__(self, call: Call) -> tuple[float, float]:
        self._flush.fill_(1)
        if not self._cuda:
            started = time.perf_counter()
            call()
            seconds = time.perf_counter() - started
            return seconds, seconds
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        started = time.perf_counter()
        call()
        launched = time.perf_counter() - started
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e-3, launched


def check(operation: str, name: str, call: Call, problem: Problem) -> None:
    """
    Raises:
        ValueError: an implementation's result is not the reference's, bit for bit.
    """
    call()
    if operation == "flatten":
        expected = torch.zeros_like(problem.buffer)
        reference.flatten(problem.tensors, problem.offsets, expected, problem.scale)
        if not torch.equal(problem.buffer, expected):
            raise ValueError(f"flatten: {name} differs from the reference")
    elif operation in ("unflatten", "unflatten_norm"):
        again = [torch.empty_like(tensor) for tensor in problem.tensors]
        reference.unflatten(problem.buffer, problem.offsets, again, 1.0 / problem.scale)
        if not all(torch.equal(one, other) for one, other in zip(problem.tensors, again, strict=True)):
            raise ValueError(f"{operation}: {name} differs from the reference")


def copy_call(problem: Problem, bytes_moved: int) -> Call:
    source = torch.ones(bytes_moved // 2, dtype=torch.uint8, device=problem.device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def measure(operation: str, implementations: list[str], problem: Problem, repeats: int) -> tuple[Samples, Samples]:
    """Seconds a call, and seconds of CPU a call, by subject."""
    calls: dict[str, Call] = {}
    for name in implementations:
        call = implementation_call(operation, name, problem)
        check(operation, name, call, problem)
        calls[f"ddpcomm {name}"] = call
    calls.update(rivals(operation, problem))
    calls[COPY] = copy_call(problem, problem.bytes_moved(operation))
    clock = Clock(problem.device)
    for call in calls.values():
        clock(call)
    times: Samples = {name: [] for name in calls}
    launches: Samples = {name: [] for name in calls}
    names = list(calls)
    for turn in range(repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds, launch = clock(calls[name])
            times[name].append(seconds)
            launches[name].append(launch)
    return times, launches


def rows_of(operation: str, case: str, problem: Problem, times: Samples, launches: Samples) -> list[Row]:
    moved = problem.bytes_moved(operation)
    ceiling = percentiles(times[COPY])["p50"]
    common: dict[str, Any] = {
        "bench": "kernels",
        "case": f"{operation} {case}",
        "ranks": 1,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "sizes": {"tensors": len(problem.sizes), "elements": problem.numel, "bytes_moved": moved},
        "device": str(problem.device),
        "unit": "s",
    }
    rows = []
    for name, samples in times.items():
        found = percentiles(samples)
        details = {
            "buffer_dtype": str(problem.buffer_dtype).removeprefix("torch."),
            "bytes_per_second": moved / found["p50"],
            "share_of_copy": ceiling / found["p50"],
        }
        rows.append(Row(subject=name, quantity="time", details=details, **found, **common))
        if problem.device.type == "cuda":
            rows.append(Row(subject=name, quantity="launch", **percentiles(launches[name]), **common))
    return rows


def tables(rows: Sequence[Row]) -> list[Table]:
    """One for each operation and list of shapes."""
    return [table([row for row in rows if row.case == case]) for case in dict.fromkeys(row.case for row in rows)]


def table(rows: Sequence[Row]) -> Table:
    lines = []
    launches = {row.subject: row for row in rows if row.quantity == "launch"}
    for row in rows:
        if row.quantity == "time":
            launch = launches.get(row.subject)
            rate, share = row.details["bytes_per_second"] * 1e-9, row.details["share_of_copy"]
            line = [row.subject, f"{row.p50 * 1e6:.1f}", f"{row.p20 * 1e6:.1f}", f"{row.p80 * 1e6:.1f}", f"{rate:.2f}", f"{share:.2f}"]
            lines.append([*line, f"{launch.p50 * 1e6:.1f}"] if launch else line)
    sizes = rows[0].sizes
    title = f"{rows[0].case}, {rows[0].dtype} to {rows[0].details['buffer_dtype']}, {sizes['tensors']} tensors, {rows[0].device}"
    columns = ["subject", "us", "p20", "p80", "GB/s", "of copy"]
    return Table(title, [*columns, "launch us"] if launches else columns, lines)


def plot(rows: Sequence[Row], path: Path) -> None:
    shares: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.quantity == "time" and row.subject != COPY:
            shares.setdefault(row.subject, {})[row.case.replace(" ", "\n", 1)] = row.details["share_of_copy"]
    bar_chart(
        shares,
        path,
        title=f"Bandwidth as a share of a plain copy of as many bytes, {rows[0].device.upper()}",
        label="share of copy",
        reference=1.0,
    )


def run(
    operations: list[str], shapes: list[str], implementations: Callable[[str], list[str]], options: argparse.Namespace, device: torch.device
) -> list[Row]:
    rows: list[Row] = []
    limit = options.elements or (CPU_LIMIT if device.type == "cpu" else None)
    for operation in operations:
        for case in shapes:
            dtype = DTYPES[options.dtype]
            problem = Problem(numels(case, limit), dtype, DTYPES[options.buffer_dtype] if options.buffer_dtype else dtype, 0.5, device)
            times, launches = measure(operation, implementations(operation), problem, options.repeats)
            found = rows_of(operation, case, problem, times, launches)
            for shown in tables(found):
                shown.show()
            rows += found
    return rows


def usable_device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"torch can't use {text!r}: {str(error).splitlines()[0]}") from error
    return device


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("operations", nargs="*", default=[], help=f"some of {', '.join(OPERATIONS)} (default: flatten unflatten)")
    parser.add_argument("--impl", type=several(str), help="implementations, with commas (default: all that the device has)")
    parser.add_argument(
        "--shapes",
        type=several(one_of(SHAPES)),
        default="small400,tiny10000,resnet50",
        help=f"some of {','.join(SHAPES)} (default: %(default)s)",
    )
    parser.add_argument("--dtype", default="fp32", choices=DTYPES, help="of the tensors (default: %(default)s)")
    parser.add_argument("--buffer-dtype", choices=DTYPES, help="of the buffer (default: the tensors')")
    parser.add_argument("--device", type=usable_device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=at_least(1), default=50, help="calls to measure (default: %(default)s)")
    parser.add_argument(
        "--elements", type=at_least(1), help=f"the first tensors of a list, to so many elements (default on CPU: {CPU_LIMIT})"
    )
    parser.add_argument("--threads", type=at_least(1), default=1, help="of torch, on CPU (default: %(default)s)")
    parser.add_argument("--short", action="store_true", help="few calls: shows that it works, says little")
    parser.add_argument("--output", type=directory, default="runs/bench", help="where the rows and the picture go (default: %(default)s)")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.operations if name not in OPERATIONS]:
        parser.error(f"there is no operation {unknown[0]}")
    if options.short:
        options.repeats = min(options.repeats, 7)
    torch.set_num_threads(options.threads)
    device = options.device

    def implementations(operation: str) -> list[str]:
        available = ops.implementations("flatten" if operation == "unflatten_norm" else operation, device)
        return [name for name in options.impl or available if name in available]

    operations = options.operations or ["flatten", "unflatten"]
    there = {name for operation in operations for name in implementations(operation)}
    if unknown := [name for name in options.impl or () if name not in there]:
        parser.error(f"there is no implementation {unknown[0]} of {', '.join(operations)} on {device}")

    rows = run(operations, options.shapes, implementations, options, device)
    publish("kernels", rows, options.output, None, plot)


if __name__ == "__main__":
    main()
