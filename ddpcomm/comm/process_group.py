"""A communicator over any torch.distributed process group: Gloo, MPI, NCCL, UCC, XCCL.

Each collective is the backend's own. With Gloo an all-reduce of S bytes on n ranks takes 2(n - 1) steps and sends about 2 S (n - 1) / n
bytes from every rank (its ring); an all-gather or a broadcast sends at most S bytes from a rank and step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ddpcomm.argument_checks import check_timeout
from ddpcomm.comm.base import Communicator, CompletedWork, ReduceOp, Work
from ddpcomm.errors import CollectiveTimeoutError, CommunicationError, ConfigurationError, PeerLostError

_REDUCE_OPS: dict[ReduceOp, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_TIMED_OUT = ("timed out", "timeout")
_Options = TypeVar("_Options")
_LOST = ("connection closed", "connection reset", "connection refused", "broken pipe", "read error", "write error", "pair closure")


class ProcessGroupWork:
    """A collective of torch's, with this package's errors."""

    def __init__(self, work: dist.Work, tensors: tuple[Tensor, ...], describe: Callable[[], str]) -> None:
        self._work = work
        self._tensors = tensors
        self._describe = describe
        self._done = False

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is not None:
            timeout = check_timeout("wait: timeout", timeout)
        if self._done:
            return
        try:
            if timeout is None:
                self._work.wait()
            else:
                self._work.wait(timeout)
        except RuntimeError as error:
            raise translate(error, self._describe()) from error
        self._done = True
        self._tensors, self._describe = (), str  # what it takes to describe a failure holds the tensors, too

    def is_completed(self) -> bool:
        return self._done or self._work.is_completed()

    def when_done(self, call: Callable[[], None]) -> None:
        """Calls it, in a thread of torch's, as soon as the collective has ended, well or not. Some backends never tell."""
        with contextlib.suppress(RuntimeError):  # the backend has no futures
            self._work.get_future().add_done_callback(lambda _: call())


class ProcessGroupCommunicator(Communicator):
    """Collectives of `process_group`, which the caller goes on owning. Not collective to make.

    Args:
        process_group: the ranks; this process must be one of them. None means the default group.
        device: where the tensors live; the group must have a backend for it.
        timeout: time limit of every collective; None means the group's own.

    Raises:
        ConfigurationError: this process isn't in the group, or torch.distributed isn't initialised.
    """

    transport = "process_group"

    def __init__(self, process_group: dist.ProcessGroup | None, device: torch.device, timeout: timedelta | None = None) -> None:
        process_group = resolve(process_group)
        super().__init__(process_group.rank(), process_group.size(), device, timeout)
        self.process_group = process_group
        self.shares_order_with = id(process_group)  # which lives as long as this
        self._all_reduce_options: dict[ReduceOp, dist.AllreduceOptions] = {}

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Work:
        if op == "avg":
            # Scaled before the sum, as torch's DDP does, so that 16-bit sums can't overflow. Gloo's own average divides after it.
            tensor.mul_(1.0 / self.world_size)
            op = "sum"
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        options = self._all_reduce_options.get(op)
        if options is None:
            options = self._all_reduce_options[op] = self._limited(dist.AllreduceOptions())
            options.reduceOp = _REDUCE_OPS[op]
        return self._start("all_reduce", lambda: self.process_group.allreduce([real], options), tensor)

    def _broadcast(self, tensor: Tensor, source: int) -> Work:
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        return self._start("broadcast", lambda: self.process_group.broadcast([_bytes(tensor)], self._limited(options)), tensor)

    def _all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        options = dist.distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
        return self._start(
            "all_gather", lambda: self.process_group._allgather_base(_bytes(out), _bytes(tensor), self._limited(options)), tensor, out
        )

    def _reduce_scatter(self, out: Tensor, tensor: Tensor, op: ReduceOp) -> Work:
        if op == "avg":
            tensor.mul_(1.0 / self.world_size)
            op = "sum"
        options = dist.ReduceScatterOptions()
        options.reduceOp = _REDUCE_OPS[op]
        real_out, real = (torch.view_as_real(out), torch.view_as_real(tensor)) if tensor.is_complex() else (out, tensor)
        return self._start(
            "reduce_scatter", lambda: self.process_group._reduce_scatter_base(real_out, real, self._limited(options)), tensor, out
        )

    def _barrier(self) -> Work:
        return self._start("barrier", lambda: self.process_group.barrier(self._limited(dist.BarrierOptions())))

    def _limited(self, options: _Options) -> _Options:
        if self.timeout is not None:
            options.timeout = self.timeout  # type: ignore[attr-defined]  # every option class of torch's has it
        return options

    def _start(self, operation: str, begin: Callable[[], dist.Work], *tensors: Tensor) -> Work:
        if tensors and tensors[-1].numel() == 0:
            return CompletedWork()

        def describe() -> str:
            sizes = ", ".join(f"{tensor.numel()} x {tensor.dtype}" for tensor in tensors)
            return f"{operation}({sizes}) on rank {self.rank} of {self.world_size} over {self.process_group.name()}"

        try:
            return ProcessGroupWork(begin(), tensors, describe)
        except RuntimeError as error:
            raise translate(error, describe()) from error


def resolve(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group itself, or the default one for None.

    Raises:
        ConfigurationError: there is no default group yet, or this process isn't in the group.
    """
    if process_group is None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigurationError("Default process group has not been initialized, please call torch.distributed.init_process_group.")
        process_group = dist.group.WORLD
    if process_group is None or not is_member(process_group):
        raise ConfigurationError("this process is not a rank of the process group that was given")
    return process_group


def is_member(process_group: object) -> bool:
    """Whether this is a group that this process is a rank of."""
    return isinstance(process_group, dist.ProcessGroup)


def translate(error: RuntimeError, describe: str) -> CommunicationError:
    """torch's error for a failed collective as one of ours, told apart by its text: torch has no types for them."""
    text = str(error).lower()
    advice = "The process group can't be used any further: end the job on all ranks and start again from a checkpoint."
    if any(sign in text for sign in _TIMED_OUT):
        return CollectiveTimeoutError(f"{describe} did not end in time: some rank never called it, or hangs. {advice} ({error})")
    if any(sign in text for sign in _LOST):
        return PeerLostError(f"{describe} lost the connection to another rank, which has probably died. {advice} ({error})")
    return CommunicationError(f"{describe} failed. {advice} ({error})")


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: what only moves data then works for every dtype."""
    return tensor.reshape(-1).view(torch.uint8)
