"""What have the benchmarks shown? Writes one page of all results in a directory: each question, its picture, its table.

    python -m bench.results docs/results

Everything on the page is read from the rows beside it, so it says no more than they do.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.report import SIMULATED
from bench.rows import Row, read_rows

SCRIPTS = (
    "step_time",
    "breakdown",
    "bucket_size",
    "accumulation",
    "communicators",
    "scaling",
    "validate",
    "allreduce",
    "kernels",
)
PAGE = "README.md"


def write_page(directory: Path, command: str) -> Path:
    """Writes README.md from the rows in `directory`; `command` is what made them."""
    sections = [section for name in SCRIPTS if (directory / f"{name}.jsonl").exists() for section in section_of(name, directory)]
    path = directory / PAGE
    path.write_text("\n".join([*head(directory, command), *sections]))
    return path


def head(directory: Path, command: str) -> Iterator[str]:
    rows = [row for name in SCRIPTS if (directory / f"{name}.jsonl").exists() for row in read_rows(directory / f"{name}.jsonl")]
    yield "# Results of the benchmarks\n"
    yield f"Made by `{command}`. Each row is in the `.jsonl` files beside this page, with its machine, versions and commit. {kind(rows)}\n"
    yield "| | |\n|---|---|"
    yield f"| machine | {'; '.join(dict.fromkeys(machine_text(row) for row in rows))} |"
    yield f"| versions | {'; '.join(dict.fromkeys(', '.join(f'{k} {v}' for k, v in row.versions.items()) for row in rows))} |"
    yield f"| commit | {', '.join(dict.fromkeys(row.commit for row in rows))} |"
    yield f"| when | {min(row.time for row in rows)} to {max(row.time for row in rows)} |\n"


def kind(rows: Sequence[Row]) -> str:
    devices = sorted({"CPU ranks" if row.device == "cpu" else row.device for row in rows if row.measured})
    simulated = sum(not row.measured for row in rows)
    text = f"Measured on: {', '.join(devices) or 'nothing'}."
    return f"{text} {simulated} rows were computed from a model instead; they are marked `({SIMULATED})`." if simulated else text


def machine_text(row: Row) -> str:
    gpus = ", ".join(row.machine["gpus"]) or "no GPU"
    return f"{row.machine['cpu']}, {row.machine['cores']} cores, {row.machine['memory_bytes'] / 2**30:.0f} GiB, {gpus}"


def section_of(name: str, directory: Path) -> Iterator[str]:
    module = importlib.import_module(f"bench.{name}")
    question = (module.__doc__ or "").splitlines()[0]
    yield f"## {name}\n\n{question} (`python -m bench.{name}`)\n\n![{name}]({name}.png)\n"
    yield from (table.markdown() for table in module.tables(read_rows(directory / f"{name}.jsonl")))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path, help="of rows and pictures")
    parser.add_argument("--command", default="make bench", help="what made the rows (default: %(default)s)")
    options = parser.parse_args(arguments)
    if not any((options.directory / f"{name}.jsonl").exists() for name in SCRIPTS):
        parser.error(f"there are no rows of a benchmark in {options.directory}")
    write_page(options.directory, options.command)


if __name__ == "__main__":
    main()
