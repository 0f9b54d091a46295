"""Collectives among ranks of one host, through memory that all of them map.

What moves, for S bytes a rank and n ranks; a copy of S bytes reads S and writes S:

| collective | steps | read, written by each rank |
|---|---|---|
| all_reduce on `empty()` memory | 2 | S, S: 1/n of every rank's tensor is reduced into every rank's tensor |
| all_reduce_from | 2 | the same; up to S / n of what it reads need not have been copied to `empty()` memory before |
| all_reduce up to 32 KiB, or on other memory with two ranks | 1 | (n + 1) S, 2 S: copied to a staging buffer, then every rank reduces all |
| all_reduce on other memory | 2 a piece | 3 S, 3 S: the same as the first, between two copies |
| broadcast | 1 | S, S on the receivers; a copy more on the source for other memory |
| all_gather | 1 | n S, n S |
| reduce_scatter (S is the input's) | 1 | S, S / n |
| barrier | 1 | nothing |

"other memory" means tensors that are not from `empty()`: their copies travel in pieces through two staging buffers, so that one is filled
while the other is read. The ranks read and write each other's tensors directly, and all results of a reduction are the same bits: each
element is reduced by rank, by one rank for all or by every rank in the same way. 16-bit floats are accumulated in float32. "avg" multiplies
each rank's values by 1/n before it adds them, as torch's own DDP does, so that sums don't overflow.

Before any data is touched the ranks compare what each of them has called; where that differs every rank raises
`CollectiveMismatchError`. After any failure a communicator does nothing more and goes on raising that failure.

**No thread.** A call's work is done by the ranks' own threads: in the call itself if the others have arrived, else in whatever call of this
communicator comes next (`progress()` is one that does nothing else), at last in `wait()`. See docs/transports.md for the measurements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import Tensor

from ddpcomm import _native
from ddpcomm.argument_checks import check_integer, check_timeout
from ddpcomm.comm.base import Communicator, Elsewhere, ReduceOp, Work
from ddpcomm.comm.forked import leave_to_parent_after_fork
from ddpcomm.comm.neighbours import find_neighbours
from ddpcomm.comm.segments import Segments, allocate, attach
from ddpcomm.comm.shared_memory_settings import SharedMemorySettings
from ddpcomm.errors import (
    ClosedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    ConfigurationError,
    ConfigurationTypeError,
    PeerLostError,
    TransportUnavailableError,
)

_ALL_REDUCE, _BROADCAST, _ALL_GATHER, _REDUCE_SCATTER, _BARRIER = range(5)
_OPS: dict[ReduceOp, int] = {"sum": 0, "avg": 1, "max": 2}

# As in DLPack: what kind of number (0 int, 1 uint, 2 float, 4 bfloat, 5 complex, 6 bool), and its bits.
_REDUCIBLE = {
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.complex64: (2, 32),  # reduced as pairs of floats
    torch.complex128: (2, 64),
    torch.int64: (0, 64),
    torch.int32: (0, 32),
    torch.int16: (0, 16),
    torch.int8: (0, 8),
    torch.uint8: (1, 8),
    torch.bool: (1, 8),  # max only
}
# What only moves may be of any type; those that can't be reduced are told apart by codes of our own.
_OTHER_DTYPES = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and dtype not in _REDUCIBLE]
_MOVABLE = _REDUCIBLE | {
    torch.complex64: (5, 64),
    torch.complex128: (5, 128),
    torch.bool: (6, 8),
    **{dtype: (32 + i, 8 * dtype.itemsize) for i, dtype in enumerate(sorted(set(_OTHER_DTYPES), key=str))},
}
_FAILURE = _native.SharedMemoryFailure
_ENDED = "This communicator can't be used any further."


class SharedMemoryWork:
    """A call under way."""

    __slots__ = ("_communicator", "_number", "_tensors")

    def __init__(self, communicator: SharedMemoryCommunicator, number: int, tensors: tuple[Tensor, ...]) -> None:
        self._communicator = communicator
        self._number = number
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is not None:
            timeout = check_timeout("wait: timeout", timeout)
        self._communicator._wait(self._number, timeout)
        self._tensors = ()

    def is_completed(self) -> bool:
        return self._communicator._is_finished(self._number)

    def seen_done(self) -> bool:
        """Whether it is done, without moving it on."""
        return self._communicator._channel.is_finished(self._number)


class SharedMemoryCommunicator(Communicator):
    """The ranks of one host. Not collective to make: `attach` has done all that is.

    Args:
        segments: the ranks' memory; this communicator closes it, unless `channel` is not 0.
        timeout: time limit of every wait.
        settings: sizes and times that tune it; the same on all ranks.
        channel: communicators over the same segments need different ones, 0 or 1.
    """

    transport = "shared_memory"
    averages_in_passing = True
    reads_elsewhere = True

    def __init__(
        self,
        segments: Segments,
        timeout: timedelta,
        settings: SharedMemorySettings | None = None,
        channel: int = 0,
    ) -> None:
        super().__init__(segments.position, len(segments.ranks), torch.device("cpu"), timeout)
        settings = settings or SharedMemorySettings()
        self.segments = segments
        self._owns_segments = channel == 0
        self._seconds = timeout.total_seconds()
        self._in_flight: deque[tuple[int, tuple[Tensor, ...]]] = deque()
        self._forked = False
        self._header = 0
        self._channel = _native.SharedMemoryChannel(
            segments.arena,
            segments.position,
            segments.segments,
            segments.ranks,
            segments.watched,
            channel,
            settings.piece_bytes,
            settings.small_bytes,
            settings.longest_spin.total_seconds(),
            settings.instruction_set,
        )
        leave_to_parent_after_fork(self)

    # ---- memory -----------------------------------------------------------------------------------------------------

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Not collective here. The memory goes back to the machine when the last tensor over it dies.

        Raises:
            SharedMemoryFullError: there is none left.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        allocation = allocate(self.segments.arena, numel * dtype.itemsize)
        return torch.frombuffer(allocation, dtype=dtype, count=numel)

    # ---- collectives ------------------------------------------------------------------------------------------------

    def announce(self, header: int) -> None:
        """The next all-reduce carries it; the ranks compare it with everything else about that call."""
        self._header = header

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Work:
        code, bits, numel = _reducible(tensor, op)
        address = tensor.data_ptr()
        header, self._header = self._header, 0
        return self._start((tensor,), _ALL_REDUCE, _OPS[op], code, bits, 0, numel, header, address, address)

    def own_share(self, numel: int, dtype: torch.dtype) -> range:
        if dtype.is_complex or dtype not in _REDUCIBLE:
            return range(0)
        return range(*self._channel.own_share(numel, *_REDUCIBLE[dtype]))

    def others_have_called(self) -> bool:
        return self._channel.others_have_called()

    def _all_reduce_from(self, tensor: Tensor, op: ReduceOp, elsewhere: Sequence[Elsewhere], keep: Sequence[Tensor]) -> Work:
        code, bits, numel = _reducible(tensor, op)
        address = tensor.data_ptr()
        header, self._header = self._header, 0
        try:
            return self._start((tensor, *keep), _ALL_REDUCE, _OPS[op], code, bits, 0, numel, header, address, address, elsewhere)
        except ValueError as error:
            raise ConfigurationError(f"all_reduce_from: {error}") from None

    def _broadcast(self, tensor: Tensor, source: int) -> Work:
        address = tensor.data_ptr()
        return self._start((tensor,), _BROADCAST, 0, *_MOVABLE[tensor.dtype], source, tensor.numel(), 0, address, address)

    def _all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        dtype = _MOVABLE[tensor.dtype]
        return self._start((out, tensor), _ALL_GATHER, 0, *dtype, 0, tensor.numel(), 0, tensor.data_ptr(), out.data_ptr())

    def _reduce_scatter(self, out: Tensor, tensor: Tensor, op: ReduceOp) -> Work:
        code, bits, numel = _reducible(out, op)
        return self._start((out, tensor), _REDUCE_SCATTER, _OPS[op], code, bits, 0, numel, 0, tensor.data_ptr(), out.data_ptr())

    def _barrier(self) -> Work:
        return self._start((), _BARRIER, *[0] * 8)

    def progress(self) -> None:
        """Does what can be done of the calls under way. Costs well under a microsecond where that is nothing."""
        self._channel.progress()

    def _start(self, tensors: tuple[Tensor, ...], *call: Any) -> SharedMemoryWork:
        """Starts a call, whose arguments are those of the native channel."""
        if self._in_flight:
            self._release()
        channel = self._channel
        while not (number := channel.start(*call)):
            if channel.failed or not channel.wait_for_room(self._seconds):
                self._raise_failure()
        self._in_flight.append((number, tensors))  # the others may read and write them, even if nobody keeps the work
        return SharedMemoryWork(self, number, tensors)

    def _wait(self, number: int, timeout: timedelta | None) -> None:
        self._check_process()
        if not self._channel.wait(number, self._seconds if timeout is None else timeout.total_seconds()):
            self._raise_failure()
        self._release()

    def _release(self) -> None:
        """Lets go of the tensors of finished calls."""
        in_flight, is_finished = self._in_flight, self._channel.is_finished
        while in_flight and is_finished(in_flight[0][0]):
            in_flight.popleft()

    def _is_finished(self, number: int) -> bool:
        self._check_process()
        self._channel.progress()
        self._release()
        return self._channel.is_finished(number)

    def give_up(self, error: CommunicationError) -> None:
        """Fails this communicator on all ranks, because of an error elsewhere. Not collective; the first failure counts."""
        kind, ranks = _FAILURE.OTHER, list[int]()
        if isinstance(error, PeerLostError):
            kind = _FAILURE.PEER_LOST
            if error.lost_rank in self.segments.ranks:
                ranks = [self.segments.ranks.index(error.lost_rank)]
        elif isinstance(error, CollectiveTimeoutError):
            kind = _FAILURE.TIMEOUT
        elif isinstance(error, CollectiveMismatchError):
            kind = _FAILURE.MISMATCH
        self._channel.abort(kind, ranks, str(error).partition(f". {_ENDED}")[0])

    def _raise_failure(self) -> NoReturn:
        kind, ranks, message = self._channel.failure()
        which = [self.segments.ranks[rank] for rank in ranks]
        ended = f"{message}. {_ENDED}"
        if kind == _FAILURE.MISMATCH:
            raise CollectiveMismatchError(f"{ended} All ranks must make the same calls in the same order.")
        if kind == _FAILURE.TIMEOUT:
            raise CollectiveTimeoutError(f"{ended} Look for a rank that hangs or took another path, or allow more time.", which)
        if kind in (_FAILURE.PEER_LOST, _FAILURE.PEER_CLOSED):
            raise PeerLostError(f"{ended} Look for the reason in that rank's own output.", which[0] if which else None)
        if kind == _FAILURE.CLOSED:
            raise ClosedError(message)
        raise CommunicationError(ended)

    # ---- its end ----------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        self._channel.close()
        self._in_flight.clear()
        if self._owns_segments:
            self.segments.close()

    def _check_open(self, operation: str) -> None:
        if self._closed:
            self._check_process()
            super()._check_open(operation)

    def _check_process(self) -> None:
        if self._forked:
            raise ClosedError("this shared_memory communicator belongs to the parent process; a forked child can't use it")

    def leave_to_parent(self) -> None:
        """In a forked child: lets go of the sockets, which would hide the parent's death from its peers."""
        self._forked = True
        self._closed = True
        self.segments.close()


def create_shared_memory(
    bootstrap: Communicator, timeout: timedelta, *, capacity_bytes: int | None = None, **settings: Any
) -> SharedMemoryCommunicator:
    """Makes a communicator for ranks that are all on one host. Collective over `bootstrap`, a CPU communicator: three small exchanges.

    Args:
        bootstrap: the ranks.
        timeout: time limit of every wait.
        capacity_bytes: the most that `empty()` can hand out at a time on this rank; None means the machine's memory.
        settings: of `SharedMemorySettings`.

    Raises:
        TransportUnavailableError: they are not, or shared memory can't be set up; on every rank.
        RankMismatchError: the ranks gave different settings; on every rank.
    """
    chosen = SharedMemorySettings(**settings)
    if capacity_bytes is not None:
        check_integer("capacity_bytes", capacity_bytes, least=1)
    neighbours = find_neighbours(bootstrap)
    if len(neighbours.hosts) > 1:
        neighbours.close()
        raise TransportUnavailableError(f"the ranks can't all reach one another's memory; found to be on one host: {neighbours.hosts}")
    segments = attach(bootstrap, neighbours, chosen, capacity_bytes)
    try:
        return SharedMemoryCommunicator(segments, timeout, chosen)
    except BaseException:
        segments.discard()
        raise


def _reducible(tensor: Tensor, op: ReduceOp) -> tuple[int, int, int]:
    """Code and bits of the dtype, and the number of elements, as they are reduced."""
    dtype = tensor.dtype
    if dtype not in _REDUCIBLE or (dtype == torch.bool and op != "max"):
        raise ConfigurationTypeError(f'shared_memory can\'t reduce {dtype} with op "{op}"; convert the tensor first')
    code, bits = _REDUCIBLE[dtype]
    if dtype.is_complex:
        if tensor.is_conj():
            raise ConfigurationError("the tensor is conjugated lazily; call .resolve_conj() on it")
        return code, bits, 2 * tensor.numel()
    return code, bits, tensor.numel()
