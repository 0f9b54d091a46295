"""Plans: an operation between one flat buffer and tensors of the same sizes at the same places, many times over.

What can be checked and computed beforehand is, so that a call costs little besides the copy. Here also is what an implementation has to
offer, and how one is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from ddpcomm import env, native
from ddpcomm.errors import ConfigurationError, ConfigurationTypeError
from ddpcomm.kernels import plain, reference

OPERATIONS = ("flatten", "unflatten", "norm", "quantise", "dequantise")

_WIDE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_FLOATS = (*_WIDE, torch.float8_e4m3fn, torch.float8_e5m2)
_COMPLEX = (torch.complex64, torch.complex128)


class FlattenImplementation(Protocol):
    """`statistics` is two float64 on the plan's device that are overwritten: sum of squares, and number of values that are not finite."""

    def flatten(self, tensors: Sequence[Tensor | None], out: Tensor, scale: float, accumulate: bool) -> None: ...
    def unflatten(self, flat: Tensor, tensors: Sequence[Tensor | None], scale: float, statistics: Tensor | None) -> None: ...
    def norm(self, flat: Tensor, statistics: Tensor) -> None: ...


class QuantiseImplementation(Protocol):
    def quantise(self, tensors: Sequence[Tensor | None], codes: Tensor, scales: Tensor, scale: float, residual: Tensor | None) -> None: ...
    def dequantise(self, codes: Tensor, scales: Tensor, tensors: Sequence[Tensor | None], scale: float, accumulate: bool) -> None: ...


def implementations(op: str, device: torch.device | str) -> tuple[str, ...]:
    """Names of the implementations of `op` that can run on `device`, best first.

    Args:
        op: "flatten", "unflatten", "norm", "quantise" or "dequantise".
    """
    if op not in OPERATIONS:
        raise ConfigurationError(f"implementations: op must be one of {', '.join(OPERATIONS)}, got {op!r}")
    return ("native", "torch") if torch.device(device).type == "cpu" else ("torch",)


def choose(op: str, device: torch.device, implementation: str | None) -> str:
    """The implementation asked for by argument, else by environment, else the best."""
    available = implementations(op, device)
    wanted = implementation or env.read().implementation
    if wanted is None:
        return available[0]
    if wanted not in available:
        source = "implementation" if implementation else "DDPCOMM_IMPLEMENTATION"
        raise ConfigurationError(f"{op}: {source} is {wanted!r}; on {device} there are {', '.join(available)}")
    return wanted


class FlattenPlan:
    """`flatten` and `unflatten` for a fixed layout.

    With implementation "native" a call takes about 1 us and 0.1 us a tensor besides the copy: 400 tensors of 256 floats took 44 us, and
    1,700 us by `torch.mul(tensor, scale, out=place)`, on one core of a 2.8 GHz Xeon. Each tensor's address, type, size and strides are
    read in C++, through DLPack's C interface.

    The tensors of a call are detached and dense in memory, without conj or neg bit; their dtypes may differ from the buffer's and from
    call to call.

    Args:
        numels: elements of each tensor.
        offsets: each tensor's first element in the buffer; ascending, ranges do not overlap.
        total_numel: elements of the buffer.
        dtype: of the buffer.
        device: of the buffer and all tensors.
        implementation: one of `implementations("flatten", device)`; None means DDPCOMM_IMPLEMENTATION, else the best.

    Raises:
        ConfigurationError, ConfigurationTypeError: the arguments can't be served. The methods raise the same, before anything is written.
    """

    def __init__(
        self,
        numels: Sequence[int],
        offsets: Sequence[int],
        total_numel: int,
        dtype: torch.dtype,
        device: torch.device | str,
        implementation: str | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.implementation = choose("flatten", self.device, implementation)
        if dtype not in native.DTYPES:
            raise ConfigurationTypeError(f"FlattenPlan: a buffer can't have dtype {dtype}")
        with _typed_errors("FlattenPlan"):
            native_plan = native.FlattenPlan(numels, offsets, total_numel, dtype)  # checks the layout
        self._check: Callable[..., None] | None = None
        self._plan: FlattenImplementation = native_plan
        if self.implementation != "native":
            self._check = _CallCheck(numels, offsets, total_numel, dtype)
            self._plan = plain.FlattenPlan(numels, offsets, total_numel, dtype)

    def flatten(self, tensors: Sequence[Tensor | None], out: Tensor, scale: float = 1.0, accumulate: bool = False) -> None:
        """Copies `tensors` to their places in `out`, as `ops.flatten` does. None entries cover nothing."""
        try:
            if self._check is not None:
                self._check(tensors, out, scale, accumulate, into_buffer=True)
            self._plan.flatten(tensors, out, scale, accumulate)
        except (ValueError, TypeError) as error:
            raise _typed("flatten", error) from None

    def unflatten(self, flat: Tensor, tensors: Sequence[Tensor | None], scale: float = 1.0, statistics: Tensor | None = None) -> None:
        """Fills `tensors` from their places in `flat`, as `ops.unflatten` does. None entries are skipped."""
        try:
            if self._check is not None:
                self._check(tensors, flat, scale, False, into_buffer=False)
            if statistics is not None:
                _check_statistics(statistics, self.device)
            self._plan.unflatten(flat, tensors, scale, statistics)
        except (ValueError, TypeError) as error:
            raise _typed("unflatten", error) from None

    def norm(self, flat: Tensor, statistics: Tensor) -> None:
        """What `unflatten` into tensors of `flat`'s own dtype, with scale 1, would put into `statistics`; nothing is copied."""
        with _typed_errors("norm"):
            if self._check is not None:
                self._check([None] * len(self._check.numels), flat, 1.0, False, into_buffer=False)  # type: ignore[attr-defined]
            _check_statistics(statistics, self.device)
            self._plan.norm(flat, statistics)


class QuantisePlan:
    """`quantise` and `dequantise` for a fixed layout.

    Args:
        numels, offsets, total_numel, device, implementation: as for `FlattenPlan`; offsets and total_numel are multiples of 256.
        code: "int8", "float8_e4m3" or "float8_e5m2".
    """

    def __init__(
        self,
        numels: Sequence[int],
        offsets: Sequence[int],
        total_numel: int,
        device: torch.device | str,
        code: str = "int8",
        implementation: str | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.implementation = choose("quantise", self.device, implementation)
        self._blocks = total_numel // reference.QUANTISED_BLOCK
        self._total_numel = total_numel
        with _typed_errors("QuantisePlan"):
            native_plan = native.QuantisePlan(numels, offsets, total_numel, code)  # checks the layout
        self._check = _CallCheck(numels, offsets, total_numel, torch.float32)
        self._plan: QuantiseImplementation = native_plan
        if self.implementation != "native":
            self._plan = plain.QuantisePlan(numels, offsets, total_numel, code)

    def quantise(
        self, tensors: Sequence[Tensor | None], codes: Tensor, scales: Tensor, scale: float = 1.0, residual: Tensor | None = None
    ) -> None:
        """Writes codes and scales of `tensors` times `scale`, plus `residual`, which becomes what was lost. See `ops.quantise`."""
        with _typed_errors("quantise"):
            self._check_buffers(codes, scales)
            if residual is not None:
                _check_flat("residual", residual, torch.float32, self._total_numel, self.device)
            self._check.tensors(tensors, codes.device, torch.float32, scale, False, into_buffer=True)
            self._plan.quantise(tensors, codes, scales, scale, residual)

    def dequantise(
        self, codes: Tensor, scales: Tensor, tensors: Sequence[Tensor | None], scale: float = 1.0, accumulate: bool = False
    ) -> None:
        """Fills `tensors` with what codes and scales stand for, times `scale`, or adds it. See `ops.dequantise`."""
        with _typed_errors("dequantise"):
            self._check_buffers(codes, scales)
            self._check.tensors(tensors, codes.device, torch.float32, scale, accumulate, into_buffer=False)
            self._plan.dequantise(codes, scales, tensors, scale, accumulate)

    def _check_buffers(self, codes: Tensor, scales: Tensor) -> None:
        _check_flat("codes", codes, torch.uint8, self._total_numel, self.device)
        _check_flat("scales", scales, torch.float32, self._blocks, self.device)


# ---- checks ---------------------------------------------------------------------------------------------------------


class _CallCheck:
    """What the native plans check in C++, for the others. Raises ValueError and TypeError."""

    def __init__(self, numels: Sequence[int], offsets: Sequence[int], total_numel: int, dtype: torch.dtype) -> None:
        self.numels = tuple(numels)
        self._offsets = tuple(offsets)
        self._total_numel = total_numel
        self._dtype = dtype

    def __call__(self, tensors: Sequence[Tensor | None], buffer: Tensor, scale: float, accumulate: bool, *, into_buffer: bool) -> None:
        _check_flat("buffer", buffer, self._dtype, self._total_numel, buffer.device)
        self.tensors(tensors, buffer.device, self._dtype, scale, accumulate, into_buffer=into_buffer)
        start = buffer.data_ptr()
        end = start + buffer.numel() * buffer.element_size()
        for i, (tensor, offset) in enumerate(zip(tensors, self._offsets, strict=True)):
            if tensor is None or tensor.numel() == 0:
                continue
            begin = tensor.data_ptr()
            overlaps = begin < end and start < begin + tensor.numel() * tensor.element_size()
            if overlaps and not (tensor.dtype == self._dtype and begin == start + offset * tensor.element_size()):
                raise ValueError(f"tensor {i} overlaps the buffer, but not at its own place in it")

    def tensors(
        self,
        tensors: Sequence[Tensor | None],
        device: torch.device,
        dtype: torch.dtype,
        scale: float,
        accumulate: bool,
        *,
        into_buffer: bool,
    ) -> None:
        if len(tensors) != len(self.numels):
            raise ValueError(f"there are {len(tensors)} tensors, the layout has {len(self.numels)}")
        for i, (tensor, numel) in enumerate(zip(tensors, self.numels, strict=True)):
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor):
                raise TypeError(f"expected a tensor at {i}, got {type(tensor).__name__}")
            if tensor.device != device:
                raise ValueError(f"tensor {i} is on {tensor.device}, the buffer on {device}")
            if tensor.numel() != numel:
                raise ValueError(f"tensor {i} has {tensor.numel()} elements, the layout {numel}")
            if not _supported(tensor.dtype, dtype, scale, accumulate):
                raise TypeError(f"tensor {i} has dtype {tensor.dtype}, which can't be scaled, added or cast to or from {dtype}")


def _supported(one: torch.dtype, other: torch.dtype, scale: float, accumulate: bool) -> bool:
    """As `Copier::supports` in csrc/include/ddpcomm/copy.h."""
    if one == other and (one in _COMPLEX or (scale == 1 and not accumulate)):
        return True
    kinds = _WIDE if accumulate else _FLOATS
    return one in kinds and other in kinds


def _check_flat(name: str, tensor: Tensor, dtype: torch.dtype, numel: int, device: torch.device) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}, it must be {dtype}")
    if tensor.device.type != device.type:
        raise ValueError(f"{name} is on {tensor.device}, it must be on {device}")
    if tensor.numel() != numel or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous and have {numel} elements, got shape {tuple(tensor.shape)}")


def _check_statistics(statistics: Tensor, device: torch.device) -> None:
    _check_flat("statistics", statistics, torch.float64, 2, device)


def _typed(operation: str, error: Exception) -> Exception:
    if isinstance(error, TypeError):
        return ConfigurationTypeError(f"{operation}: {error}")
    return ConfigurationError(f"{operation}: {error}")


@contextmanager
def _typed_errors(operation: str) -> Iterator[None]:
    try:
        yield
    except (ConfigurationError, ConfigurationTypeError):
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise _typed(operation, error) from None
