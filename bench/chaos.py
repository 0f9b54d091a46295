"""How soon do the other ranks notice that one has been killed, wherever it was?

    python -m bench.chaos --kills 200 --transport shared_memory,process_group,hierarchical

Each kill is one training of three ranks on this machine, of which one gets SIGKILL at a random moment: in construction, forward, backward,
an exchange, close, or between them. The others must raise a typed error within the time limit, and end by themselves with exit status 0;
nothing may be left in /dev/shm. Exits with what was not as promised.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import cli
from bench.report import Table, bar_chart
from bench.rows import Row, percentiles
from tests.faults.kills import TRANSPORTS, WORLD_SIZE, kill_any_time
from tests.nursery import Nursery

LATEST_SECONDS = 1.2  # enough for several trainings from construction to close


@dataclass(frozen=True)
class Trial:
    """One kill: how long until the last survivor had raised, with what, and what was not as promised."""

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
            transport = transports[number % len(transports)]
            files = set(os.listdir("/dev/shm"))
            kill = kill_any_time(nursery, transport, chance.uniform(0.0, LATEST_SECONDS), chance.randrange(WORLD_SIZE))
            left = [name for name in set(os.listdir("/dev/shm")) - files if "ddpcomm" in name]
            problems = (*kill.problems, *(f"/dev/shm/{name} was left" for name in left))
            yield Trial(transport, max(kill.noticed.values(), default=0.0), tuple(o.kind for o in kill.outcomes.values()), problems)


def rows_of(trials: Sequence[Trial]) -> list[Row]:
    rows = []
    for transport in dict.fromkeys(trial.transport for trial in trials):
        own = [trial for trial in trials if trial.transport == transport]
        errors = [kind for trial in own for kind in trial.errors]
        details = {
            "errors": {kind: errors.count(kind) for kind in sorted(set(errors))},
            "broken_promises": sum(bool(trial.problems) for trial in own),
            "longest": max(trial.seconds for trial in own),
        }
        row = ("chaos", "SIGKILL at a random moment", f"ddpcomm {transport}", "noticed by all", "s", WORLD_SIZE, "float32", {})
        rows.append(Row(*row, **percentiles([trial.seconds for trial in own]), details=details))  # type: ignore[arg-type]
    return rows


def tables(rows: Sequence[Row]) -> list[Table]:
    lines = []
    for row in rows:
        errors = ", ".join(f"{count} {kind}" for kind, count in row.details["errors"].items())
        times = (f"{seconds:.2f}" for seconds in (row.p50, row.p99, row.details["longest"]))
        lines.append([row.subject, str(row.count), str(row.details["broken_promises"]), *times, errors])
    title = f"SIGKILL at random moments, {WORLD_SIZE} CPU ranks: seconds until all survivors had raised"
    return [Table(title, ["", "kills", "not as promised", "p50", "p99", "longest", "errors of the survivors"], lines)]


def plot(rows: Sequence[Row], path: Path) -> None:
    values = {name: {row.subject: value for row, value in pairs(rows, name)} for name in ("p50", "p99")}
    bar_chart(values, path, title="Until all survivors of a kill have raised (CPU ranks)", label="s")


def pairs(rows: Sequence[Row], name: str) -> Iterator[tuple[Row, float]]:
    for row in rows:
        yield row, getattr(row, name)


def main(arguments: list[str] | None = None) -> None:
    parser = cli.parser(__doc__, rounds=0, ranks=None)
    parser.add_argument("--kills", type=int, default=200, help="at most (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no kill after this time")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims (default: %(default)s)")
    parser.add_argument("--transport", default=",".join(TRANSPORTS), help="in turn (default: %(default)s)")
    options = parser.parse_args(arguments)
    count = min(options.kills, 20) if options.short else options.kills
    trials = []
    for trial in kills(cli.names(options.transport), count, options.seed, options.seconds):
        trials.append(trial)
        for problem in trial.problems:
            sys.stderr.write(f"kill {len(trials)}, {trial.transport}: {problem}\n")
    cli.publish("chaos", rows_of(trials), options.output, tables, plot)
    broken = sum(bool(trial.problems) for trial in trials)
    sys.exit(f"{broken} of {len(trials)} kills were not as promised" if broken else 0)


if __name__ == "__main__":
    main()
