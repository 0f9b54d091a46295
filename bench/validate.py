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

from matplotlib.figure import Figure

from bench.comparison import Comparison, largest_error, mean_error, pairs_in_order, published_steps
from bench.overlap_gains import gains, gains_by_constants
from bench.report import SIMULATED, Table, save, show_table
from bench.rows import Row, write_rows
from bench.validate_machine import TRANSPORTS, machine_table, measured_rows
from bench.validation import SPREAD_FROM_ELSEWHERE, constants_only, ddp_steps, imbalance_without, leave_one_out
from examples.arguments import at_least, directory, one_of, several


def published() -> list[Row]:
    """Prints the tables of everything that is held against published figures."""
    left_out, constants, efficiencies = leave_one_out(), constants_only(), ddp_steps()
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
    explained, unexplained = gains(), gains_by_constants()
    overlap("saved by overlap, inputs from the paper's steps on 16 GPUs", explained)
    overlap("saved by overlap, by constants alone", unexplained)
    groups = (left_out, constants, efficiencies, without_ddp, explained, unexplained)
    return [comparison.row() for group in groups for comparison in group]


def overlap(title: str, comparisons: Sequence[Comparison]) -> None:
    right, pairs = pairs_in_order(comparisons)
    positive = sum(c.predicted > 0 for c in comparisons)
    points(f"{title}: {positive} of {len(comparisons)} signs and {right} of {pairs} pairs in the published order", comparisons)


def times(title: str, comparisons: Sequence[Comparison]) -> None:
    lines = [[c.case, str(c.ranks), f"{c.predicted * 1e6:.1f}", f"{c.published * 1e6:.1f}", f"{c.error:+.1%}"] for c in comparisons]
    show_table(title, ["case", "GPUs", "predicted us", "published us", "error"], lines)


def points(title: str, comparisons: Sequence[Comparison]) -> None:
    lines = [[c.case, str(c.ranks), f"{c.predicted:.1f}", f"{c.published:.1f}", f"{c.error:+.1f}"] for c in comparisons]
    show_table(title, ["case", "GPUs", "predicted %", "published %", "points"], lines)


def tables(rows: Sequence[Row]) -> list[Table]:
    """One for each thing that was compared; computed and measured figures stand side by side in it, and are named so."""
    found = []
    for what in dict.fromkeys(row.quantity for row in rows if not row.measured):
        mine = [row for row in rows if row.quantity == what]
        scale, unit = (1e6, "us") if mine[0].unit == "s" else (1.0, mine[0].unit)
        lines = [[row.case, str(row.ranks), f"{row.p50 * scale:.1f}", f"{row.details['published'] * scale:.1f}"] for row in mine]
        found.append(
            Table(f"{what} ({SIMULATED}, beside what was published)", ["case", "GPUs", f"predicted {unit}", f"published {unit}"], lines)
        )
    steps = [row for row in rows if row.measured]
    if steps:
        found.append(machine_table(steps))
    return found


def plot(rows: Sequence[Row], path: Path) -> None:
    """Predictions over what was measured, here or elsewhere: all on the diagonal would be perfect."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.measured:
            pairs.setdefault("steps on this CPU, ms", []).append((row.p50 * 1e3, row.details["predicted"] * 1e3))
        elif row.unit == "s":
            pairs.setdefault("published all-reduces, GPUs, us", []).append((row.details["published"] * 1e6, row.p50 * 1e6))
        else:
            pairs.setdefault("published efficiencies and gains, %", []).append((row.details["published"], row.p50))
    figure = Figure(figsize=(1.0 + 3.8 * len(pairs), 4.2), layout="constrained")
    for axes, (name, points_of_panel) in zip(figure.subplots(1, len(pairs), squeeze=False)[0], pairs.items(), strict=True):
        x, y = zip(*points_of_panel, strict=True)
        axes.loglog(x, y, "o", markersize=4)
        ends = [min(*x, *y), max(*x, *y)]
        axes.plot(ends, ends, "--", color="black", linewidth=1)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("measured")
    figure.axes[0].set_ylabel(f"predicted ({SIMULATED})")
    save(figure, path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--machine", action="store_true", help="also measure on this machine")
    parser.add_argument("--ranks", type=several(at_least(1)), default="1,2,3,4", help="with --machine (default: %(default)s)")
    parser.add_argument(
        "--transport", type=several(one_of(TRANSPORTS)), default=",".join(TRANSPORTS), help="with --machine (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=at_least(1), default=15, help="with --machine (default: %(default)s)")
    parser.add_argument("--short", action="store_true", help="also measure, two ranks and few rounds: shows that it works, says little")
    parser.add_argument("--output", type=directory, default="runs/bench", help="where the rows go (default: %(default)s)")
    options = parser.parse_args(arguments)
    rows = published()
    if options.machine or options.short:
        ranks = [2] if options.short else options.ranks
        measured = measured_rows(ranks, options.transport, min(options.rounds, 3) if options.short else options.rounds)
        machine_table(measured).show()
        rows += measured
    write_rows(rows, options.output / "validate.jsonl")
    plot(rows, options.output / "validate.png")


if __name__ == "__main__":
    main()
