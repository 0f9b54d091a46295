"""libnccl behind one thin layer: `NcclLibrary` says which calls there are, `Nccl4pyLibrary` makes them through nccl4py (0.6).

No other file knows nccl4py, so that tests put a recorder in its place. The calls go to nccl4py's `nccl.bindings`: its `nccl.core` spends
10 us a collective on working out pointer and dtype of the two buffers (measured, 2.1 GHz Xeon), and starts communicators by a function that
libnccl has only from 2.23 on.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from ddpcomm.comm.cuda_runtime import Stream
from ddpcomm.errors import CollectiveTimeoutError, CommunicationError, ConfigurationTypeError, PeerLostError, TransportUnavailableError

Handle: TypeAlias = Any
"""A communicator, registration or window: only the library looks inside. False where libnccl gave none."""

Version: TypeAlias = tuple[int, int, int]

MINIMUM_VERSION: Version = (2, 21, 0)
SUM, MAXIMUM = 0, 2  # ncclRedOp_t
SUCCESS, REMOTE_ERROR, IN_PROGRESS, TIMED_OUT = 0, 6, 7, 8  # ncclResult_t
_WINDOW_SYMMETRIC = 0x01  # NCCL_WIN_COLL_SYMMETRIC
_SHRINK_DEFAULT, _SHRINK_ABORT = 0, 1
_SCALAR_ON_HOST = 1  # ncclScalarHostImmediate: read before the call returns
_TOTAL_BYTES = 3  # ncclStatGpuMemTotal

DTYPES: Mapping[torch.dtype, int] = {  # ncclDataType_t
    torch.int8: 0,
    torch.uint8: 1,
    torch.bool: 1,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
    torch.float8_e4m3fn: 10,
    torch.float8_e5m2: 11,
}
_DTYPES_SINCE: Mapping[torch.dtype, Version] = {torch.float8_e4m3fn: (2, 24, 0), torch.float8_e5m2: (2, 24, 0)}


class NcclLibrary(Protocol):
    """What this package asks of libnccl. A call on a non-blocking communicator may return before it is done: see `state`.

    Every call may raise a `CommunicationError`. Tensors are contiguous and on the communicator's device.
    """

    version: Version

    def has(self, function: str) -> bool:
        """Whether the loaded library has a function, such as "ncclCommShrink"."""

    def unique_id(self) -> bytes:
        """A new identifier, of 128 bytes, under which ranks find each other."""

    def start(self, world_size: int, rank: int, unique_id: bytes, config: Mapping[str, int | str]) -> Handle:
        """Starts a communicator. Collective. `config` holds fields of ncclConfig_t by nccl4py's names."""

    def state(self, communicator: Handle) -> int:
        """SUCCESS, IN_PROGRESS while the last call is under way, or an error's code."""

    def error(self, communicator: Handle, code: int, operation: str) -> CommunicationError:
        """The typed error for a code that `state` gave."""

    def all_reduce(self, communicator: Handle, tensor: Tensor, op: int, stream: Stream) -> None:
        """In place."""

    def broadcast(self, communicator: Handle, tensor: Tensor, source: int, stream: Stream) -> None:
        """In place."""

    def all_gather(self, communicator: Handle, out: Tensor, tensor: Tensor, stream: Stream) -> None: ...

    def reduce_scatter(self, communicator: Handle, out: Tensor, tensor: Tensor, op: int, stream: Stream) -> None: ...

    def create_scaled_sum(self, communicator: Handle, scale: float, dtype: torch.dtype) -> int:
        """An operator that multiplies every rank's elements by `scale`, then sums."""

    def destroy_operator(self, communicator: Handle, op: int) -> None: ...

    def allocate(self, nbytes: int) -> int:
        """The address of new memory on the current device that libnccl can register."""

    def free(self, pointer: int) -> None:
        """Gives it back. Nothing may use it any more, not even on a stream."""

    def register(self, communicator: Handle, pointer: int, nbytes: int) -> Handle:
        """Registers memory (ncclCommRegister). Local."""

    def deregister(self, communicator: Handle, registration: Handle) -> None: ...

    def register_window(self, communicator: Handle, pointer: int, nbytes: int) -> Handle:
        """Registers memory as a symmetric window. Collective; the handle is true once done, or stays false where not supported."""

    def deregister_window(self, communicator: Handle, window: Handle) -> None: ...

    def shrink(self, communicator: Handle, excluded: Sequence[int], config: Mapping[str, int | str], abort: bool) -> Handle:
        """A new communicator without the excluded ranks. Collective over the others. `abort`: end what is under way first."""

    def revoke(self, communicator: Handle) -> None:
        """Ends what is under way and lets nothing new start."""

    def finalize(self, communicator: Handle) -> None:
        """Flushes. Collective."""

    def destroy(self, communicator: Handle) -> None:
        """Frees a finalized communicator."""

    def abort(self, communicator: Handle) -> None:
        """Ends what is under way and frees the communicator."""

    def memory_bytes(self, communicator: Handle) -> int:
        """The device memory that the communicator itself holds."""


class _Started:
    """nccl4py's communicator, beside its configuration, whose strings libnccl may go on reading."""

    def __init__(self, raw: Any, config: Any) -> None:
        self.raw = raw
        self.config = config


class Nccl4pyLibrary:
    """The `NcclLibrary` of a machine with nccl4py and a libnccl. The library is loaded here; no driver is needed for that.

    Raises:
        TransportUnavailableError: nccl4py or libnccl is missing, or libnccl is too old.
    """

    def __init__(self) -> None:
        try:
            self._nccl = importlib.import_module("nccl.bindings.nccl")
        except ImportError as error:
            raise TransportUnavailableError(
                f"transport nccl needs nccl4py; pip install 'ddpcomm[cu13]' or 'ddpcomm[cu12]' ({error})"
            ) from error
        try:
            code = int(self._nccl.get_version())
            self.path = str(self._nccl.get_library_path())
            self._symbols = ctypes.CDLL(self.path)
        except Exception as error:  # nccl4py has a type of its own for each reason
            raise TransportUnavailableError(
                f"libnccl can't be loaded; pip install nvidia-nccl-cu13 or nvidia-nccl-cu12 ({error})"
            ) from error
        self.version = (code // 10000, code // 100 % 100, code % 100) if code >= 10000 else (code // 1000, code // 100 % 10, code % 100)
        if self.version < MINIMUM_VERSION:
            raise TransportUnavailableError(
                f"libnccl {dotted(self.version)} ({self.path}) is too old; ddpcomm needs {dotted(MINIMUM_VERSION)} or newer"
            )

    def has(self, function: str) -> bool:
        return hasattr(self._symbols, function)

    def unique_id(self) -> bytes:
        return bytes(self._call(None, self._nccl.get_unique_id))

    def start(self, world_size: int, rank: int, unique_id: bytes, config: Mapping[str, int | str]) -> Handle:
        filled = self._config(config)
        identifier = self._nccl.UniqueId.from_buffer(bytearray(unique_id))
        return _Started(self._call(None, self._nccl.comm_init_rank_config, world_size, identifier, rank, filled.ptr), filled)

    def state(self, communicator: Handle) -> int:
        return int(self._call(communicator, self._nccl.comm_get_async_error, communicator.raw))

    def error(self, communicator: Handle, code: int, operation: str) -> CommunicationError:
        detail = self._nccl.get_last_error(communicator.raw if communicator is not None else self._nccl.Comm())
        message = f"{operation}: libnccl {dotted(self.version)}: {self._nccl.get_error_string(code)}" + (f" ({detail})" if detail else "")
        if code == REMOTE_ERROR:
            return PeerLostError(message)
        return CollectiveTimeoutError(message) if code == TIMED_OUT else CommunicationError(message)

    def all_reduce(self, communicator: Handle, tensor: Tensor, op: int, stream: Stream) -> None:
        pointer = tensor.data_ptr()
        dtype = DTYPES[tensor.dtype]
        self._call(communicator, self._nccl.all_reduce, pointer, pointer, tensor.numel(), dtype, op, communicator.raw, stream.cuda_stream)

    def broadcast(self, communicator: Handle, tensor: Tensor, source: int, stream: Stream) -> None:
        pointer = tensor.data_ptr()
        dtype = DTYPES[tensor.dtype]
        self._call(
            communicator, self._nccl.broadcast, pointer, pointer, tensor.numel(), dtype, source, communicator.raw, stream.cuda_stream
        )

    def all_gather(self, communicator: Handle, out: Tensor, tensor: Tensor, stream: Stream) -> None:
        pointers = tensor.data_ptr(), out.data_ptr()
        self._call(
            communicator, self._nccl.all_gather, *pointers, tensor.numel(), DTYPES[tensor.dtype], communicator.raw, stream.cuda_stream
        )

    def reduce_scatter(self, communicator: Handle, out: Tensor, tensor: Tensor, op: int, stream: Stream) -> None:
        pointers = tensor.data_ptr(), out.data_ptr()
        dtype = DTYPES[tensor.dtype]
        self._call(communicator, self._nccl.reduce_scatter, *pointers, out.numel(), dtype, op, communicator.raw, stream.cuda_stream)

    def create_scaled_sum(self, communicator: Handle, scale: float, dtype: torch.dtype) -> int:
        scalar = torch.tensor([scale], dtype=dtype)
        arguments = scalar.data_ptr(), DTYPES[dtype], _SCALAR_ON_HOST, communicator.raw
        return int(self._call(communicator, self._nccl.red_op_create_pre_mul_sum, *arguments))

    def destroy_operator(self, communicator: Handle, op: int) -> None:
        self._call(communicator, self._nccl.red_op_destroy, op, communicator.raw)

    def allocate(self, nbytes: int) -> int:
        return int(self._call(None, self._nccl.mem_alloc, nbytes))

    def free(self, pointer: int) -> None:
        self._call(None, self._nccl.mem_free, pointer)

    def register(self, communicator: Handle, pointer: int, nbytes: int) -> Handle:
        return self._call(communicator, self._nccl.comm_register, communicator.raw, pointer, nbytes)

    def deregister(self, communicator: Handle, registration: Handle) -> None:
        self._call(communicator, self._nccl.comm_deregister, communicator.raw, registration)

    def register_window(self, communicator: Handle, pointer: int, nbytes: int) -> Handle:
        return self._call(communicator, self._nccl.comm_window_register, communicator.raw, pointer, nbytes, _WINDOW_SYMMETRIC)

    def deregister_window(self, communicator: Handle, window: Handle) -> None:
        self._call(communicator, self._nccl.comm_window_deregister, communicator.raw, window)

    def shrink(self, communicator: Handle, excluded: Sequence[int], config: Mapping[str, int | str], abort: bool) -> Handle:
        filled = self._config(config)
        arguments = communicator.raw, list(excluded), len(excluded), filled.ptr, _SHRINK_ABORT if abort else _SHRINK_DEFAULT
        return _Started(self._call(communicator, self._nccl.comm_shrink, *arguments), filled)

    def revoke(self, communicator: Handle) -> None:
        self._call(communicator, self._nccl.comm_revoke, communicator.raw, 0)

    def finalize(self, communicator: Handle) -> None:
        self._call(communicator, self._nccl.comm_finalize, communicator.raw)

    def destroy(self, communicator: Handle) -> None:
        self._call(None, self._nccl.comm_destroy, communicator.raw)

    def abort(self, communicator: Handle) -> None:
        self._call(None, self._nccl.comm_abort, communicator.raw)

    def memory_bytes(self, communicator: Handle) -> int:
        return int(self._call(communicator, self._nccl.comm_mem_stats, communicator.raw, _TOTAL_BYTES))

    def _config(self, fields: Mapping[str, int | str]) -> Any:
        config = self._nccl.Config()
        for name, value in fields.items():
            setattr(config, name, value)
        return config

    def _call(self, communicator: Handle, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls it; IN_PROGRESS counts as success. `communicator` is asked for details of an error; None where there is none."""
        try:
            return function(*arguments)
        except self._nccl.NCCLError as error:
            raise self.error(communicator, int(error.status), function.__name__) from error


def check_reducible(dtype: torch.dtype, version: Version) -> None:
    """Whether libnccl can reduce elements of a type.

    Raises:
        ConfigurationTypeError: it can't.
    """
    if dtype not in DTYPES:
        names = ", ".join(sorted(str(known).removeprefix("torch.") for known in DTYPES))
        raise ConfigurationTypeError(f"libnccl can't reduce {dtype}; it can {names}, and complex types as pairs of those")
    since = _DTYPES_SINCE.get(dtype, MINIMUM_VERSION)
    if version < since:
        raise ConfigurationTypeError(f"libnccl {dotted(version)} can't reduce {dtype}; from {dotted(since)} on it can")


def dotted(version: Version) -> str:
    return ".".join(map(str, version))
