"""CUDA behind one thin layer: `CudaRuntime` says which calls there are, `TorchCudaRuntime` makes them.

All streams and events of the nccl transport go through it, so that tests put a recorder in its place and check that every access to memory
is ordered after those that it depends on.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from ddpcomm.errors import CommunicationError, ConfigurationError, TransportUnavailableError

Event: TypeAlias = Any
"""A point in a stream: only the runtime looks inside."""


class Stream(Protocol):
    """A CUDA stream, such as torch.cuda.Stream."""

    @property
    def cuda_stream(self) -> int:
        """Its cudaStream_t; two of these with the same number are the same stream."""


class CudaRuntime(Protocol):
    """What this package asks of CUDA, on one device. Nothing but `synchronize` blocks the caller."""

    def on_device(self) -> AbstractContextManager[Any]:
        """Within it, the device is the calling thread's current one."""

    def create_stream(self) -> Stream:
        """A new stream of the highest priority that nobody else uses and that never waits for the legacy default stream."""

    def destroy_stream(self, stream: Stream) -> None:
        """Gives back a stream of `create_stream`; what is on it still runs."""

    def current_stream(self) -> Stream:
        """The calling thread's current stream on the device."""

    def create_event(self) -> Event: ...

    def record(self, event: Event, stream: Stream) -> None:
        """The event now stands for all that is on the stream so far; waits made earlier go on meaning what it stood for before."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What is put on the stream from now on runs after what the event stands for now."""

    def timestamp(self, stream: Stream) -> Event:
        """A new event, recorded on the stream, whose time can be told once it is complete."""

    def seconds_between(self, first: Event, second: Event) -> float:
        """The device's time between two complete timestamps."""

    def is_complete(self, event: Event) -> bool:
        """Whether the device has done all that the event stands for."""

    def synchronize(self) -> None:
        """Blocks the caller until the device has done everything."""

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""

    def let_others_capture(self) -> None:
        """What the calling thread asks of the device shall not disturb CUDA graphs that other threads capture."""

    def tensor_at(self, pointer: int, nbytes: int, on_release: Callable[[], None]) -> Tensor:
        """A tensor of bytes over memory of the device. `on_release` is called, in any thread, when no tensor uses the memory any more."""


def for_device(device: torch.device) -> tuple[torch.device, CudaRuntime]:
    """The device, with its index, and its runtime.

    Raises:
        ConfigurationError: it is no CUDA device.
        TransportUnavailableError: torch sees no GPU, or cuda-bindings is missing.
    """
    if device.type != "cuda":
        raise ConfigurationError(f"transport nccl needs a CUDA device, got {device}")
    if not torch.cuda.is_available():
        raise TransportUnavailableError('transport nccl needs a GPU, and torch sees none; use transport="auto"')
    _cudart()
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device, TorchCudaRuntime(device)


def order_after(runtime: CudaRuntime, stream: Stream, producers: Iterable[Stream], event: Event) -> None:
    """What is put on `stream` from now on runs after what is on `producers` now. One event, recorded again and again, does for all."""
    for producer in {each.cuda_stream: each for each in producers}.values():
        if producer.cuda_stream != stream.cuda_stream:
            runtime.record(event, producer)
            runtime.wait(stream, event)


class TorchCudaRuntime:
    """The `CudaRuntime` of a machine with a GPU, over torch.cuda and, for streams of its own, cuda-bindings.

    torch hands out its 32 streams a priority in turn, so that one of those may be somebody else's too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._device)

    def create_stream(self) -> Stream:
        cudart = _cudart()
        with self.on_device():
            _lowest, highest = _checked(cudart.cudaDeviceGetStreamPriorityRange)
            (stream,) = _checked(cudart.cudaStreamCreateWithPriority, cudart.cudaStreamNonBlocking, highest)
        return torch.cuda.ExternalStream(int(stream), device=self._device)  # type: ignore[no-untyped-call]

    def destroy_stream(self, stream: Stream) -> None:
        _checked(_cudart().cudaStreamDestroy, stream.cuda_stream)

    def current_stream(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def create_event(self) -> Event:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def record(self, event: Event, stream: Stream) -> None:
        event.record(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        event.wait(stream)

    def timestamp(self, stream: Stream) -> Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.record(event, stream)
        return event

    def seconds_between(self, first: Event, second: Event) -> float:
        return float(first.elapsed_time(second)) / 1e3

    def is_complete(self, event: Event) -> bool:
        return bool(event.query())

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def is_capturing(self) -> bool:
        with self.on_device():  # torch asks the current device's stream
            return torch.cuda.is_current_stream_capturing()

    def let_others_capture(self) -> None:
        cudart = _cudart()
        _checked(cudart.cudaThreadExchangeStreamCaptureMode, cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)

    def tensor_at(self, pointer: int, nbytes: int, on_release: Callable[[], None]) -> Tensor:
        memory = _DeviceMemory(pointer, nbytes)
        weakref.finalize(memory, on_release).atexit = False  # the driver may be gone by then, and frees it all anyway
        return torch.as_tensor(memory, device=self._device)


def _cudart() -> Any:
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise TransportUnavailableError(f"transport nccl needs cuda-bindings: pip install 'ddpcomm[cu13]' or [cu12] ({error})") from error


def _checked(function: Callable[..., tuple[Any, ...]], *arguments: Any) -> tuple[Any, ...]:
    error, *results = function(*arguments)
    if int(error) != 0:
        raise CommunicationError(f"{function.__name__} failed: {error!r}")
    return tuple(results)


class _DeviceMemory:
    """What torch makes a tensor of without a copy; the tensor's storage keeps it alive."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "strides": None, "version": 3}
