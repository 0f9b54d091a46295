"""Which ranks share a host, and connections between those that do.

Found by trying, not by asking the environment: ranks that run on one kernel (its boot id) open a socket in the abstract namespace of their
network, and connect to one another. Whoever gets through can be handed open files, which is all that shared memory needs: no name in any
file system, no rights over the other's process, no common numbering of processes. Ranks in containers with networks of their own do not
get through, and count as being on different hosts.

The connections stay open: one that hangs up tells that the rank at its other end has ended.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpcomm.comm.base import Communicator
from ddpcomm.comm.exchange import all_gather_objects
from ddpcomm.errors import ConfigurationError, PeerLostError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"={_TOKEN_BYTES}si")
_PATIENCE_SECONDS = 10.0  # for a local socket on a busy machine


@dataclass(frozen=True)
class Neighbours:
    """The hosts of a group, and this rank's connections.

    `hosts` lists the ranks of each host, in ascending order; `connections` has a socket for each other rank of this rank's host.
    """

    hosts: tuple[tuple[int, ...], ...]
    connections: dict[int, socket.socket]

    def host_of(self, rank: int) -> tuple[int, ...]:
        return next(host for host in self.hosts if rank in host)

    def close(self) -> None:
        """Closes the connections. Idempotent."""
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()


@dataclass(frozen=True)
class _Offer:
    """How to reach a rank; None where it can't be."""

    boot_id: str
    address: str
    token: bytes


def find_neighbours(bootstrap: Communicator, hosts: Sequence[Sequence[int]] | None = None) -> Neighbours:
    """Finds out which ranks of `bootstrap` share a host. Collective: two small exchanges.

    Args:
        hosts: never join ranks of different entries, even if they could reach one another; every rank is in one entry. The same on all
            ranks. For tests, and to keep apart what is one host only in name.

    Raises:
        ConfigurationError: `hosts` doesn't name each rank once.
        CommunicationError: an exchange failed.
    """
    if hosts is not None and sorted(rank for host in hosts for rank in host) != list(range(bootstrap.world_size)):
        raise ConfigurationError(f"hosts must name each rank from 0 to {bootstrap.world_size - 1} once, got {hosts}")
    listener, offer = _listen(bootstrap.world_size)
    connections: dict[int, socket.socket] = {}
    try:
        offers = all_gather_objects(bootstrap, offer)
        for rank in range(bootstrap.rank):
            if _may_join(bootstrap.rank, rank, offers, hosts):
                connection = _connect(offers[rank], bootstrap.rank)
                if connection is not None:
                    connections[rank] = connection
        reached = all_gather_objects(bootstrap, frozenset(connections))
        if listener is not None and offer is not None:
            awaited = {rank for rank in range(bootstrap.rank + 1, bootstrap.world_size) if bootstrap.rank in reached[rank]}
            connections |= _accept(listener, offer, awaited)
    except BaseException:
        Neighbours((), connections).close()
        raise
    finally:
        if listener is not None:
            listener.close()
    neighbours = Neighbours(group_by_host(reached), connections)
    host = neighbours.host_of(bootstrap.rank)
    for rank in [rank for rank in connections if rank not in host]:
        connections.pop(rank).close()
    return neighbours


def group_by_host(reached: Sequence[frozenset[int]]) -> tuple[tuple[int, ...], ...]:
    """Sets of ranks that all reach one another, given for each rank which lower ones it has reached. Every rank computes the same."""
    hosts: list[list[int]] = []
    for rank, lower in enumerate(reached):
        for host in hosts:
            if lower.issuperset(host):
                host.append(rank)
                break
        else:
            hosts.append([rank])
    return tuple(tuple(host) for host in hosts)


def _listen(backlog: int) -> tuple[socket.socket | None, _Offer | None]:
    try:
        boot_id = _BOOT_ID.read_text().strip()
        address = f"\0ddpcomm-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except (OSError, AttributeError):  # not Linux
        return None, None
    try:
        listener.bind(address)
        listener.listen(backlog)
        listener.settimeout(_PATIENCE_SECONDS)
    except OSError:
        listener.close()
        return None, None
    return listener, _Offer(boot_id, address, secrets.token_bytes(_TOKEN_BYTES))


def _may_join(rank: int, other: int, offers: Sequence[_Offer | None], hosts: Sequence[Sequence[int]] | None) -> bool:
    mine, theirs = offers[rank], offers[other]
    if mine is None or theirs is None or mine.boot_id != theirs.boot_id:
        return False
    return hosts is None or any(rank in host and other in host for host in hosts)


def _connect(offer: _Offer | None, rank: int) -> socket.socket | None:
    """A connection on which this rank has made itself known, None where the other can't be reached."""
    if offer is None:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_PATIENCE_SECONDS)
    try:
        connection.connect(offer.address)
        connection.sendall(_HELLO.pack(offer.token, rank))
    except OSError:
        connection.close()
        return None
    return connection


def _accept(listener: socket.socket, offer: _Offer, awaited: set[int]) -> dict[int, socket.socket]:
    """The connections of the ranks that said they have connected. Strangers are turned away."""
    connections: dict[int, socket.socket] = {}
    while missing := awaited - connections.keys():
        try:
            connection, _ = listener.accept()
        except OSError as error:
            raise PeerLostError(f"ranks {sorted(missing)} had connected to this one, but are gone ({error})", min(missing)) from error
        connection.settimeout(_PATIENCE_SECONDS)
        rank = _greeted_by(connection, offer)
        if rank in missing:
            connections[rank] = connection
        else:
            connection.close()
    return connections


def _greeted_by(connection: socket.socket, offer: _Offer) -> int | None:
    """The rank at the other end, None if that is a stranger."""
    try:
        token, rank = _HELLO.unpack(receive_exactly(connection, _HELLO.size))
    except OSError:
        return None
    return int(rank) if secrets.compare_digest(token, offer.token) else None


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """The next `size` bytes.

    Raises:
        OSError: the other end hung up, or sent nothing in time.
    """
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the other rank hung up")
        data += part
    return data
