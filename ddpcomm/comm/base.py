"""The `Communicator` and `Work` interfaces: what every transport offers, and the checks that all of them share.

A transport implements the underscored methods. The public ones check their arguments once, here, so that a wrong call fails the same
way on every transport, before anything has been sent.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Literal, NamedTuple, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ddpcomm.argument_checks import check_integer, check_timeout
from ddpcomm.comm.cuda_runtime import CudaRuntime, Stream
from ddpcomm.errors import ClosedError, ConfigurationError, ConfigurationTypeError

ReduceOp = Literal["sum", "avg", "max"]
_REDUCE_OPS = get_args(ReduceOp)  # asked once: this is on the way of every collective


@runtime_checkable
class Work(Protocol):
    """A collective under way. It keeps the tensors that it works on alive."""

    def wait(self, timeout: timedelta | None = None) -> None:
        """Until the collective is done: a CPU rank blocks; on CUDA the current stream is made to wait, not the caller.

        Args:
            timeout: time limit of this wait; None means the communicator's own.

        Raises:
            CollectiveTimeoutError: the time limit passed.
            PeerLostError: a rank died.
            CommunicationError: anything else that the transport reports.
        """

    def is_completed(self) -> bool:
        """Whether the collective is done. Never blocks."""


class CollectiveTimer(Protocol):
    """Notes when collectives run on a device."""

    def begins(self, stream: Stream) -> None:
        """A collective is about to be put on `stream`, behind all that it waits for."""

    def ends(self, stream: Stream) -> None:
        """It has been, and nothing after it."""


class Elsewhere(NamedTuple):
    """Elements of a tensor that lie in other memory: `numel` of them, from `first` on, at `address`. All in elements of the tensor."""

    first: int
    numel: int
    address: int


def bucket_header(digest: int, index: int, count: int) -> int:
    """64 bits: a layout's digest (32 bits), how many buckets it has, and which of them this is (16 bits each). Never 0."""
    return (digest & 0xFFFF_FFFF) << 32 | (count & 0xFFFF) << 16 | (index + 1) & 0xFFFF


class CompletedWork:
    """Work that was done before it was returned."""

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is not None:
            check_timeout("wait: timeout", timeout)

    def is_completed(self) -> bool:
        return True


class Communicator(ABC):
    """A fixed set of ranks that exchange tensors. Every method that returns a `Work` is collective: all ranks call the same methods, with
    tensors of the same size and dtype, in the same order. What it writes to counts as changed in place for autograd.

    Args:
        rank: this rank's number, from 0.
        world_size: how many ranks there are.
        device: where the tensors live.
        timeout: time limit of every wait; None means the transport's own default.
    """

    transport: str
    averages_in_passing: bool = False
    """Whether "avg" costs no pass over the tensor besides those of "sum"."""
    reads_elsewhere: bool = False
    """Whether `own_share` is ever more than nothing."""
    shares_order_with: Hashable = None
    """Communicators for which this is equal, and not None, share one sequence of collectives: all ranks must call them in one order."""
    cuda_runtime: CudaRuntime | None = None
    """Through which it uses streams and events, if it has its own."""
    timer: CollectiveTimer | None = None
    """Told of each collective, by transports that put them on streams of their own."""

    def __init__(self, rank: int, world_size: int, device: torch.device, timeout: timedelta | None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.timeout = timeout
        self._closed = False

    # ---- memory -----------------------------------------------------------------------------------------------------

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A one-dimensional, uninitialised tensor of `numel` elements in memory that this transport reduces in place, without a copy.

        It stays valid after `close()` for as long as somebody holds it. Collective on some transports: every rank calls it with the
        same arguments in the same order.

        Raises:
            ConfigurationError, ConfigurationTypeError: there can't be so many elements, or no such.
            ClosedError: the communicator is closed.
        """
        self._check_open("empty")
        check_integer("empty: numel", numel, least=0)
        if not isinstance(dtype, torch.dtype):
            raise ConfigurationTypeError(f"empty: dtype must be a torch.dtype, got {dtype!r}")
        if numel * dtype.itemsize > sys.maxsize:
            raise ConfigurationError(f"empty: {numel} elements of {dtype} are more than can be addressed")
        return self._empty(numel, dtype)

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    # ---- collectives ------------------------------------------------------------------------------------------------

    def announce(self, header: int) -> None:  # noqa: B027 - most transports have no room for it
        """What the next all-reduce is about, as `bucket_header` packs it. Transports that can compare it over the ranks before any data is
        touched: where it differs, that all-reduce raises CollectiveMismatchError. Local."""

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Reduces `tensor`, in place, over all ranks; every rank gets the same bits.

        Args:
            tensor: any contiguous tensor on `device`.
            op: "sum", "avg" (floating-point only) or "max".

        Raises:
            ConfigurationError, ConfigurationTypeError: the arguments can't be served; nothing was sent.
            ClosedError: the communicator is closed.
            CommunicationError: it failed, as where the backend can't reduce the dtype (uint16 or float8 over Gloo).
        """
        self._check("all_reduce", tensor)
        self._check_op("all_reduce", tensor, op)
        increment_version(tensor)
        return self._all_reduce(tensor.detach() if tensor.requires_grad else tensor, op)

    def own_share(self, numel: int, dtype: torch.dtype) -> range:
        """The elements of an `empty` tensor of this size that in an all-reduce nobody but this rank reads. Local.

        They need not be copied to their place before: see `all_reduce_from`. Where the transport knows none, the range is empty.
        """
        del numel, dtype
        return range(0)

    def others_have_called(self) -> bool:
        """Whether every other rank has already called what this one is going to call next. Then an `all_reduce_from` has read what is
        elsewhere when it returns. Local, never blocks."""
        return False

    def all_reduce_from(self, tensor: Tensor, op: ReduceOp, elsewhere: Sequence[Elsewhere], keep: Sequence[Tensor]) -> Work:
        """`all_reduce` of an `empty` tensor, of which some elements are still elsewhere. The result is all in `tensor`.

        Args:
            elsewhere: those elements, by `first`; within `own_share`. They must not change before the work is done.
            keep: the tensors that they lie in.

        Raises:
            ConfigurationError: they are not within `own_share`; nothing was sent. And as `all_reduce`.
        """
        self._check("all_reduce", tensor)
        self._check_op("all_reduce", tensor, op)
        increment_version(tensor)
        return self._all_reduce_from(tensor, op, elsewhere, keep) if elsewhere else self._all_reduce(tensor, op)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Work:
        """Copies rank `source`'s `tensor` (contiguous) into every rank's."""
        self._check("broadcast", tensor)
        if not 0 <= check_integer("broadcast: source", source) < self.world_size:
            raise ConfigurationError(f"broadcast: source must be a rank from 0 to {self.world_size - 1}, got {source}")
        increment_version(tensor)
        return self._broadcast(tensor.detach(), source)

    def all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        """Puts every rank's `tensor`, by rank, into `out`, which has world size times as many elements. Both are contiguous."""
        self._check("all_gather", out, tensor)
        self._check_sizes("all_gather", whole=out, part=tensor, names=("out", "tensor"))
        increment_version(out)
        return self._all_gather(out.detach(), tensor.detach())

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Reduces `tensor` over all ranks and leaves rank r with the r-th of world size equal parts, in `out`. Both are contiguous.

        `tensor` may be overwritten.
        """
        self._check("reduce_scatter", out, tensor)
        self._check_op("reduce_scatter", tensor, op)
        self._check_sizes("reduce_scatter", whole=tensor, part=out, names=("tensor", "out"))
        increment_version([out, tensor])
        return self._reduce_scatter(out.detach(), tensor.detach(), op)

    def barrier(self) -> Work:
        """Done when every rank has called it."""
        self._check_open("barrier")
        return self._barrier()

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Work: ...

    def _all_reduce_from(self, tensor: Tensor, op: ReduceOp, elsewhere: Sequence[Elsewhere], keep: Sequence[Tensor]) -> Work:
        del tensor, op, elsewhere, keep
        raise ConfigurationError(f"all_reduce_from: {self.transport} reads nothing elsewhere, so all elements must be in the tensor")

    @abstractmethod
    def _broadcast(self, tensor: Tensor, source: int) -> Work: ...

    @abstractmethod
    def _all_gather(self, out: Tensor, tensor: Tensor) -> Work: ...

    @abstractmethod
    def _reduce_scatter(self, out: Tensor, tensor: Tensor, op: ReduceOp) -> Work: ...

    @abstractmethod
    def _barrier(self) -> Work: ...

    def progress(self) -> None:  # noqa: B027 - most transports have nothing to do here
        """Moves on the collectives under way, where that takes this rank's own thread. Not collective, never blocks, and is cheap. Never
        needed for correctness: `Work.wait` does the same."""

    def check(self) -> None:  # noqa: B027 - most transports tell at the wait
        """Raises what went wrong since the last call, where `Work.wait` doesn't block the host and so can't tell. Never blocks."""

    # ---- its end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Gives back what the communicator holds. Idempotent; not collective. Later collectives and `empty` raise
        `ClosedError`; what is local (`progress`, `check`, `own_share`, `others_have_called`, `announce`) does not."""
        if not self._closed:
            self._closed = True
            self._close()

    def _close(self) -> None:  # noqa: B027 - some transports have nothing to give back
        """What a transport gives back. Called once."""

    @property
    def closed(self) -> bool:
        return self._closed

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<{type(self).__name__} rank {self.rank} of {self.world_size} on {self.device}, {state}>"

    # ---- checks -----------------------------------------------------------------------------------------------------

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise ClosedError(f"{operation}: this {self.transport} communicator (rank {self.rank}) is closed; create another one")

    def _check(self, operation: str, *tensors: Tensor) -> None:
        self._check_open(operation)
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise ConfigurationTypeError(f"{operation}: expected a tensor, got {type(tensor).__name__}")
            if tensor.device != self.device:
                raise ConfigurationError(f"{operation}: the tensor is on {tensor.device}, this communicator on {self.device}")
            if tensor.layout != torch.strided or not tensor.is_contiguous():
                raise ConfigurationError(f"{operation}: the tensor must be dense and contiguous; call .contiguous() on it")
            if tensor.dtype != tensors[0].dtype:
                raise ConfigurationTypeError(f"{operation}: the tensors have different dtypes, {tensors[0].dtype} and {tensor.dtype}")

    def _check_op(self, operation: str, tensor: Tensor, op: ReduceOp) -> None:
        if not isinstance(op, str) or op not in _REDUCE_OPS:
            raise ConfigurationError(f'{operation}: op must be "sum", "avg" or "max", got {op!r}')
        if op == "avg" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ConfigurationTypeError(f'{operation}: op "avg" needs a floating-point tensor, got {tensor.dtype}')
        if op == "max" and tensor.is_complex():
            raise ConfigurationTypeError(f'{operation}: op "max" is not defined for {tensor.dtype}')

    def _check_sizes(self, operation: str, *, whole: Tensor, part: Tensor, names: tuple[str, str]) -> None:
        if whole.numel() != part.numel() * self.world_size:
            raise ConfigurationError(
                f"{operation}: {names[0]} must have {self.world_size} times as many elements as {names[1]}, "
                f"got {whole.numel()} and {part.numel()}"
            )
