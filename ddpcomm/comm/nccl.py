"""Collectives of NCCL, on CUDA streams of their own.

The n-th collective goes to communicator n mod N, so that all ranks use the same one for it; that all issue the same collectives is checked
beside rank 0's order. One way of a bucket, with everything but the last line asynchronous to the host:

    producing stream   flatten ── record ready
    lane's stream                 wait for ready ── ncclAllReduce ── record end
    current stream                                                   wait for end ── unflatten      (Work.wait)

An all-reduce of S bytes on n ranks moves 2 S (n - 1) / n bytes out of every rank with NCCL's ring, in 2(n - 1) steps; its tree takes about
2 log2(n) steps for 2 S bytes, and in symmetric windows over NVLink SHARP the switch adds, for S bytes out of every rank. Which, libnccl
decides by size and topology. All-gather and reduce-scatter of S bytes a rank move S (n - 1) bytes, broadcast S.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpcomm.comm.base import Communicator, CompletedWork, ReduceOp, Work
from ddpcomm.comm.cuda_runtime import Event, Stream, order_after
from ddpcomm.comm.nccl_lane import Lane
from ddpcomm.comm.nccl_lanes import Lanes
from ddpcomm.comm.nccl_library import MAXIMUM, SUM, Handle, check_reducible, dotted
from ddpcomm.comm.nccl_memory import BucketMemory, MemoryReport
from ddpcomm.comm.nccl_start import Equipment, connect, equip
from ddpcomm.comm.nccl_watchdog import Watchdog
from ddpcomm.comm.nccl_work import NcclWork
from ddpcomm.comm.order import CollectiveOrder
from ddpcomm.comm.process_group import resolve
from ddpcomm.comm.rendezvous import Rendezvous
from ddpcomm.errors import ClosedError, CollectiveMismatchError, CommunicationError, ConfigurationError, RankMismatchError

_log = logging.getLogger(__name__)
DEFAULT_TIMEOUT = timedelta(minutes=10)
_FAREWELL = timedelta(seconds=30)  # how long closing may take before it aborts, if the time limit isn't less
_Begin = Callable[[Lane], Callable[[Handle], None]]
"""Makes ready for a collective on a lane, and returns the call of libnccl that puts it on the lane's stream."""


class NcclCommunicator(Communicator):
    """Ranks with a GPU each. Use `create`.

    Args:
        rendezvous: where the ranks meet.
        equipment: library, device and options; the options are the same on all ranks.
        handles: started communicators, which this object owns from now on.
        timeout: time limit of every collective and every call of libnccl's.
    """

    transport = "nccl"
    averages_in_passing = True

    def __init__(self, rendezvous: Rendezvous, equipment: Equipment, handles: Sequence[Handle], timeout: timedelta) -> None:
        super().__init__(rendezvous.rank, rendezvous.world_size, equipment.device, timeout)
        self.options = options = equipment.options
        self._limit = timeout
        self._rendezvous = rendezvous
        self._equipment = equipment
        self._library = library = equipment.library
        self.cuda_runtime = self._runtime = runtime = equipment.runtime
        self._order = CollectiveOrder()
        failing = threading.Event()
        self._lanes = Lanes(handles, library, runtime, timeout, failing.is_set)
        self._watchdog = Watchdog(rendezvous, self._order, timeout, failing, runtime, self._lanes.error, self._lanes.abort)
        rendezvous.interrupt = self._watchdog.raise_if_failed
        self._memory = BucketMemory(library, runtime, self._lanes, rendezvous, equipment.device, options.memory)
        self._in_turn = len(handles) > 1 and not options.runs_side_by_side(library.version)
        self._previous_end: Event | None = None
        self._issuing = threading.Lock()
        self._shrunk = 0
        self._stop_at_exit = weakref.finalize(self, self._watchdog.stop)  # a thread must not use CUDA while the interpreter goes

    @classmethod
    def create(
        cls,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> NcclCommunicator:
        """Starts communicators among the ranks of a process group. Collective; fails on all ranks or on none.

        Args:
            process_group: any; only its key-value store is used. None means the default group.
            device: this rank's GPU, None the current one. No two ranks may have the same.
            timeout: time limit of every collective; None means ten minutes.
            options: see `NcclOptions`.

        Raises:
            ConfigurationError, ConfigurationTypeError: an option can't be, or this libnccl lacks it.
            TransportUnavailableError: some rank has no GPU or no library, or libnccl can't connect the ranks.
            RankMismatchError: ranks have other options or another libnccl.
            CollectiveTimeoutError, CommunicationError: some rank didn't come.
        """
        limit = timeout or DEFAULT_TIMEOUT
        rendezvous = Rendezvous.of(resolve(process_group), "nccl", limit)
        equipment = equip(rendezvous, device, options)
        return cls(rendezvous, equipment, connect(rendezvous, equipment, limit), limit)

    # ---- memory -----------------------------------------------------------------------------------------------------

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        self._watchdog.raise_if_failed()
        with self._issuing:
            return self._memory.empty(numel, dtype)

    @property
    def memory(self) -> MemoryReport:
        """What `empty` gives, why, and how much of it is in use."""
        own = self._lanes.memory_bytes() if self._library.has("ncclCommMemStats") else None
        return MemoryReport(self._memory.mode.name.lower(), self._memory.reason, self._memory.bucket_bytes, own)

    @property
    def registered_bytes(self) -> int:
        """The bytes of live `empty` tensors that libnccl has registered; torch's allocator doesn't count them."""
        return self._memory.bucket_bytes

    # ---- collectives ------------------------------------------------------------------------------------------------

    def all_reduce(
        self, tensor: Tensor, op: ReduceOp = "sum", *, streams: Iterable[Stream] = (), scale: float | None = None, tag: str = ""
    ) -> Work:
        """As `Communicator.all_reduce`, and:

        Args:
            streams: streams, beside the current one, that wrote to `tensor`: the collective runs after what is on them now.
            scale: with op "sum", every rank's elements are multiplied by it first (floating-point only). "avg" is 1 / world size: scaled
                before the sum, as torch's DDP does, and by libnccl in passing unless the factor needs more digits than the dtype has.
            tag: what errors call it, such as "bucket 3".

        Symmetric windows are reduced fastest with op "sum" and no scale: libnccl has no symmetric kernel that scales.
        """
        self._check("all_reduce", tensor)
        self._check_op("all_reduce", tensor, op)
        if scale is not None and (op != "sum" or not (tensor.is_floating_point() or tensor.is_complex())):
            raise ConfigurationError('all_reduce: scale goes with op "sum" and a floating-point tensor')
        real = self._reducible(tensor)
        factor, streams = self._factor(real, op, scale, streams)

        def begin(lane: Lane) -> Callable[[Handle], None]:
            operator = self._operator(lane, real.dtype, op, factor)
            return lambda handle: self._library.all_reduce(handle, real, operator, lane.stream)

        detail = f"{op}{'' if scale is None else f' of {scale:g} times'}{self._memory.place(real)}"
        return self._issue("all_reduce", (real,), detail, begin, streams, tag)

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Work:
        return self.all_reduce(tensor, op)

    def _broadcast(self, tensor: Tensor, source: int) -> Work:
        raw = _bytes(tensor)

        def begin(lane: Lane) -> Callable[[Handle], None]:
            return lambda handle: self._library.broadcast(handle, raw, source, lane.stream)

        return self._issue("broadcast", (raw,), f"from rank {source}", begin)

    def _all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        raw_out, raw = _bytes(out), _bytes(tensor)

        def begin(lane: Lane) -> Callable[[Handle], None]:
            return lambda handle: self._library.all_gather(handle, raw_out, raw, lane.stream)

        return self._issue("all_gather", (raw, raw_out), f"gather{self._memory.place(raw_out)}", begin)

    def _reduce_scatter(self, out: Tensor, tensor: Tensor, op: ReduceOp) -> Work:
        real_out, real = self._reducible(out), self._reducible(tensor)
        factor, _ = self._factor(real, op, None, ())

        def begin(lane: Lane) -> Callable[[Handle], None]:
            operator = self._operator(lane, real.dtype, op, factor)
            return lambda handle: self._library.reduce_scatter(handle, real_out, real, operator, lane.stream)

        return self._issue("reduce_scatter", (real, real_out), f"{op}{self._memory.place(real)}", begin)

    def _barrier(self) -> Work:
        token = torch.zeros(1, dtype=torch.int32, device=self.device)

        def begin(lane: Lane) -> Callable[[Handle], None]:
            return lambda handle: self._library.all_reduce(handle, token, SUM, lane.stream)

        return self._issue("barrier", (token,), "all ranks", begin, blocking=True)

    def _issue(
        self,
        name: str,
        tensors: tuple[Tensor, ...],
        detail: str,
        begin: _Begin,
        streams: Iterable[Stream] = (),
        tag: str = "",
        blocking: bool = False,
    ) -> Work:
        """Puts a collective on the next lane. `tensors` are all that it touches; the first says its size."""
        first = tensors[0]
        if first.numel() == 0:
            return CompletedWork()
        self._watchdog.raise_if_failed()
        current = self._runtime.current_stream()
        with self._issuing:
            operation = self._order.add(name, first.nbytes, first.dtype, detail, tag)
            lane = self._lanes[operation.number % len(self._lanes)]
            try:
                call = begin(lane)
                lane.follow([current, *streams])
                if self._in_turn and self._previous_end is not None:
                    self._runtime.wait(lane.stream, self._previous_end)
                timer = self.timer
                if timer is not None:
                    timer.begins(lane.stream)
                lane.call(operation, call)
                if timer is not None:
                    timer.ends(lane.stream)
            except ClosedError:
                self._watchdog.raise_if_failed()  # aborted just now
                raise
            except CommunicationError as error:
                failure = self._watchdog.fail(error)
                if failure is error:
                    raise
                raise failure from error
            end = self._runtime.create_event()
            self._runtime.record(end, lane.stream)
            self._previous_end = end
            work = NcclWork(operation, end, tensors, current.cuda_stream, self._limit, self._runtime, self._watchdog, blocking)
            if not self._runtime.is_capturing():  # the events of a captured collective can't be asked
                self._watchdog.watch(work)
        return work

    def _factor(
        self, tensor: Tensor, op: ReduceOp, scale: float | None, streams: Iterable[Stream]
    ) -> tuple[float | None, Iterable[Stream]]:
        """The factor that libnccl is to apply, None for none, and the streams that are still to be waited for.

        libnccl holds the factor in the tensor's own dtype. In 16 bits 1/3 is 0.1 % off, and so would every average be: such a factor is
        applied here, in a pass of its own, with the rounding of a float32 product.
        """
        factor = 1.0 / self.world_size if op == "avg" else scale
        if factor is None or _holds(tensor.dtype, factor):
            return factor, streams
        order_after(self._runtime, self._runtime.current_stream(), streams, self._runtime.create_event())
        tensor.mul_(factor)
        return None, ()

    def _operator(self, lane: Lane, dtype: torch.dtype, op: ReduceOp, factor: float | None) -> int:
        if op == "max" or dtype == torch.bool:  # a sum of bools says whether any is true, as torch has it
            return MAXIMUM
        return SUM if factor is None else lane.scaled_sum(factor, dtype)

    def _reducible(self, tensor: Tensor) -> Tensor:
        """The tensor in a dtype that libnccl can reduce, over the same memory."""
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        check_reducible(real.dtype, self._library.version)
        return real.detach()

    # ---- what goes wrong --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises what made this communicator fail, if it has: in a collective that nobody waits for any more, or on another rank.

        Raises:
            CollectiveTimeoutError, PeerLostError, CollectiveMismatchError, CommunicationError: see there.
        """
        self._watchdog.raise_if_failed()

    def check_order(self) -> None:
        """Compares what the ranks have issued so far. Collective, over the store; the GPU has no part in it.

        Raises:
            CollectiveMismatchError: they issued different collectives, or another number of them. On every rank.
            CollectiveTimeoutError, CommunicationError: some rank didn't come.
        """
        self._check_open("check_order")
        position = self._order.position()
        try:
            issued = f"{position.count}, the last {position.last}"
            self._rendezvous.check_equal("the collectives issued", f"{position.count} {position.digest}", issued)
        except RankMismatchError as error:
            raise CollectiveMismatchError(str(error)) from error

    def abort(self) -> None:
        """Stops everything under way, here and, within a second or two, on all other ranks. Idempotent, and of no effect once closed."""
        if not self._closed:
            self._watchdog.fail(CommunicationError(f"rank {self.rank} called abort()"))

    def revoke(self) -> None:
        """Stops everything under way, but keeps the communicators, so that `shrink` is quick. Every rank that lives calls it.

        Raises:
            ConfigurationError: this libnccl has no ncclCommRevoke (before 2.29).
        """
        self._check_open("revoke")
        if not self._library.has("ncclCommRevoke"):
            raise ConfigurationError(f"libnccl {dotted(self._library.version)} has no ncclCommRevoke; call abort() instead")
        self._watchdog.raise_if_failed()
        for lane in self._lanes:
            lane.revoke()
        self._watchdog.give_up(CommunicationError(f"rank {self.rank} called revoke(): nothing but shrink() and close() is left"))

    def shrink(self, excluded_ranks: Sequence[int]) -> NcclCommunicator:
        """A new communicator among the other ranks, numbered anew in the same order. Collective over those; also after a failure.

        Close this one then. What was under way on it is stopped. Where libnccl has no ncclCommShrink (before 2.27), or has aborted, or
        nobody is left out, which it refuses, the ranks meet at the store and start from nothing: that takes longer and comes to the same.

        Raises:
            ConfigurationError: no rank is left, this rank is excluded, or a number is none of a rank.
            CollectiveTimeoutError, CommunicationError: as `create`.
        """
        self._check_open("shrink")
        excluded = sorted(set(excluded_ranks))
        if any(not 0 <= rank < self.world_size for rank in excluded) or self.rank in excluded:
            raise ConfigurationError(f"shrink: rank {self.rank} of {self.world_size} can't go on without ranks {excluded}")
        remaining = [rank for rank in range(self.world_size) if rank not in excluded]
        self._shrunk += 1
        rendezvous = self._rendezvous.part(f"shrunk/{self._shrunk}/{'-'.join(map(str, excluded))}", remaining)
        if excluded and self._lanes.usable and self._library.has("ncclCommShrink"):
            abort = not (self._lanes.revoked or self.options.shrink_share)
            handles = [lane.shrink(excluded, self._equipment.config, abort) for lane in self._lanes]
            self._watchdog.give_up(CommunicationError(f"rank {self.rank} called shrink(): use the communicator that it returned"))
        else:
            handles = connect(rendezvous, self._equipment, self._limit)
        return NcclCommunicator(rendezvous, self._equipment, handles, self._limit)

    # ---- its end ----------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """Waits for what is under way, flushes and frees, all within 30 s; what doesn't end by then, or has failed, is aborted."""
        farewell = min(self._limit, _FAREWELL)
        well = self._watchdog.drain(farewell) or self._lanes.revoked
        self._watchdog.stop()
        if well:
            self._memory.close()
            well = self._lanes.close(farewell)
        if not well:
            _log.warning("rank %d closes an NCCL communicator that could not be flushed", self.rank)
            if self._lanes.abort():
                self._memory.close()
            else:
                self._memory.abandon()
        self._lanes.destroy_streams()


@functools.lru_cache(maxsize=64)
def _holds(dtype: torch.dtype, factor: float) -> bool:
    """Whether scaling in a dtype is as good with the factor rounded to it."""
    return dtype in (torch.float32, torch.float64) or torch.tensor(factor, dtype=dtype).item() == factor


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: what only moves data then works for every dtype."""
    return tensor.detach().reshape(-1).view(torch.uint8)
