"""`RankPool`: processes that act as the ranks of a process group, spawned once and used by many tests.

The parent never hangs: each wait has a limit, a dead rank is noticed at once, and after any failure all processes are replaced. Functions
and arguments are pickled, so a function must live at the top of a module that the ranks can import.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from tests import rank_process
from tests.rank_process import RankContext, Task

__all__ = ["RankContext", "RankFailure", "RankPool"]

START_SECONDS = 180.0  # importing torch takes long on a busy machine
GRACE_SECONDS = 10.0  # after one rank has failed, the others may still report what they saw
EXIT_SECONDS = 5.0
POLL_SECONDS = 0.1  # a rank's death is also looked for this often: its children may keep its pipes open


class RankFailure(Exception):
    """At least one rank raised, died or ran out of time.

    `tracebacks` says by rank what went wrong; `results` holds what the other ranks returned.
    """

    def __init__(self, tracebacks: Mapping[int, str], results: Mapping[int, Any]) -> None:
        super().__init__("\n".join(f"--- rank {rank}: {text.rstrip()}" for rank, text in sorted(tracebacks.items())))
        self.tracebacks = dict(tracebacks)
        self.results = dict(results)


class RankPool:
    """`world_size` processes, started at the first `run` and after each failure.

    Args:
        world_size: how many ranks.
        timeout: time limit of each `run`, not counting the start of the processes.
        backend: of the process groups, as for `torch.distributed.init_process_group`.
    """

    def __init__(self, world_size: int, *, timeout: timedelta = timedelta(seconds=60), backend: str = "gloo") -> None:
        self.world_size = world_size
        self.timeout = timeout
        self.backend = backend
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        self._numbers = count()
        self._ranks: list[_Rank] = []
        self._closed = False
        atexit.register(self.close)  # before multiprocessing's own handler, which would wait for the processes without a limit

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        timeout: timedelta | None = None,
        group_timeout: timedelta = timedelta(seconds=30),
    ) -> list[Any]:
        """Calls `function(rank_context, *arguments)` on every rank, in a fresh process group; returns the results by rank.

        Args:
            timeout: time limit of this call; None means the pool's.
            group_timeout: time limit of the group's own collectives.

        Raises:
            RankFailure: a rank raised, died, or did not return in time.
        """
        if self._closed:
            raise RuntimeError("this RankPool is closed")
        store_path = str(Path(self._directory.name) / f"store-{next(self._numbers)}")
        task = pickle.dumps(Task(function, arguments, store_path, group_timeout, self.backend))
        try:
            self._start()
            deadline = time.monotonic() + (timeout or self.timeout).total_seconds()
            results = self._exchange(task, deadline)
            self._exchange(b"release", time.monotonic() + EXIT_SECONDS + group_timeout.total_seconds())
        except BaseException:  # KeyboardInterrupt and pytest-timeout's too: the ranks are in an unknown state
            self._kill()
            raise
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """Ends the processes. Idempotent."""
        self._closed = True
        atexit.unregister(self.close)
        for rank in self._ranks:
            rank.connection.close()
        deadline = time.monotonic() + EXIT_SECONDS
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        self._kill()
        self._directory.cleanup()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def process_ids(self) -> list[int]:
        """The processes at work now, by rank; empty before the first `run` and after a failure."""
        return [rank.process.pid for rank in self._ranks if rank.process.pid is not None]

    def _start(self) -> None:
        if any(not rank.process.is_alive() for rank in self._ranks):
            self._kill()
        if not self._ranks:
            self._ranks = [_Rank(number, self.world_size, Path(self._directory.name)) for number in range(self.world_size)]
            self._collect(time.monotonic() + START_SECONDS)

    def _exchange(self, message: bytes, deadline: float) -> dict[int, Any]:
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError):  # it has died, which _collect finds
                rank.connection.send_bytes(message)
        return self._collect(deadline)

    def _collect(self, deadline: float) -> dict[int, Any]:
        """One reply of every rank."""
        pending = {rank.number: rank for rank in self._ranks}
        results: dict[int, Any] = {}
        tracebacks: dict[int, str] = {}
        while pending and time.monotonic() < deadline:
            dead = [rank for rank in pending.values() if not rank.process.is_alive()]  # asked before reading: it may have replied first
            wait([rank.connection for rank in pending.values()], 0 if dead else POLL_SECONDS)
            for rank in list(pending.values()):
                reply = rank.receive()
                if reply is None and rank not in dead:
                    continue
                del pending[rank.number]
                kind, value = reply or ("died", f"died with exit code {rank.process.exitcode}")
                (results if kind in ("ready", "returned") else tracebacks)[rank.number] = value
            if tracebacks:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        tracebacks |= {rank.number: f"no answer in time; it is in\n{rank.stack()}" for rank in pending.values()}
        if tracebacks:
            raise RankFailure(tracebacks, results)
        return results

    def _kill(self) -> None:
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.kill()


class _Rank:
    """One process and the parent's end of its connection."""

    def __init__(self, number: int, world_size: int, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.number = number
        self.stack_path = directory / f"stack-{number}"
        self.connection: Connection
        self.connection, remote = context.Pipe()
        self.process: SpawnProcess = context.Process(
            target=rank_process.main, args=(number, world_size, remote, str(self.stack_path)), name=f"rank-{number}", daemon=False
        )
        self.process.start()
        remote.close()

    def receive(self) -> tuple[str, Any] | None:
        """Its reply, or None where there is none yet, or none to come."""
        try:
            reply: tuple[str, Any] | None = pickle.loads(self.connection.recv_bytes()) if self.connection.poll() else None
        except (EOFError, ConnectionResetError):
            self.process.join(EXIT_SECONDS)
            return "died", f"died with exit code {self.process.exitcode}"
        return reply

    def stack(self) -> str:
        """Where every thread of the process is now."""
        if not self.process.is_alive() or not self.stack_path.exists() or self.process.pid is None:
            return "(not known)"
        os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return self.stack_path.read_text()

    def kill(self) -> None:
        """Kills it and all that it started."""
        if self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join(EXIT_SECONDS)
        self.connection.close()
