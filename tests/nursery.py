"""`Nursery`: ranks that may die. A process with everything imported forks a set of them for each task, in milliseconds, and tells how each
ended: what it returned, its exit status, or that it hung. Ranks end as programs do, through the interpreter's own shutdown."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, Any

GRACE_SECONDS = 20.0  # beyond a task's limit, for the nursery to answer
START_SECONDS = 120.0


@dataclass(frozen=True)
class Fate:
    """How a rank ended. `notes` are what it passed to `tell`, in order; `status` is negative for a signal, None if it hung."""

    rank: int
    status: int | None
    notes: tuple[Any, ...]
    stderr: str = field(repr=False)


@dataclass(frozen=True)
class Birth:
    """What a function that runs on a rank gets first. `tell(note)` is safe even just before the rank dies."""

    rank: int
    world_size: int
    tell: Callable[[Any], None]


@dataclass(frozen=True)
class _Task:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    world_size: int
    limit_seconds: float
    group_timeout: timedelta


class Nursery:
    """Runs sets of ranks, one after the other, each in a fresh gloo group. Starts a process at the first."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        world_size: int,
        limit: timedelta = timedelta(seconds=30),
        group_timeout: timedelta = timedelta(seconds=20),
    ) -> list[Fate]:
        """Calls `function(birth, *arguments)` on every rank, and waits until all have ended; who hasn't after `limit` is killed."""
        if self._process is None:
            root = Path(__file__).parent.parent
            command = [sys.executable, "-c", "import sys, tests.nursery; sys.exit(tests.nursery.main())"]
            self._process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
            assert _receive(self._process.stdout, START_SECONDS) == "ready"
        _send(self._process.stdin, _Task(function, arguments, world_size, limit.total_seconds(), group_timeout))
        fates: list[Fate] = _receive(self._process.stdout, limit.total_seconds() + GRACE_SECONDS)
        return fates

    def close(self) -> None:
        """Ends the process. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()  # type: ignore[union-attr]

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _send(pipe: IO[bytes] | None, value: Any) -> None:
    assert pipe is not None
    data = pickle.dumps(value)
    pipe.write(struct.pack("<q", len(data)) + data)
    pipe.flush()


def _receive(pipe: IO[bytes] | None, limit_seconds: float) -> Any:
    assert pipe is not None
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        if not selector.select(limit_seconds):
            raise TimeoutError("the nursery doesn't answer")
    head = pipe.read(8)
    if len(head) < 8:
        raise EOFError("the nursery has died")
    return pickle.loads(pipe.read(struct.unpack("<q", head)[0]))


# ---- in the nursery's own process -----------------------------------------------------------------------------------


def main() -> int:
    """Returns in the nursery, and in each rank, when it has nothing more to do."""
    import torch._dynamo
    import torch.distributed  # noqa: F401

    import tests.faults.kills  # noqa: F401

    gc.collect()
    gc.freeze()  # ranks needn't look through it, nor copy its pages
    tasks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    _send(answers, "ready")
    while len(head := tasks.read(8)) == 8:
        task: _Task = pickle.loads(tasks.read(struct.unpack("<q", head)[0]))
        directory = Path(tempfile.mkdtemp(prefix="nursery-"))  # not by a context manager: the ranks would leave it, too
        children: list[tuple[int, Path, Path]] = []
        for rank in range(task.world_size):
            notes, stderr = directory / f"notes-{rank}", directory / f"stderr-{rank}"
            child = os.fork()
            if child == 0:
                answers.close()
                return _live(task, rank, str(directory / "store"), notes, stderr)
            children.append((child, notes, stderr))
        fates = _await(children, time.monotonic() + task.limit_seconds)
        shutil.rmtree(directory)
        _send(answers, fates)
    return 0


def _await(children: list[tuple[int, Path, Path]], deadline: float) -> list[Fate]:
    statuses: dict[int, int] = {}
    while len(statuses) < len(children) and time.monotonic() < deadline:
        for child, *_ in children:
            if child not in statuses:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    statuses[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    for child, *_ in children:
        if child not in statuses:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return [
        Fate(rank, statuses.get(child), tuple(_read(notes)), stderr.read_text(errors="replace") if stderr.exists() else "")
        for rank, (child, notes, stderr) in enumerate(children)
    ]


def _read(notes: Path) -> list[Any]:
    found = []
    with contextlib.suppress(FileNotFoundError, EOFError), notes.open("rb") as file:
        while True:
            found.append(pickle.load(file))
    return found


def _meet(directory: Path, rank: int, world_size: int) -> None:
    """Until all have connected: torch's own errors for a rank that dies before are not the matter here. No connection is needed for it, so
    that the first to leave may die at once."""
    (directory / f"connected-{rank}").touch()
    while len(list(directory.glob("connected-*"))) < world_size:
        time.sleep(0.002)


def _live(task: _Task, rank: int, store: str, notes: Path, stderr: Path) -> int:
    import torch
    import torch.distributed as dist

    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
    os.dup2(2, 1)
    torch.set_num_threads(1)

    def tell(note: Any) -> None:
        with notes.open("ab") as file:
            file.write(pickle.dumps(note))

    dist.init_process_group(
        "gloo", store=dist.FileStore(store, task.world_size), rank=rank, world_size=task.world_size, timeout=task.group_timeout
    )
    _meet(notes.parent, rank, task.world_size)
    try:
        task.function(Birth(rank, task.world_size, tell), *task.arguments)
    except BaseException:
        traceback.print_exc()
        raise
    return 0
