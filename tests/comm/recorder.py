"""Stands in for CUDA and for libnccl: no data moves, and everything that would have been put on a stream is written down.

Memory that the recorder gives out is never used twice, so that an address says which tensor is meant. The device is as slow as can be: no
event is done until the test says so, which leaves nothing to luck.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import HashStore

from ddpcomm.comm.nccl import NcclCommunicator
from ddpcomm.comm.nccl_library import IN_PROGRESS, SUCCESS
from ddpcomm.comm.nccl_start import connect, equip
from ddpcomm.comm.rendezvous import Rendezvous
from ddpcomm.errors import CommunicationError, DDPCommError, PeerLostError
from tests.comm.hazards import HOST, Entry, Range

NEWEST = (2, 32, 3)
SINCE = {
    "ncclMemAlloc": (2, 19, 0),
    "ncclCommRegister": (2, 19, 0),
    "ncclCommWindowRegister": (2, 27, 0),
    "ncclCommShrink": (2, 27, 0),
    "ncclCommRevoke": (2, 29, 0),
    "ncclCommMemStats": (2, 30, 0),
}


@dataclass(frozen=True)
class RecordedStream:
    name: str
    cuda_stream: int


def range_of(tensor: Tensor) -> Range:
    return Range(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())


class Memory:
    """Bytes of the host's that are never given out twice."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def allocate(self, nbytes: int) -> int:
        raw = (ctypes.c_uint8 * (nbytes + 4096))()
        self._kept.append(raw)
        return -(-ctypes.addressof(raw) // 4096) * 4096


@dataclass
class Recorder:
    """The trace, the memory, and both stand-ins. `memory` outlives all tensors over it as long as the recorder is kept."""

    trace: list[Entry] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self.runtime = RecordingRuntime(self)
        self.library = RecordingLibrary(self)

    def add(self, entry: Entry) -> None:
        with self._lock:
            self.trace.append(entry)

    def lines(self) -> list[str]:
        return [str(entry) for entry in self.trace]

    def kernel(self, label: str, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """Puts a kernel on the current stream."""
        stream = self.runtime.current_stream()
        self.add(Entry("work", stream.name, label, tuple(map(range_of, reads)), tuple(map(range_of, writes))))

    def tensor(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """As torch's caching allocator gives it: when it is freed, the current stream may use the memory for something else at once."""
        nbytes = numel * dtype.itemsize
        pointer = self.memory.allocate(nbytes)
        freed = Entry("work", self.runtime.current_stream().name, "use freed memory", writes=(Range(pointer, pointer + nbytes),))
        return self.runtime.tensor_at(pointer, nbytes, lambda: self.add(freed)).view(dtype)


class RecordingRuntime:
    """A `CudaRuntime`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._current = threading.local()
        self._events = 0
        self._streams = 0
        self.main = RecordedStream("main", 1)
        self.destroyed: list[str] = []
        self.idle = False
        self.capturing = False

    def make_stream(self, name: str) -> RecordedStream:
        """One of the caller's own streams."""
        return RecordedStream(name, 1000 + abs(hash(name)) % 1000000)

    @contextlib.contextmanager
    def on(self, stream: RecordedStream) -> Iterator[None]:
        """Within it, `stream` is the current one of this thread."""
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def create_stream(self) -> RecordedStream:
        self._streams += 1
        return RecordedStream(f"comm{self._streams - 1}", 100 + self._streams)

    def destroy_stream(self, stream: Any) -> None:
        self.destroyed.append(stream.name)

    def current_stream(self) -> RecordedStream:
        return getattr(self._current, "stream", self.main)

    def create_event(self) -> int:
        self._events += 1
        return self._events

    def record(self, event: int, stream: Any) -> None:
        self._recorder.add(Entry("record", stream.name, "record", event=event))

    def wait(self, stream: Any, event: int) -> None:
        recorded = [entry.stream for entry in self._recorder.trace if entry.kind == "record" and entry.event == event]
        self._recorder.add(Entry("wait", stream.name, f"wait for {recorded[-1] if recorded else 'nothing'}", event=event))

    def timestamp(self, stream: Any) -> int:
        event = self.create_event()
        self._recorder.add(Entry("time", stream.name, "time", event=event))
        return event

    def seconds_between(self, first: int, second: int) -> float:
        """Every event comes a microsecond after the one before."""
        return (second - first) * 1e-6

    def is_complete(self, event: int) -> bool:
        if self.idle:
            self._recorder.add(Entry("host_wait", HOST, "see it done", event=event))
        return self.idle

    def synchronize(self) -> None:
        self._recorder.add(Entry("synchronize", HOST, "synchronize"))

    def is_capturing(self) -> bool:
        return self.capturing

    def let_others_capture(self) -> None:
        return None

    def tensor_at(self, pointer: int, nbytes: int, on_release: Callable[[], None]) -> Tensor:
        array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pointer))
        weakref.finalize(array, on_release).atexit = False
        return torch.from_numpy(array)


class RecordingLibrary:
    """An `NcclLibrary`. What goes wrong can be chosen:

    slow: so many times `state` says IN_PROGRESS after each call.
    hangs: the name of a call that stays IN_PROGRESS for ever.
    broken: the error's code that `state` gives from now on.
    refused: names of calls that fail.
    no_handle: registering gives no handle, as on machines where it isn't supported.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.version = NEWEST
        self.calls: list[str] = []
        self.configs: list[dict[str, int | str]] = []
        self.slow = 0
        self.hangs = ""
        self.broken = SUCCESS
        self.refused: set[str] = set()
        self.no_handle = False
        self.allocated: dict[int, int] = {}
        self._pending = 0
        self._handles = 0
        self._hanging = False

    def has(self, function: str) -> bool:
        return self.version >= SINCE[function]

    def unique_id(self) -> bytes:
        return b"\x07" * 128

    def start(self, world_size: int, rank: int, unique_id: bytes, config: Mapping[str, int | str]) -> int:
        assert len(unique_id) == 128
        self.configs.append(dict(config))
        self._call(f"start {rank} of {world_size}")
        return self._handle()

    def state(self, communicator: int) -> int:
        if self.broken != SUCCESS:
            return self.broken
        if self._hanging:
            return IN_PROGRESS
        self._pending -= 1
        return IN_PROGRESS if self._pending >= 0 else SUCCESS

    def error(self, communicator: int, code: int, operation: str) -> CommunicationError:
        return PeerLostError(f"{operation}: remote error") if code == 6 else CommunicationError(f"{operation}: code {code}")

    def all_reduce(self, communicator: int, tensor: Tensor, op: int, stream: Any) -> None:
        self._collective(f"all_reduce {tensor.nbytes} B, op {op}", stream, [tensor], [tensor])

    def broadcast(self, communicator: int, tensor: Tensor, source: int, stream: Any) -> None:
        self._collective(f"broadcast {tensor.nbytes} B", stream, [tensor], [tensor])

    def all_gather(self, communicator: int, out: Tensor, tensor: Tensor, stream: Any) -> None:
        self._collective(f"all_gather {tensor.nbytes} B", stream, [tensor], [out])

    def reduce_scatter(self, communicator: int, out: Tensor, tensor: Tensor, op: int, stream: Any) -> None:
        self._collective(f"reduce_scatter {tensor.nbytes} B, op {op}", stream, [tensor], [out])

    def create_scaled_sum(self, communicator: int, scale: float, dtype: torch.dtype) -> int:
        self._call(f"create_scaled_sum {scale:g} {dtype}")
        self._handles += 1
        return 100 + self._handles

    def destroy_operator(self, communicator: int, op: int) -> None:
        self._call("destroy_operator")

    def allocate(self, nbytes: int) -> int:
        self._call("allocate")
        pointer = self._recorder.memory.allocate(nbytes)
        self.allocated[pointer] = nbytes
        return pointer

    def free(self, pointer: int) -> None:
        self._call("free")
        self._recorder.add(Entry("work", HOST, "free", writes=(Range(pointer, pointer + self.allocated.pop(pointer)),)))

    def register(self, communicator: int, pointer: int, nbytes: int) -> int:
        self._call("register")
        return 0 if self.no_handle else self._handle()

    def deregister(self, communicator: int, registration: int) -> None:
        self._call("deregister")

    def register_window(self, communicator: int, pointer: int, nbytes: int) -> int:
        self._call("register_window")
        return 0 if self.no_handle else self._handle()

    def deregister_window(self, communicator: int, window: int) -> None:
        self._call("deregister_window")

    def shrink(self, communicator: int, excluded: Sequence[int], config: Mapping[str, int | str], abort: bool) -> int:
        self._call(f"shrink without {list(excluded)}{', aborting' if abort else ''}")
        if not excluded:
            raise CommunicationError("invalid argument: nobody is left out")
        return self._handle()

    def revoke(self, communicator: int) -> None:
        self._call("revoke")

    def finalize(self, communicator: int) -> None:
        self._call("finalize")

    def destroy(self, communicator: int) -> None:
        self._call("destroy")

    def abort(self, communicator: int) -> None:
        self.calls.append("abort")
        self._recorder.runtime.idle = True  # its kernels end, though not by having done their work
        self._hanging = False

    def memory_bytes(self, communicator: int) -> int:
        return 5

    def _collective(self, label: str, stream: Any, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        self._call(label)
        self._recorder.add(Entry("work", stream.name, label, tuple(map(range_of, reads)), tuple(map(range_of, writes))))

    def _call(self, name: str) -> None:
        self.calls.append(name)
        word = name.split()[0]
        if word in self.refused:
            raise CommunicationError(f"{word} was refused")
        self._hanging = word == self.hangs
        self._pending = self.slow

    def _handle(self) -> int:
        self._handles += 1
        return self._handles


class AgreeableRendezvous(Rendezvous):
    """One rank of several, whose others are always there and of the same opinion."""

    def __init__(self, world_size: int = 2) -> None:
        super().__init__(HashStore(), 0, world_size, timedelta(seconds=5))
        self.objections: list[str] = []

    def from_first(self, value: str) -> str:
        return value

    def check_equal(self, what: str, value: str, description: str = "") -> None:
        return None

    def minimum(self, value: int, reason: str = "") -> tuple[int, str]:
        return (0, self.objections.pop(0)) if self.objections else (value, reason)


def recorded_communicator(
    recorder: Recorder, rendezvous: Rendezvous | None = None, timeout: timedelta = timedelta(seconds=60), **options: Any
) -> NcclCommunicator:
    """A communicator of the nccl transport over a recorder, on CPU tensors."""
    rendezvous = rendezvous or AgreeableRendezvous()
    equipment = equip(rendezvous, torch.device("cpu"), options, recorder.library, recorder.runtime)
    return NcclCommunicator(rendezvous, equipment, connect(rendezvous, equipment, timeout), timeout)


def caught(communicator: NcclCommunicator, seconds: float = 20.0) -> DDPCommError:
    """The error that the communicator fails with, sooner or later."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            communicator.check()
        except DDPCommError as error:
            return error
        time.sleep(0.01)
    raise AssertionError("the communicator did not fail")


def idle_recorder() -> Recorder:
    """Of a device that has nothing to do."""
    recorder = Recorder()
    recorder.runtime.idle = True
    return recorder
