"""Bucket memory that libnccl reduces without copying it into buffers of its own."""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ddpcomm.comm.cuda_runtime import CudaRuntime
from ddpcomm.comm.nccl_lane import Lane
from ddpcomm.comm.nccl_lanes import Lanes
from ddpcomm.comm.nccl_library import Handle, NcclLibrary, dotted
from ddpcomm.comm.nccl_options import MemoryChoice
from ddpcomm.comm.rendezvous import Rendezvous
from ddpcomm.errors import ClosedError, CommunicationError, ConfigurationError

_log = logging.getLogger(__name__)


class MemoryMode(enum.IntEnum):
    """How memory is made known to libnccl, the best last."""

    PLAIN = 0
    REGISTERED = 1
    WINDOW = 2


_PAGE_BYTES = 4096
_FUNCTIONS = {
    MemoryMode.REGISTERED: ("ncclMemAlloc", "ncclCommRegister"),
    MemoryMode.WINDOW: ("ncclMemAlloc", "ncclCommWindowRegister"),
}


@dataclass(frozen=True)
class MemoryReport:
    """What a communicator's memory is and how much there is of it.

    `reason` says why it is not of a better mode, or is empty. `bucket_bytes` are those of live `empty` tensors outside torch's allocator,
    as asked for (libnccl rounds each up to the driver's granularity, usually 2 MiB). `communicator_bytes` are libnccl's own, None where
    the library can't tell (before 2.30).
    """

    mode: str
    reason: str
    bucket_bytes: int
    communicator_bytes: int | None


@dataclass(eq=False)
class _Block:
    pointer: int
    nbytes: int
    mode: MemoryMode
    registrations: list[tuple[Lane, Handle]] = field(default_factory=list)


class BucketMemory:
    """Allocates and registers. What works is found by trying, and every rank does what works on all of them.

    A block is given back when no tensor uses it any more: not at once, because that may be noticed in any thread and within any call, but
    at the next `empty` or at `close`, after the device has come to rest.

    Args:
        lanes: every block is registered with each of their communicators.
        rendezvous: where the ranks agree.
        choice: see `NcclOptions.memory`.
    """

    def __init__(
        self,
        library: NcclLibrary,
        runtime: CudaRuntime,
        lanes: Lanes,
        rendezvous: Rendezvous,
        device: torch.device,
        choice: MemoryChoice,
    ) -> None:
        self._library = library
        self._runtime = runtime
        self._lanes = lanes
        self._rendezvous = rendezvous
        self._device = device
        self._choice = choice
        self._live: set[_Block] = set()
        self._windows: set[int] = set()
        self._retired: deque[_Block] = deque()
        self._closed = False
        self._abandoned = False
        self.reason = "" if choice == "auto" else "chosen by option"
        self.mode = MemoryMode.WINDOW if choice == "auto" else MemoryMode[choice.upper()]
        self._skip_what_is_missing()

    @property
    def bucket_bytes(self) -> int:
        return sum(block.nbytes for block in tuple(self._live))

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A one-dimensional, uninitialised tensor. Collective, unless the mode is PLAIN.

        Raises:
            ConfigurationError: the mode that was asked for doesn't work on some rank.
            CommunicationError: another rank didn't come, or the attempt has broken a communicator.
        """
        self._reclaim()
        nbytes = numel * dtype.itemsize
        while nbytes and self.mode is not MemoryMode.PLAIN:
            block, reason = self._make(nbytes)
            if block is not None:
                self._live.add(block)
                if block.mode is MemoryMode.WINDOW:
                    self._windows.add(block.pointer)
                return self._runtime.tensor_at(block.pointer, nbytes, partial(self._retire, block)).view(dtype)
            self._fall_back(reason)
        return torch.empty(numel, dtype=dtype, device=self._device)

    def place(self, tensor: Tensor) -> str:
        """Where a tensor lies, as far as all ranks must agree: libnccl reduces a window only against the same place of all others."""
        if self.mode is not MemoryMode.WINDOW:
            return ""
        start = tensor.untyped_storage().data_ptr()
        return f" at {tensor.data_ptr() - start} of a window" if start in self._windows else " outside windows"

    def close(self) -> None:
        """Takes all registrations back. Tensors stay valid; their memory is freed with the last of them. The communicators live still."""
        self._closed = True
        if self._live:
            self._runtime.synchronize()
        for block in tuple(self._live):
            self._deregister(block)
        self._reclaim()

    def abandon(self) -> None:
        """Never gives anything back: a kernel that nobody can stop may still use it."""
        self._abandoned = True

    # ---- making -----------------------------------------------------------------------------------------------------

    def _make(self, nbytes: int) -> tuple[_Block | None, str]:
        """A block, or None and the reason; the same on all ranks. Registering windows is collective, so nobody may be missing there."""
        block, reason = self._allocate(nbytes)
        everywhere = False
        try:
            everywhere, reason = self._agree(block is not None, reason)
            if everywhere and block is not None:
                reason = self._register(block)
                everywhere, reason = self._agree(not reason, reason)
                if not everywhere:
                    self._require_working(reason)
        finally:
            if block is not None and not everywhere:
                self._deregister(block)
                self._library.free(block.pointer)
        return block if everywhere else None, reason

    def _require_working(self, reason: str) -> None:
        """A call that failed can leave a non-blocking communicator in its error for ever (NVIDIA/nccl#2331): there is no falling back then.

        Raises:
            CommunicationError: so it is on some rank; on all ranks.
        """
        broken = next((error for lane in self._lanes if (error := lane.error()) is not None), None)
        works, why = self._agree(broken is None, str(broken or ""))
        if not works:
            other = "registered" if self.mode is MemoryMode.WINDOW else "plain"
            raise CommunicationError(
                f"bucket memory could not be registered ({reason}), and libnccl does nothing more after that ({why}). "
                f'Choose other memory: memory="{other}"'
            )

    def _agree(self, worked: bool, reason: str) -> tuple[bool, str]:
        """Whether it worked on all ranks, and why not."""
        least, reason = self._rendezvous.minimum(int(worked), reason)
        return least == 1, reason

    def _allocate(self, nbytes: int) -> tuple[_Block | None, str]:
        try:
            with self._runtime.on_device():
                return _Block(self._library.allocate(_whole_pages(nbytes)), nbytes, self.mode), ""
        except CommunicationError as error:
            return None, str(error)

    def _register(self, block: _Block) -> str:
        """Registers with every communicator. Returns why not, or nothing."""
        window = block.mode is MemoryMode.WINDOW
        name = "ncclCommWindowRegister" if window else "ncclCommRegister"
        register = self._library.register_window if window else self._library.register
        try:
            for lane in self._lanes:
                handle = lane.call(name, lambda communicator: register(communicator, block.pointer, _whole_pages(block.nbytes)))
                if not handle:
                    return f"{name} does not register memory here"
                block.registrations.append((lane, handle))
        except CommunicationError as error:
            return str(error)
        return ""

    def _fall_back(self, reason: str) -> None:
        if self._choice != "auto":
            raise ConfigurationError(f'memory="{self._choice}" does not work here: {reason}. Use memory="auto".')
        self.mode = MemoryMode(self.mode - 1)
        self.reason = reason
        _log.log(
            logging.WARNING if self._rendezvous.rank == 0 else logging.INFO,
            "bucket memory falls back to %s: %s",
            self.mode.name.lower(),
            reason,
        )
        self._skip_what_is_missing()

    def _skip_what_is_missing(self) -> None:
        missing = [name for name in _FUNCTIONS.get(self.mode, ()) if not self._library.has(name)]
        if missing:
            self._fall_back(f"libnccl {dotted(self._library.version)} has no {missing[0]}")

    # ---- giving back ------------------------------------------------------------------------------------------------

    def _retire(self, block: _Block) -> None:
        """Called when no tensor uses the block any more: in any thread, perhaps within another call of this object."""
        self._retired.append(block)
        if self._closed and not self._abandoned:
            self._reclaim()

    def _reclaim(self) -> None:
        blocks = [self._retired.popleft() for _ in range(len(self._retired))]
        if blocks:
            self._runtime.synchronize()  # unmapping memory doesn't wait for kernels that use it, as cudaFree would
        for block in blocks:
            self._live.discard(block)
            self._windows.discard(block.pointer)
            self._deregister(block)
            self._library.free(block.pointer)

    def _deregister(self, block: _Block) -> None:
        window = block.mode is MemoryMode.WINDOW
        name = "ncclCommWindowDeregister" if window else "ncclCommDeregister"
        deregister = self._library.deregister_window if window else self._library.deregister
        while block.registrations:
            lane, handle = block.registrations.pop()
            try:
                lane.call(name, partial(_second_first, deregister, handle))
            except ClosedError:
                continue  # aborted, and the registration with it
            except CommunicationError as error:
                _log.warning("memory could not be deregistered: %s", error)


def _whole_pages(nbytes: int) -> int:
    """Windows consist of pages (NCCL_WIN_REQUIRED_ALIGNMENT)."""
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES


def _second_first(function: Callable[[Handle, Handle], None], handle: Handle, communicator: Handle) -> None:
    function(communicator, handle)
