"""Makes this rank's shared memory and maps that of the other ranks of its host."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ddpcomm import _native
from ddpcomm.comm.base import Communicator
from ddpcomm.comm.exchange import all_gather_objects
from ddpcomm.comm.neighbours import Neighbours, receive_exactly
from ddpcomm.comm.shared_memory_settings import SharedMemorySettings
from ddpcomm.errors import RankMismatchError, SharedMemoryFullError, TransportUnavailableError

_OFFER = struct.Struct("=Q16s")  # capacity in bytes, token
_PEER_CREDENTIALS = struct.Struct("=iii")  # process, user, group
_ADDRESS_SPACE_BYTES = 32 << 40  # of the 128 TiB that a process has
_LARGE_BYTES = 16 << 20


@dataclass
class Segments:
    """The memory of all ranks of a host, as one of them has it.

    Attributes:
        ranks: the host's ranks as numbered in the group that they met in; everything else here is in this order.
        position: this rank's place among them.
        arena: this rank's own memory.
        segments: the others' memory, None at this rank's place.
        watched: files that become readable when a rank ends.
    """

    ranks: tuple[int, ...]
    position: int
    arena: _native.SharedMemoryArena
    segments: list[_native.SharedMemorySegment | None]
    watched: list[list[int]]
    _open: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        self._finalizer = weakref.finalize(self, self._open.close)

    def close(self) -> None:
        """Closes what is watched, which tells the others that this rank has gone, and this rank's file. The memory goes when the last
        tensor over it does. Idempotent."""
        self._finalizer()

    def discard(self) -> None:
        """Closes all of it, though whoever handles the error may hold on to this object: nobody has used the memory yet."""
        self.close()
        self.segments.clear()
        del self.arena


def attach(bootstrap: Communicator, neighbours: Neighbours, settings: SharedMemorySettings, capacity_bytes: int | None = None) -> Segments:
    """Hands round the memory of the ranks of each host. Collective over `bootstrap`: one small exchange. Takes over the connections.

    Args:
        settings: compared, because the ranks must agree on them.
        capacity_bytes: the most that this rank can ever allocate at a time; address space only. None means the machine's memory.

    Raises:
        TransportUnavailableError: it went wrong on some rank; on all ranks, with the same message.
        RankMismatchError: the ranks have different settings; on all ranks.
    """
    segments: Segments | None = None
    problem = ""
    try:
        segments = _attach(bootstrap.rank, neighbours, capacity_bytes or _default_capacity_bytes(bootstrap.world_size))
    except (OSError, RuntimeError, ValueError) as error:  # also what the native code refuses
        neighbours.close()  # so that those who wait for this rank need not wait longer
        problem = f"rank {bootstrap.rank}: {error}"
    try:
        reports = all_gather_objects(bootstrap, (problem, settings))
    except BaseException:
        if segments is not None:
            segments.discard()
        neighbours.close()
        raise
    problems = [text for text, _ in reports if text]
    differ = any(other != reports[0][1] for _, other in reports)
    if segments is not None and not problems and not differ:
        return segments
    if segments is not None:
        segments.discard()
    neighbours.close()
    if problems:
        raise TransportUnavailableError(f"shared memory can't be set up: {'; '.join(problems)}")
    raise RankMismatchError(f"the ranks gave shared_memory different settings: {[other for _, other in reports]}")


def _attach(rank: int, neighbours: Neighbours, capacity_bytes: int) -> Segments:
    ranks = neighbours.host_of(rank)
    arena = _native.SharedMemoryArena(capacity_bytes)
    for connection in neighbours.connections.values():
        socket.send_fds(connection, [_OFFER.pack(arena.capacity_bytes, arena.token)], [arena.file])
    result = Segments(ranks, ranks.index(rank), arena, [], [])
    result._open.callback(neighbours.close)
    result._open.callback(arena.close)
    for other in ranks:
        result.segments.append(None if other == rank else _receive(neighbours.connections[other]))
        result.watched.append([] if other == rank else _watch(neighbours.connections[other], result._open))
    return result


def _receive(connection: socket.socket) -> _native.SharedMemorySegment:
    """Another rank's memory. What came may be anything: the segment is checked before it is used.

    Raises:
        OSError: nothing came, or the kernel refuses.
        RuntimeError: what came is not that rank's memory, or not safe to use.
    """
    data, files, _, _ = socket.recv_fds(connection, _OFFER.size, 1)
    try:
        data += receive_exactly(connection, _OFFER.size - len(data))
        if len(files) != 1:
            raise OSError("no file came with another rank's message")
        capacity_bytes, token = _OFFER.unpack(data)
        return _native.SharedMemorySegment(files[0], capacity_bytes, token)
    finally:
        for file in files:
            os.close(file)


def _watch(connection: socket.socket, resources: contextlib.ExitStack) -> list[int]:
    """The connection hangs up when the other process ends, unless a child of it has inherited its end; a pidfd tells even then, but can be
    had only where the other process is visible from here. It is proof against the number's being used again: the process was there when
    it was opened, as the exchange that follows shows."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    process = _PEER_CREDENTIALS.unpack(credentials)[0]
    try:
        file = os.pidfd_open(process)
    except OSError:
        return [connection.fileno()]
    resources.callback(os.close, file)
    return [connection.fileno(), file]


def _default_capacity_bytes(world_size: int) -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(min(memory, _ADDRESS_SPACE_BYTES // world_size))


def allocate(
    arena: _native.SharedMemoryArena, size_bytes: int, available: Callable[[], int | None] | None = None
) -> _native.SharedMemoryAllocation:
    """Memory for a tensor.

    Raises:
        SharedMemoryFullError: there is none left. A large request is refused beforehand: the kernel would kill some process instead.
    """
    if size_bytes > _LARGE_BYTES:
        left = (available or available_bytes)()
        if left is not None and size_bytes > left:
            raise SharedMemoryFullError(
                f"{size_bytes} bytes of shared memory were asked for, but this machine or container has {left} left. Use smaller buckets "
                "or fewer ranks, or give it more memory."
            )
    try:
        return arena.allocate(size_bytes)
    except RuntimeError as error:
        raise SharedMemoryFullError(f"{size_bytes} bytes of shared memory could not be had: {error}") from error


def available_bytes() -> int | None:
    """What can be allocated before the kernel starts to kill processes: of the machine and of the container. None where it isn't known."""
    limits = [limit for limit in (_of_machine(), _of_container()) if limit is not None]
    return min(limits) if limits else None


def _of_machine() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None
    return None


def _of_container(group: Path = Path("/sys/fs/cgroup")) -> int | None:
    try:
        return int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no such group, or no limit ("max")
        return None
