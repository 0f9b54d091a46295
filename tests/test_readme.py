"""Everything that README.md tells its reader to run, run: each snippet whole, each command with parameters that make it short."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.ranks import RankContext, RankPool

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 180
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(kind, name, text) for kind, name, text in BLOCK.findall((ROOT / "README.md").read_text())]
SNIPPETS = [text for kind, name, text in BLOCKS if kind == "python" and not name]
FILES = {name: text for kind, name, text in BLOCKS if kind == "python" and name}
COMMANDS = [line for kind, _, text in BLOCKS if kind == "shell" for line in text.splitlines()]
FIRST_NODE, SECOND_NODE = (command for command in COMMANDS if "--nnodes 2" in command)

TINY = "--steps 2 --validations 1 --batch-size 2 --context 16 --width 16 --heads 2 --layers 1 --output {output}"
# What each command of README.md becomes here. Those that `make --dry-run` stands in for are run by CI itself, or need a GPU.
SHORT = {
    "make train": f"make train ARGUMENTS='{TINY}'",
    "make train COMPARE=1": f"make train COMPARE=1 ARGUMENTS='{TINY}'",
    "make test": "make --dry-run test",
    "pip install .": "python -m pip install --dry-run --no-deps --no-build-isolation --quiet .",
    "torchrun --standalone --nproc-per-node 2 train.py": "torchrun --standalone --nproc-per-node 2 {files}/train.py",
    "ddpcomm doctor": "python -m ddpcomm doctor",
    "ddpcomm plan --model resnet50 --machine v100-one-nic --step-ms 97 --gpus 16,256,1024": (
        "python -m ddpcomm plan --model resnet50 --machine v100-one-nic --step-ms 97 --gpus 16"
    ),
    "python -m bench.step_time --transport process_group,shared_memory": (
        "python -m bench.step_time --transport process_group,shared_memory --models tensors400 --steps 1 --output {output}"
    ),
}
EXPECTED = {
    "make train": "checkpoint.pt, loss.png and summary.json are in",
    "make train COMPARE=1": "bit-identical after each of 2 steps",
    "make test": "pytest",
    "pip install .": "",
    "torchrun --standalone --nproc-per-node 2 train.py": "rank 1 of 2: loss",
    "ddpcomm doctor": "verdict: fit for training on",
    "ddpcomm plan --model resnet50 --machine v100-one-nic --step-ms 97 --gpus 16,256,1024": "efficiency",
    "python -m bench.step_time --transport process_group,shared_memory": "of torch's",
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A directory with the files that README.md shows."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def start(command: str) -> subprocess.Popen[str]:
    """In this interpreter's environment, from the root of the repository; make is not to set up anything."""
    directory = Path(sys.executable).parent
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    environment |= {"PATH": f"{directory}{os.pathsep}{environment['PATH']}", "PYTHONPATH": str(ROOT), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    words = shlex.split(command)
    if words[0] == "make":
        stamps = [f"{directory.parent}/{name}" for name in (".installed", ".built")]
        words += [f"VENV={directory.parent}", *[word for stamp in stamps for word in ("-o", stamp)]]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(words, cwd=ROOT, env=environment, text=True, start_new_session=True, **pipes)


def outputs(*commands: str) -> list[str]:
    """What commands print that run at the same time. Fails where one fails or takes too long, and leaves none behind."""
    processes = [start(command) for command in commands]
    try:
        found = [process.communicate(timeout=LIMIT_SECONDS)[0] for process in processes]
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"{error}; it said:\n{(error.output or b'').decode(errors='replace')}")
    finally:
        for process in processes:
            stop(process)
    for process, output in zip(processes, found, strict=True):
        assert process.returncode == 0, f"{process.args} failed:\n{output}"
    return found


def stop(process: subprocess.Popen[str]) -> None:
    """Kills it with all that it started, if it still runs."""
    if process.poll() is None:
        for descendant in [*psutil.Process(process.pid).children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                descendant.kill()
        process.communicate()


def test_every_command_is_tested() -> None:
    assert sorted(COMMANDS) == sorted([*SHORT, FIRST_NODE, SECOND_NODE])
    assert sorted(SHORT) == sorted(EXPECTED)
    assert {kind for kind, _, _ in BLOCKS} == {"python", "shell"}


@pytest.mark.parametrize("command", SHORT)
def test_command(command: str, files: Path) -> None:
    (output,) = outputs(SHORT[command].format(output=files / "output", files=files))
    assert EXPECTED[command] in output


def test_two_machines(files: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    replacements = {
        "--nproc-per-node 8": "--nproc-per-node 1",
        "host0": "127.0.0.1",
        "29500": str(port),
        "train.py": str(files / "train.py"),
    }
    commands = []
    for command in (FIRST_NODE, SECOND_NODE):
        for old, new in replacements.items():
            assert old in command
            command = command.replace(old, new)
        commands.append(command)
    first, second = outputs(*commands)
    assert "rank 0 of 2: loss" in first
    assert "rank 1 of 2: loss" in second


def run_snippet(context: RankContext, text: str) -> None:
    exec(compile(text, "README.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("text", SNIPPETS, ids=[f"snippet{index}" for index in range(len(SNIPPETS))])
def test_snippet(text: str, two_ranks: RankPool) -> None:
    two_ranks.run(run_snippet, text)


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / "README.md").read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []
