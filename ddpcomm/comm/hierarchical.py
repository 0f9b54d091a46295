"""Collectives among ranks of several hosts: shared memory inside each host, a process group among one rank of each, shared memory again.

The first rank of a host is its leader. What moves, for S bytes a rank, L ranks on each of H hosts (see shared_memory.py and
process_group.py for what each part costs by itself):

| collective | in the host | between the leaders | in the host |
|---|---|---|---|
| all_reduce | all_reduce, S | all_reduce, S: 2 S (H - 1) / H sent by a leader with a ring | broadcast, S |
| broadcast | broadcast on the source's host, S | broadcast, S | broadcast on the other hosts, S |
| all_gather | all_gather, S | all_gather, L S | broadcast, H L S |
| reduce_scatter (S is the input's) | as all_reduce; then every rank takes its part | | |
| barrier | barrier | barrier | barrier |

So a host sends each byte once, whatever the number of its ranks, where a ring among all ranks sends it from each of them. A sum is formed
by rank inside each host, then by host; 16-bit floats are rounded once in each. All ranks get the same bits.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpcomm.argument_checks import check_integer, check_timeout
from ddpcomm.comm.base import Communicator, ReduceOp, Work
from ddpcomm.comm.exchange import all_gather_objects
from ddpcomm.comm.forked import abandon, leave_to_parent_after_fork
from ddpcomm.comm.neighbours import find_neighbours
from ddpcomm.comm.process_group import ProcessGroupCommunicator, translate
from ddpcomm.comm.segments import attach
from ddpcomm.comm.shared_memory import SharedMemoryCommunicator
from ddpcomm.comm.shared_memory_settings import SharedMemorySettings
from ddpcomm.errors import CommunicationError, TransportUnavailableError

# More calls than this wait for the oldest. A quarter of what shared memory can hold in flight: no rank is further ahead of another than
# this, so that a call never has to wait for room in one channel while another rank waits for room in the other one.
_CALLS_IN_FLIGHT = 64
_CONNECTION_ATTEMPTS = 5

_Step = Callable[[], Work | None]


def _nothing() -> None:
    return None


class HierarchicalWork:
    """A call on its way through the three stages. Each stage is entered in the order of the calls, so on all ranks alike."""

    def __init__(
        self, communicator: HierarchicalCommunicator, up: Work | None, between: _Step, down: _Step, finish: Callable[[], object]
    ) -> None:
        self._communicator = communicator
        self._current = up
        self._steps = deque([between, down])
        self._finish = finish
        self.done = False

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is not None:
            timeout = check_timeout("wait: timeout", timeout)
        self._communicator.run_until(self, timeout)

    def is_completed(self) -> bool:
        self._communicator.progress()
        return self.done

    def seen_done(self) -> bool:
        """Whether it is done, without moving it on."""
        return self.done

    @property
    def stage(self) -> int:
        """0 in the host, 1 between the leaders, 2 in the host again."""
        return 2 - len(self._steps)

    def try_next(self) -> bool:
        """Enters the next stage if this one is done; never blocks."""
        if self._current is not None and not self._current.is_completed():
            return False
        self.next(None)
        return True

    def next(self, timeout: timedelta | None) -> None:
        """Waits for this stage and enters the next, or is done."""
        if self._current is not None:
            self._current.wait(timeout)
        if self._steps:
            self._current = self._steps.popleft()()
        else:
            self._current = None
            self.done = True
            self._finish()


class HierarchicalCommunicator(Communicator):
    """Ranks of several hosts. Not collective to make; see `create_hierarchical`.

    Args:
        rank, world_size: in the whole group.
        up, down: this host's ranks, twice, over the same memory; closed by this communicator.
        between: the hosts' leaders, None on other ranks; closed by this communicator.
        hosts: the ranks of each host; the first of each is its leader.
        timeout: time limit of every wait.
    """

    transport = "hierarchical"

    def __init__(
        self,
        rank: int,
        world_size: int,
        up: SharedMemoryCommunicator,
        down: SharedMemoryCommunicator,
        between: ProcessGroupCommunicator | None,
        hosts: Sequence[Sequence[int]],
        timeout: timedelta,
    ) -> None:
        super().__init__(rank, world_size, torch.device("cpu"), timeout)
        self.hosts = tuple(tuple(host) for host in hosts)
        self._up = up
        self._down = down
        self._between = between
        self._host = next(i for i, host in enumerate(self.hosts) if rank in host)
        self._pending: deque[HierarchicalWork] = deque()
        leave_to_parent_after_fork(self)

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._up.empty(numel, dtype)

    # ---- collectives ------------------------------------------------------------------------------------------------

    def announce(self, header: int) -> None:
        """The ranks of each host compare it."""
        self._up.announce(header)

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Work:
        return self._reduce(tensor, op, _nothing)

    def _reduce_scatter(self, out: Tensor, tensor: Tensor, op: ReduceOp) -> Work:
        mine = tensor.view(-1).narrow(0, self.rank * out.numel(), out.numel())
        return self._reduce(tensor, op, lambda: out.view(-1).copy_(mine))

    def _reduce(self, tensor: Tensor, op: ReduceOp, finish: Callable[[], object]) -> Work:
        share = self._up.world_size / self.world_size

        def between() -> Work | None:
            if self._between is None:
                return None
            if op == "avg":
                tensor.mul_(share)  # the host's average, weighted by how many ranks it has
            return self._between.all_reduce(tensor, "max" if op == "max" else "sum")

        return self._start(lambda: self._up.all_reduce(tensor, op), between, lambda: self._down.broadcast(tensor), finish)

    def _broadcast(self, tensor: Tensor, source: int) -> Work:
        source_host = next(i for i, host in enumerate(self.hosts) if source in host)
        at_source = source_host == self._host
        local_source = self.hosts[source_host].index(source)

        def up() -> Work | None:
            return self._up.broadcast(tensor, local_source) if at_source else None

        def between() -> Work | None:
            return None if self._between is None else self._between.broadcast(tensor, source_host)

        return self._start(up, between, _nothing if at_source else lambda: self._down.broadcast(tensor))

    def _all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        # Hosts may have different numbers of ranks, but an all-gather takes parts of one size: that of the largest.
        largest = max(len(host) for host in self.hosts)
        local = torch.zeros((largest, tensor.numel()), dtype=tensor.dtype)
        everybody = torch.empty((len(self.hosts), largest, tensor.numel()), dtype=tensor.dtype)
        in_order = [host * largest + position for _, host, position in sorted(self._places())]

        def between() -> Work | None:
            if len(self.hosts) == 1:
                everybody.copy_(local)
            return None if self._between is None else self._between.all_gather(everybody, local)

        def finish() -> None:
            by_rank = everybody.view(-1, tensor.numel()).view(torch.uint8)[in_order].view(tensor.dtype)
            out.view(self.world_size, -1).copy_(by_rank)

        mine = local[: self._up.world_size]
        return self._start(
            lambda: self._up.all_gather(mine, tensor),
            between,
            lambda: self._down.broadcast(everybody),
            finish if tensor.numel() else _nothing,
        )

    def _places(self) -> list[tuple[int, int, int]]:
        return [(rank, i, position) for i, host in enumerate(self.hosts) for position, rank in enumerate(host)]

    def _barrier(self) -> Work:
        return self._start(self._up.barrier, lambda: None if self._between is None else self._between.barrier(), self._down.barrier)

    # ---- the stages -------------------------------------------------------------------------------------------------

    def _start(self, up: _Step, between: _Step, down: _Step, finish: Callable[[], object] = _nothing) -> HierarchicalWork:
        while len(self._pending) >= _CALLS_IN_FLIGHT:
            self.run_until(self._pending[0], None)
        with self._telling_the_host():
            work = HierarchicalWork(self, up(), between, down, finish)
        self._pending.append(work)
        self.progress()
        return work

    def progress(self) -> None:
        """Moves every call on as far as it can go."""
        if not self._pending:
            return
        with self._telling_the_host():
            self._up.progress()
            self._down.progress()
            furthest = 2
            for work in self._pending:
                # A call may not overtake the one before it.
                while work.stage < furthest and work.try_next():
                    pass
                furthest = work.stage
                if furthest == 0:
                    break
            while self._pending and self._pending[0].stage == 2 and self._pending[0].try_next():
                self._pending.popleft()

    def run_until(self, work: HierarchicalWork, timeout: timedelta | None) -> None:
        """Waits for a call, and for all before it."""
        while not work.done:
            oldest = self._pending[0]
            with self._telling_the_host():
                oldest.next(timeout)
            if oldest.done:
                self._pending.popleft()
            self.progress()

    @contextlib.contextmanager
    def _telling_the_host(self) -> Iterator[None]:
        """What one rank of a host learns, the others must learn: they may be waiting for it in shared memory."""
        try:
            yield
        except CommunicationError as error:
            self._up.give_up(error)
            self._down.give_up(error)
            raise

    # ---- its end ----------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        self._pending.clear()
        self._down.close()
        self._up.close()
        if self._between is not None:
            self._between.close()
            self._between = None

    def leave_to_parent(self) -> None:
        """In a forked child: becomes closed, without ending the leaders' group."""
        self._closed = True
        abandon(self._between)
        self._pending.clear()


def create_hierarchical(
    bootstrap: ProcessGroupCommunicator,
    timeout: timedelta,
    *,
    hosts: Sequence[Sequence[int]] | None = None,
    capacity_bytes: int | None = None,
    **settings: Any,
) -> HierarchicalCommunicator:
    """Makes a communicator for ranks on any hosts. Collective over `bootstrap`: five small exchanges, and a group of the leaders.

    Args:
        bootstrap: the ranks, over the process group that the leaders' group is modelled on.
        timeout: time limit of every wait.
        hosts: see `find_neighbours`.
        capacity_bytes, settings: see `create_shared_memory`.

    Raises:
        TransportUnavailableError: no host has more than one rank, so that a plain process group serves better, or shared memory can't be
            set up; on every rank.
        RankMismatchError: the ranks gave different settings; on every rank.
    """
    chosen = SharedMemorySettings(**settings)
    if capacity_bytes is not None:
        check_integer("capacity_bytes", capacity_bytes, least=1)
    neighbours = find_neighbours(bootstrap, hosts)
    if all(len(host) == 1 for host in neighbours.hosts):
        neighbours.close()
        raise TransportUnavailableError("no two ranks can reach one another's memory")
    segments = attach(bootstrap, neighbours, chosen, capacity_bytes)
    try:
        leaders = tuple(host[0] for host in neighbours.hosts)
        between = _connect_leaders(bootstrap, leaders, timeout)
    except BaseException:
        segments.discard()
        raise
    up = SharedMemoryCommunicator(segments, timeout, chosen, channel=0)
    down = SharedMemoryCommunicator(segments, timeout, chosen, channel=1)
    return HierarchicalCommunicator(bootstrap.rank, bootstrap.world_size, up, down, between, neighbours.hosts, timeout)


def _connect_leaders(bootstrap: ProcessGroupCommunicator, leaders: tuple[int, ...], timeout: timedelta) -> ProcessGroupCommunicator | None:
    """A group of the leaders, on leaders. Collective over all ranks.

    Raises:
        CommunicationError: a leader is lost, or did not come in time.
    """
    # A name that no group had before: what an earlier one left in the store would be taken for this one's.
    name = all_gather_objects(bootstrap, secrets.token_hex(8))[0]
    if bootstrap.rank not in leaders or len(leaders) == 1:
        return None
    cpu = torch.device("cpu")
    store = dist.distributed_c10d.PrefixStore(
        f"ddpcomm/leaders/{name}", dist.distributed_c10d._get_process_group_store(bootstrap.process_group)
    )
    rank = leaders.index(bootstrap.rank)
    group = dist.ProcessGroup(store, rank, len(leaders))
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    try:
        # Every collective brings its own limit. Here Gloo tries so often, waiting as long each time, and all leaders are on their way.
        backend = dist.ProcessGroupGloo(store, rank, len(leaders), timeout / _CONNECTION_ATTEMPTS)
    except RuntimeError as error:
        raise translate(
            error, f"connecting the leaders of the hosts, ranks {', '.join(map(str, leaders))}, on rank {bootstrap.rank}"
        ) from error
    group._register_backend(cpu, kind, backend)
    return ProcessGroupCommunicator(group, cpu, timeout)
