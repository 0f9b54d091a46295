"""Ranks of one host find one another, and nobody else gets in."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddpcomm.comm import neighbours
from ddpcomm.comm.neighbours import find_neighbours, group_by_host
from ddpcomm.comm.process_group import ProcessGroupCommunicator
from ddpcomm.errors import ConfigurationError
from tests.ranks import RankContext, RankPool


def reached(*lower: set[int]) -> list[frozenset[int]]:
    return [frozenset(ranks) for ranks in lower]


@pytest.mark.parametrize(
    ("lower", "hosts"),
    [
        (reached(set()), ((0,),)),
        (reached(set(), {0}, {0, 1}), ((0, 1, 2),)),
        (reached(set(), set(), set()), ((0,), (1,), (2,))),
        (reached(set(), set(), {0}, {1}), ((0, 2), (1, 3))),
        (reached(set(), {0}, {1}), ((0, 1), (2,))),  # 2 reaches 1 but not 0: it can't join them
    ],
)
def test_groups(lower: list[frozenset[int]], hosts: tuple[tuple[int, ...], ...]) -> None:
    assert group_by_host(lower) == hosts


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_groups_of_true_hosts(host_of: list[int]) -> None:
    """Where reaching is what it should be, the groups are the hosts."""
    lower = [frozenset(other for other in range(rank) if host_of[other] == host_of[rank]) for rank in range(len(host_of))]
    groups = group_by_host(lower)
    assert sorted(rank for group in groups for rank in group) == list(range(len(host_of)))
    assert all(len({host_of[rank] for rank in group}) == 1 for group in groups)
    assert len(groups) == len(set(host_of))


def bootstrap(context: RankContext) -> ProcessGroupCommunicator:
    return ProcessGroupCommunicator(context.process_group, torch.device("cpu"))


def connect(context: RankContext) -> None:
    """Each connection leads to the rank that it says."""
    found = find_neighbours(bootstrap(context))
    assert found.hosts == (tuple(range(context.world_size)),)
    assert sorted([*found.connections, context.rank]) == list(range(context.world_size))
    for connection in found.connections.values():
        connection.sendall(bytes([context.rank]))
    for rank, connection in found.connections.items():
        assert connection.recv(1) == bytes([rank])
    found.close()
    found.close()


def test_connections(ranks: Callable[[int], RankPool]) -> None:
    for world_size in (1, 2, 4):
        ranks(world_size).run(connect)


def split(context: RankContext) -> None:
    found = find_neighbours(bootstrap(context), ((0, 2), (1,)))
    assert found.hosts == ((0, 2), (1,))
    assert set(found.connections) == {0: {2}, 1: set(), 2: {0}}[context.rank]
    found.close()
    with pytest.raises(ConfigurationError, match="once"):
        find_neighbours(bootstrap(context), ((0, 2), (2, 1)))


def test_forced_split(ranks: Callable[[int], RankPool]) -> None:
    ranks(3).run(split)


def other_kernel(context: RankContext) -> None:
    """Ranks on different kernels don't try, and ranks that can't listen are alone."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "boot_id"
        path.write_text(f"kernel {context.rank % 2}")
        patch.setattr(neighbours, "_BOOT_ID", path)
        assert find_neighbours(bootstrap(context)).hosts == ((0, 2), (1,))
        path.unlink()
        assert find_neighbours(bootstrap(context)).hosts == ((0,), (1,), (2,))


def test_other_kernels(ranks: Callable[[int], RankPool]) -> None:
    ranks(3).run(other_kernel)


def stranger(context: RankContext) -> None:
    """Somebody who found the address, but not the token, comes first."""
    usual = neighbours._listen
    intruders = []

    def listen(backlog: int) -> tuple[socket.socket | None, neighbours._Offer | None]:
        listener, offer = usual(backlog + 2)
        assert offer is not None
        for hello in (neighbours._HELLO.pack(bytes(16), 1), b"short"):
            intruder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            intruder.connect(offer.address)
            intruder.sendall(hello)
            intruder.shutdown(socket.SHUT_WR)
            intruders.append(intruder)
        return listener, offer

    with pytest.MonkeyPatch.context() as patch:
        if context.rank == 0:
            patch.setattr(neighbours, "_listen", listen)
        found = find_neighbours(bootstrap(context))
    assert found.hosts == ((0, 1),)
    found.close()
    for intruder in intruders:
        intruder.close()


def test_strangers_are_turned_away(two_ranks: RankPool) -> None:
    two_ranks.run(stranger)
