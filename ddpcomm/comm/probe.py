"""Tries the transports: processes of this machine exchange a few numbers over each of them."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from ddpcomm import env
from ddpcomm.comm.factory import create_communicator
from ddpcomm.errors import CommunicationError

_NUMEL = 100_003  # more than one piece of any staging buffer, and no multiple of anything
_LIMIT = timedelta(seconds=30)


def try_transports(transports: Sequence[str], device: str, ranks: int = 2, limit: timedelta = timedelta(minutes=3)) -> dict[str, str]:
    """Tries each of `transports` with processes on the CPU ("cpu"), or each on a GPU of its own ("cuda").

    Args:
        ranks: how many processes.
        limit: for all of it, the start of the processes included.

    Returns:
        By transport what went wrong, "" where nothing did.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ddpcomm-") as directory:
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        shared = ranks, tuple(transports), device, str(Path(directory) / "store")
        processes = [context.Process(target=_rank, args=(rank, *shared, pipes[rank][1]), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        for _, writer in pipes:
            writer.close()
        deadline = time.monotonic() + limit.total_seconds()
        try:
            reports = [_report(reader, transports, deadline) for reader, _ in pipes]
        finally:
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()) if process.is_alive() else 0.0)
                process.kill()
                process.join()
    return {transport: next(filter(None, (report[transport] for report in reports)), "") for transport in transports}


def _report(reader: Connection, transports: Sequence[str], deadline: float) -> dict[str, str]:
    missing = "a process that tried it did not answer in time"
    try:
        if reader.poll(max(0.0, deadline - time.monotonic())):
            found: dict[str, str] = reader.recv()
            return found
    except EOFError:
        missing = "a process that tried it died"
    return dict.fromkeys(transports, missing)


def _rank(rank: int, ranks: int, transports: tuple[str, ...], device: str, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    env.default_gloo_to_loopback()
    reports: dict[str, str] = {}
    try:
        shared_file = dist.FileStore(store, ranks)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=shared_file, rank=rank, world_size=ranks, timeout=_LIMIT)
        for transport in transports:
            reports[transport] = _try(transport, torch.device(device, rank) if device == "cuda" else torch.device(device))
        dist.destroy_process_group()
    except (RuntimeError, OSError) as error:
        reports = {transport: reports.get(transport, str(error)) for transport in transports}
    connection.send(reports)


def _try(transport: str, device: torch.device) -> str:
    """What goes wrong with an all-reduce and a broadcast, whose results are known."""
    try:
        with create_communicator(None, device, transport, _LIMIT) as communicator:
            tensor = communicator.empty(_NUMEL, torch.float32)
            tensor.copy_(torch.arange(_NUMEL) % 1000 + communicator.rank)
            communicator.all_reduce(tensor).wait()
            ranks = communicator.world_size
            expected = (torch.arange(_NUMEL, device=device) % 1000 * ranks + sum(range(ranks))).float()
            if not torch.equal(tensor, expected):
                raise CommunicationError("an all-reduce gave wrong sums")
            tensor.fill_(communicator.rank)
            communicator.broadcast(tensor, source=ranks - 1).wait()
            if not bool((tensor == ranks - 1).all()):
                raise CommunicationError("a broadcast gave wrong values")
            communicator.barrier().wait()
    except (RuntimeError, OSError, ImportError) as error:  # DDPCommError is a RuntimeError
        return str(error) or type(error).__name__
    return ""
