"""Shared memory that is not what its maker told of: foreign, left over, tampered with, of another size. It is refused before it is used, on
all ranks alike."""

from __future__ import annotations

import fcntl
import gc
import os
import socket
import stat
import struct
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from ddpcomm import _native
from ddpcomm.comm import segments
from ddpcomm.comm.factory import create_communicator
from ddpcomm.errors import TransportUnavailableError
from tests.ranks import RankContext, RankPool

pytestmark = pytest.mark.timeout(120)

CAPACITY = 16 << 20
TOKEN = bytes(range(16))
ADD_SEALS, SHRINK_AND_GROW = 1033, 0x2 | 0x4
LIMIT = timedelta(seconds=20)


def attach(file: int, capacity_bytes: int = CAPACITY, token: bytes = TOKEN) -> None:
    _native.SharedMemorySegment(file, capacity_bytes, token)


def made_by_hand(header: bytes, *, size: int = CAPACITY, mode: int = 0o600, seals: int = SHRINK_AND_GROW) -> int:
    file = os.memfd_create("foreign", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    os.pwrite(file, header, 0)
    os.fchmod(file, mode)
    fcntl.fcntl(file, ADD_SEALS, seals)
    return file


def true_header(capacity_bytes: int = CAPACITY) -> tuple[bytes, bytes]:
    """The first bytes of a real segment, and its token."""
    arena = _native.SharedMemoryArena(capacity_bytes)
    return os.pread(arena.file, 56, 0), arena.token


def test_how_a_segment_is_made() -> None:
    """For this user only, without a name, with a size that nobody can change, and with a token of its own."""
    arenas = [_native.SharedMemoryArena(CAPACITY) for _ in range(3)]
    assert len({arena.token for arena in arenas}) == 3
    status = os.fstat(arenas[0].file)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.geteuid()
    assert status.st_nlink == 0
    assert status.st_size == arenas[0].capacity_bytes == CAPACITY
    for size in (CAPACITY - 4096, CAPACITY + 4096):
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(arenas[0].file, size)
    attach(arenas[0].file, token=arenas[0].token)
    with pytest.raises(RuntimeError, match="token"):
        attach(arenas[0].file, token=arenas[1].token)


def test_a_copy_of_a_true_header_is_taken() -> None:
    """So that the cases below are refused for the reason they name."""
    header, token = true_header()
    file = made_by_hand(header)
    try:
        attach(file, token=token)
    finally:
        os.close(file)


def changed(place: int, layout: str, value: int | bytes) -> Callable[[bytes], bytes]:
    def change(header: bytes) -> bytes:
        new = struct.pack(layout, value)
        return header[:place] + new + header[place + len(new) :]

    return change


HEADERS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "zeros": (lambda header: bytes(56), "does not begin as a segment"),
    "another magic": (changed(0, "8s", b"somebody"), "does not begin as a segment"),
    "another version": (changed(8, "=I", 99), "version is 99"),
    "other channels": (changed(12, "=I", 1 << 31), "number of channels"),
    "another header": (changed(16, "=Q", 64), "header's size is 64"),
    "other control blocks": (changed(24, "=Q", (1 << 64) - 1), "control block's size is 18446744073709551615"),
    "another capacity": (changed(32, "=Q", 2 * CAPACITY), "header's capacity"),
    "another run's token": (changed(40, "16s", b"x" * 16), "token is not the one"),
    "cut short": (lambda header: header[:20], "control block's size is 0"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers(name: str) -> None:
    change, message = HEADERS[name]
    header, token = true_header()
    file = made_by_hand(change(header))
    try:
        with pytest.raises(RuntimeError, match=f"refused: .*{message}"):
            attach(file, token=token)
    finally:
        os.close(file)


FILES: dict[str, tuple[Callable[[bytes], int], str]] = {
    "open to others": (lambda header: made_by_hand(header, mode=0o666), "mode is 0666"),
    "truncated": (lambda header: made_by_hand(header, size=4096), "has 4096 bytes, not the 16777216"),
    "empty": (lambda header: made_by_hand(b"", size=0), "has 0 bytes"),
    "grown": (lambda header: made_by_hand(header, size=CAPACITY + 4096), "has 16781312 bytes"),
    "can shrink": (lambda header: made_by_hand(header, seals=0x4), "could be shrunk"),
    "can grow": (lambda header: made_by_hand(header, seals=0x2), "could be shrunk or grown"),
}


@pytest.mark.parametrize("name", FILES)
def test_files(name: str) -> None:
    make, message = FILES[name]
    header, token = true_header()
    file = make(header)
    try:
        with pytest.raises(RuntimeError, match=f"refused: .*{message}"):
            attach(file, token=token)
    finally:
        os.close(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_segment() -> None:
    header, token = true_header()
    file = made_by_hand(header)
    try:
        os.fchown(file, 12345, -1)
        with pytest.raises(RuntimeError, match="owner is 12345"):
            attach(file, token=token)
    finally:
        os.close(file)


def test_what_is_no_memory_at_all(tmp_path: Path) -> None:
    """A file on a disk, by way of a link as well; a directory; a socket; a closed file."""
    header, token = true_header()
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(header.ljust(CAPACITY, b"\0"))
    path.chmod(0o600)
    link.symlink_to(path)
    for opened, message in ((os.open(link, os.O_RDWR), "could be shrunk"), (os.open(tmp_path, os.O_RDONLY), "another kind of file")):
        with pytest.raises(RuntimeError, match=message):
            attach(opened, token=token)
        os.close(opened)
    with socket.socket() as connection, pytest.raises(RuntimeError, match="another kind of file"):
        attach(connection.fileno(), token=token)
    with pytest.raises(RuntimeError, match="fstat"):
        attach(-1, token=token)


@pytest.mark.parametrize("capacity", [0, 4096, (1 << 64) - 1, (1 << 63) - 1, (1 << 46) + 1])
def test_sizes_that_no_segment_has(capacity: int) -> None:
    header, token = true_header()
    file = made_by_hand(header)
    try:
        with pytest.raises(RuntimeError, match="refused: its size"):
            attach(file, capacity, token)
    finally:
        os.close(file)
    with pytest.raises(ValueError, match="its size"):
        _native.SharedMemoryArena(capacity)


def test_allocations_that_overflow() -> None:
    arena = _native.SharedMemoryArena(CAPACITY)
    for size in ((1 << 64) - 1, (1 << 64) - 4096, CAPACITY + 1):
        with pytest.raises(RuntimeError, match="capacity"):
            arena.allocate(size)
    arena.allocate(4096)


# ---- through a communicator -----------------------------------------------------------------------------------------


def foreign_segment(context: RankContext, name: str) -> str:
    """Rank 1 hands round a segment with a header that doesn't fit: no rank uses shared memory, and all say why."""
    change, _ = HEADERS[name]

    class Foreign:
        def __init__(self, arena: _native.SharedMemoryArena) -> None:
            self.file = made_by_hand(change(os.pread(arena.file, 56, 0)), size=arena.capacity_bytes)
            self.capacity_bytes, self.token = arena.capacity_bytes, arena.token

    def send(connection: socket.socket, messages: list[bytes], files: list[int]) -> int:
        foreign = Foreign(_native.SharedMemoryArena(CAPACITY))
        try:
            return send_fds(connection, [segments._OFFER.pack(foreign.capacity_bytes, foreign.token)], [foreign.file])
        finally:
            os.close(foreign.file)

    send_fds = socket.send_fds
    before = len(os.listdir("/proc/self/fd"))
    with pytest.MonkeyPatch.context() as patch:
        if context.rank == 1:
            patch.setattr(socket, "send_fds", send)
        with pytest.raises(TransportUnavailableError) as caught:
            create_communicator(context.process_group, "cpu", "shared_memory", LIMIT)
    message = str(caught.value)
    del caught  # its frames hold this rank's own memory
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    with create_communicator(context.process_group, "cpu", "shared_memory", LIMIT) as communicator:
        tensor = torch.ones(3)
        communicator.all_reduce(tensor).wait()
        assert (tensor == context.world_size).all()
    return message


@pytest.mark.parametrize("name", ["zeros", "another version", "another run's token"])
def test_all_ranks_refuse_a_foreign_segment(two_ranks: RankPool, name: str) -> None:
    messages = set(two_ranks.run(foreign_segment, name))
    assert len(messages) == 1
    message = messages.pop()
    assert "rank 0: another rank's segment is refused" in message
    assert HEADERS[name][1] in message
