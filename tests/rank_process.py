"""What runs inside each process of a `RankPool`: it takes one task after another and never outlives its parent."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class RankContext:
    """What a function run on a rank gets as its first argument. `process_group` is also torch's default group."""

    rank: int
    world_size: int
    process_group: dist.ProcessGroup


@dataclass(frozen=True)
class Task:
    """One call of `RankPool.run`, the same for every rank but for its number."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    store_path: str
    group_timeout: timedelta
    backend: str = "gloo"


def main(rank: int, world_size: int, connection: Connection, stack_path: str) -> None:
    """Serves tasks until the parent closes its end of the connection.

    Replies are pickled by the plain pickler: multiprocessing's own would send tensors as shared memory, which a killed rank leaves behind.
    """
    os.setpgid(0, 0)  # so that the pool can kill a rank together with whatever that rank has started
    stack_file = open(stack_path, "w")  # noqa: SIM115 - open for the whole life of the process
    faulthandler.register(signal.SIGUSR1, stack_file, all_threads=True)
    threading.Thread(target=_die_with_parent, name="die-with-parent", daemon=True).start()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    connection.send_bytes(pickle.dumps(("ready", None)))
    try:
        while True:
            connection.send_bytes(_call(rank, world_size, connection.recv_bytes()))
            connection.recv_bytes()  # every rank is done: only now may the group go, which a slower rank could still be using
            connection.send_bytes(_clean_up())
    except (EOFError, BrokenPipeError):
        return


def _call(rank: int, world_size: int, task_bytes: bytes) -> bytes:
    environment = dict(os.environ)
    try:
        task: Task = pickle.loads(task_bytes)
        torch.set_num_threads(1)
        store = dist.FileStore(task.store_path, world_size)
        dist.init_process_group(task.backend, store=store, rank=rank, world_size=world_size, timeout=task.group_timeout)
        assert dist.group.WORLD is not None
        result = task.function(RankContext(rank, world_size, dist.group.WORLD), *task.arguments)
        return pickle.dumps(("returned", result))
    except BaseException:
        return pickle.dumps(("raised", traceback.format_exc()))
    finally:
        os.environ.clear()
        os.environ.update(environment)


def _clean_up() -> bytes:
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()
        return pickle.dumps(("returned", None))
    except BaseException:
        return pickle.dumps(("raised", traceback.format_exc()))


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
