"""How soon do the other ranks notice that one has been killed, wherever it was?

    python -m bench.chaos --kills 200 --transport shared_memory,process_group,hierarchical
    python -m bench.chaos --kills 0 --points

Each kill is one training of three ranks on this machine, of which one gets SIGKILL at a random moment: in construction, forward, backward,
an exchange, close, or between them. The others must raise a typed error within the time limit, and end by themselves with exit status 0;
nothing may be left in /dev/shm. Exits with what was not as promised.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from bench import cli
from bench.report import Table, bar_chart
from bench.rows import Row, percentiles
from examples.arguments import at_least, one_of, positive, several
from tests.faults.kills import POINTS, TRANSPORTS, WORLD_SIZE, Kill, kill_any_time, kill_at
from tests.nursery import Nursery

ANY_TIME = "any moment"
LATEST_SECONDS = 1.2  # enough for several trainings from construction to close


@dataclass(frozen=True)
class Trial:
    """One kill: where, how long until the last survivor had raised, with what, and what was not as promised."""

    case: str
    transport: str
    seconds: float
    errors: tuple[str, ...]
    problems: tuple[str, ...]


def kills(transports: Sequence[str], count: int, seed: int = 0, most_seconds: float = float("inf")) -> Iterator[Trial]:
    """Kills ranks at random moments, over the transports in turn; `count` times in all, or until the time is over."""
    chance = random.Random(seed)
    deadline = time.monotonic() + most_seconds
    with Nursery() as nursery:
        for number in range(count):
            if time.monotonic() > deadline:
                return
            transport, seconds, victim = (
                transports[number % len(transports)],
                chance.uniform(0.0, LATEST_SECONDS),
                chance.randrange(WORLD_SIZE),
            )
            yield observe(ANY_TIME, transport, lambda: kill_any_time(nursery, transport, seconds, victim))  # noqa: B023 - called at once


def kills_at_points(transports: Sequence[str]) -> Iterator[Trial]:
    """Kills a rank once at each point of training, over each transport."""
    with Nursery() as nursery:
        for point in POINTS:
            for transport in transports:
                yield observe(point, transport, lambda: kill_at(nursery, point, transport))  # noqa: B023 - called at once


def observe(case: str, transport: str, run: Callable[[], Kill]) -> Trial:
    files = set(os.listdir("/dev/shm"))
    kill = run()
    left = [name for name in set(os.listdir("/dev/shm")) - files if "ddpcomm" in name]
    problems = (*kill.problems, *(f"/dev/shm/{name} was left" for name in left))
    return Trial(case, transport, max(kill.noticed.values(), default=0.0), tuple(o.kind for o in kill.outcomes.values()), problems)


def rows_of(trials: Sequence[Trial]) -> list[Row]:
    rows = []
    for case, transport in dict.fromkeys((trial.case, trial.transport) for trial in trials):
        own = [trial for trial in trials if (trial.case, trial.transport) == (case, transport)]
        errors = [kind for trial in own for kind in trial.errors]
        details = {
            "errors": {kind: errors.count(kind) for kind in sorted(set(errors))},
            "broken_promises": sum(bool(trial.problems) for trial in own),
            "longest": max(trial.seconds for trial in own),
        }
        seconds = percentiles([trial.seconds for trial in own])
        rows.append(
            Row("chaos", case, f"ddpcomm {transport}", "noticed by all", "s", WORLD_SIZE, "float32", {}, **seconds, details=details)
        )
    return rows


def tables(rows: Sequence[Row]) -> list[Table]:
    lines = []
    for row in rows:
        errors = ", ".join(f"{count} {kind}" for kind, count in row.details["errors"].items()) or "none"
        times = (f"{seconds:.2f}" for seconds in (row.p50, row.p99, row.details["longest"]))
        lines.append([f"{row.case}, {row.subject}", str(row.count), str(row.details["broken_promises"]), *times, errors])
    title = f"SIGKILL of one of {WORLD_SIZE} CPU ranks: seconds until all survivors had raised"
    return [Table(title, ["", "kills", "not as promised", "p50", "p99", "longest", "errors of the survivors"], lines)]


def plot(rows: Sequence[Row], path: Path) -> None:
    values: dict[str, dict[str, float]] = {}
    for row in rows:
        values.setdefault(row.subject, {})[row.case] = row.details["longest"]
    bar_chart(values, path, title="Until all survivors of a kill have raised, at most (CPU ranks)", label="s")


def main(arguments: list[str] | None = None) -> None:
    parser = cli.parser(__doc__, rounds=None, ranks=None)
    parser.add_argument("--kills", type=at_least(0), default=200, help="at most (default: %(default)s)")
    parser.add_argument("--seconds", type=positive, default=float("inf"), help="begin no kill after this time")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims (default: %(default)s)")
    parser.add_argument(
        "--transport", type=several(one_of(TRANSPORTS)), default=",".join(TRANSPORTS), help="in turn (default: %(default)s)"
    )
    parser.add_argument("--points", action="store_true", help="also once at each named point of training")
    options = parser.parse_args(arguments)
    count = min(options.kills, 20) if options.short else options.kills
    if not count and not options.points:
        parser.error("there is nothing to do: ask for --kills or --points")
    at_points = kills_at_points(options.transport) if options.points else ()
    trials = []
    for trial in chain(kills(options.transport, count, options.seed, options.seconds), at_points):
        trials.append(trial)
        for problem in trial.problems:
            sys.stderr.write(f"kill {len(trials)}, {trial.transport}: {problem}\n")
    cli.publish("chaos", rows_of(trials), options.output, tables, plot)
    broken = sum(bool(trial.problems) for trial in trials)
    sys.exit(f"{broken} of {len(trials)} kills were not as promised" if broken else 0)


if __name__ == "__main__":
    main()
