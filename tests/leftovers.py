"""What a test session may leave behind, and must not: processes and files in /dev/shm."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")


class Leftovers:
    """Remembers what was there at the start; tells what is new at the end."""

    def __init__(self) -> None:
        self._children = set(_children())
        self._files = _shared_memory_files()

    def find(self, patience_seconds: float = 20.0) -> list[str]:
        """One line for each new child process and shared-memory file that is still there after a while.

        A file that a process outside this session maps is that process's. One that nobody maps may still be about to be mapped, or
        removed, by such a process: hence the wait.
        """
        deadline = time.monotonic() + patience_seconds
        while (found := self._find_now()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _find_now(self) -> list[str]:
        processes = [f"process {process.pid}: {name}" for process, name in _children().items() if process not in self._children]
        new = _shared_memory_files() - self._files
        files = [f"file {SHARED_MEMORY / name}" for name in sorted(new - _mapped_elsewhere() if new else new)]
        return processes + files


def _children() -> dict[psutil.Process, str]:
    """Child processes and their command lines, but for the tracker that multiprocessing keeps for the life of the interpreter."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and "multiprocessing.resource_tracker" not in command:
                found[process] = command
        except psutil.NoSuchProcess:
            continue
    return found


def _shared_memory_files() -> set[str]:
    found = set()
    for entry in os.scandir(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else ():
        try:
            if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                found.add(entry.name)
        except FileNotFoundError:
            continue
    return found


def _mapped_elsewhere() -> set[str]:
    """Files in /dev/shm that some process outside this session maps, as far as this user may know."""
    own = {os.getpid(), *(process.pid for process in psutil.Process().children(recursive=True))}
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) in own:
            continue
        with contextlib.suppress(OSError):
            lines = (process / "maps").read_text(errors="replace").splitlines()
            found |= {line.rpartition(f"{SHARED_MEMORY}/")[2] for line in lines if f" {SHARED_MEMORY}/" in line}
    return found
