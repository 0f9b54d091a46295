"""How far are the simulator's predictions from what was published, and from what this machine does?

    python -m bench.validate
    python -m bench.validate --machine

The first prints predictions beside published figures and measures nothing. The second also measures: steps of a model over bucket sizes
and numbers of ranks, beside predictions from the step without exchange and from all-reduces that were timed by themselves.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.report import show_table
from bench.rows import Row, write_rows
from bench.validate_machine import TRANSPORTS, measured_rows, report_machine
from bench.validation import (
    SPREAD_FROM_ELSEWHERE,
    Comparison,
    constants_only,
    ddp_steps,
    imbalance_without,
    largest_error,
    leave_one_out,
    mean_error,
    overlap_gains,
    pairs_in_order,
    published_steps,
)


def published() -> list[Row]:
    """Prints the tables of everything that is held against published figures."""
    left_out, constants, efficiencies, gains = leave_one_out(), constants_only(), ddp_steps(), overlap_gains()
    without_ddp = ddp_steps(base=0)
    systems = list(dict.fromkeys(c.case.partition(" ")[0] for c in left_out))
    times(f"all-reduces, each left out of its own model: mean error {mean_error(left_out):.1%}", left_out)
    for system in systems:
        print(f"  {system}: mean error {mean_error([c for c in left_out if c.case.startswith(system)]):.1%}")
    times(f"all-reduces by NCCL's constants alone: mean error {mean_error(constants):.1%}", constants)
    fitted = ", ".join(f"{imbalance_without(model):.1%} for {model}" for model in published_steps())
    points(
        f"torch DDP on V100, scaling efficiency of one GPU with DDP: largest error {largest_error(efficiencies):.1f} points", efficiencies
    )
    print(f"  imbalance fitted to the other models: {fitted}")
    elsewhere = ddp_steps(imbalance=SPREAD_FROM_ELSEWHERE)
    print(f"  with an imbalance of {SPREAD_FROM_ELSEWHERE:.1%}, from elsewhere: largest error {largest_error(elsewhere):.1f} points")
    points(f"the same, of one GPU without DDP: largest error {largest_error(without_ddp):.1f} points", without_ddp)
    right, pairs = pairs_in_order(gains)
    positive = sum(c.predicted > 0 for c in gains)
    points(f"what overlap saves of a step: {positive} of {len(gains)} signs and {right} of {pairs} pairs in the published order", gains)
    return [comparison.row() for group in (left_out, constants, efficiencies, without_ddp, gains) for comparison in group]


def times(title: str, comparisons: Sequence[Comparison]) -> None:
    lines = [[c.case, str(c.ranks), f"{c.predicted * 1e6:.1f}", f"{c.published * 1e6:.1f}", f"{c.error:+.1%}"] for c in comparisons]
    show_table(title, ["case", "GPUs", "predicted us", "published us", "error"], lines)


def points(title: str, comparisons: Sequence[Comparison]) -> None:
    lines = [[c.case, str(c.ranks), f"{c.predicted:.1f}", f"{c.published:.1f}", f"{c.error:+.1f}"] for c in comparisons]
    show_table(title, ["case", "GPUs", "predicted %", "published %", "points"], lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--machine", action="store_true", help="also measure on this machine")
    parser.add_argument("--ranks", default="1,2,3,4", help="with --machine (default: %(default)s)")
    parser.add_argument("--transport", default=",".join(TRANSPORTS), help="with --machine (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="with --machine (default: %(default)s)")
    parser.add_argument("--short", action="store_true", help="also measure, two ranks and few rounds: shows that it works, says little")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="where the rows go (default: %(default)s)")
    options = parser.parse_args(arguments)
    write_rows(published(), options.output / "validate.jsonl")
    if options.machine or options.short:
        ranks = [2] if options.short else [int(text) for text in options.ranks.split(",")]
        rows = measured_rows(ranks, options.transport.split(","), min(options.rounds, 3) if options.short else options.rounds)
        report_machine(rows)
        write_rows(rows, options.output / "validate_machine.jsonl")


if __name__ == "__main__":
    main()
