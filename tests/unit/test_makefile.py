"""`make`: what is set up, when it is set up again, and what each target runs. A script that only takes notes plays Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

NOTES_ONLY = """#!/bin/sh
echo "$(basename $0) $*" >> "{notes}"
case "$*" in
    *"tools/extras.py") echo dev ;;
    *"pip install"*) touch ddpcomm/_native.so ;;
    *build_ext*) touch ddpcomm/_native.so ;;
esac
"""


class Tree:
    """A copy of the files that make looks at, with programs in .venv/bin that note how they are called."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.notes = root / "notes"
        for name in ("Makefile", "pyproject.toml", "setup.py", "constraints.txt"):
            shutil.copy2(ROOT / name, root)
        for name in ("tools/extras.py", "csrc/cpu/one.cpp", "csrc/include/ddpcomm/one.h", "ddpcomm/__init__.py", ".venv/bin/python"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        for name in ("python", "ruff", "mypy", "clang-format", "torchrun"):
            program = root / ".venv/bin" / name
            program.write_text(NOTES_ONLY.format(notes=self.notes))
            program.chmod(0o755)

    def make(self, *arguments: str) -> str:
        """How the programs were called."""
        self.notes.write_text("")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "OMP_NUM_THREADS"}
        command = ["make", *arguments]
        done = subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return self.notes.read_text()

    def touch(self, name: str) -> None:
        """Makes a file newer than all that is there, whatever the resolution of the file system's clock."""
        later = time.time() + 5
        os.utime(self.root / name, (later, later))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_the_first_call_installs_and_the_second_does_nothing(tree: Tree) -> None:
    first = tree.make("setup")
    assert "pip install" in first
    assert "-c constraints.txt -e .[dev]" in first
    assert "build_ext" not in first, "pip has just built the extension"
    assert tree.make("setup") == ""


@pytest.mark.parametrize("name", ["pyproject.toml", "setup.py", "constraints.txt"])
def test_a_change_of_requirements_installs_again(tree: Tree, name: str) -> None:
    tree.make("setup")
    tree.touch(name)
    assert "pip install" in tree.make("setup")


@pytest.mark.parametrize("name", ["csrc/cpu/one.cpp", "csrc/include/ddpcomm/one.h"])
def test_a_change_of_a_source_rebuilds_the_extension_alone(tree: Tree, name: str) -> None:
    tree.make("setup")
    tree.touch(name)
    calls = tree.make("setup")
    assert "build_ext --inplace" in calls
    assert "pip" not in calls


@pytest.mark.parametrize(
    ("arguments", "calls"),
    [
        (["train", "RANKS=3"], ["torchrun --standalone --nproc-per-node 3 -m examples.train_gpt\n"]),
        (["train", "COMPARE=1", "ARGUMENTS=--steps 5"], ["-m examples.train_gpt --compare --steps 5\n"]),
        (["test"], ["python -m pytest -m not gpu\n"]),
        (["test", "ARGUMENTS=-k word"], ["python -m pytest -m not gpu -k word\n"]),
        (["gpu"], ["python -m pytest -m gpu tests/gpu\n"]),
        (["bench"], ["python -m bench\n"]),
        (
            ["lint"],
            [
                "ruff check ",
                "ruff format --check ",
                "mypy -p ddpcomm -p bench -p examples -p tools\n",
                "clang-format --dry-run",
                "check_imports",
                "check_sources",
            ],
        ),
        (["format"], ["ruff check --fix ", "ruff format ", "clang-format -i "]),
    ],
)
def test_targets(tree: Tree, arguments: list[str], calls: list[str]) -> None:
    tree.make("setup")
    made = tree.make(*arguments)
    for call in calls:
        assert call in made
    assert "pip" not in made


def test_every_target_sets_up_by_itself(tree: Tree) -> None:
    assert "pip install" in tree.make("lint")


def test_clean_leaves_the_sources(tree: Tree) -> None:
    tree.make("setup")
    tree.make("clean")
    assert not (tree.root / ".venv").exists()
    assert not (tree.root / "ddpcomm/_native.so").exists()
    assert (tree.root / "csrc/cpu/one.cpp").exists()
