"""flatten and unflatten: many tensors to one buffer and back, with scale and cast, in one pass over the bytes.

Arithmetic, the same bits in every implementation: a value is taken to the compute type (float64 if either side is float64, else float32),
multiplied by the scale in that type, and rounded to the result's type, ties to even. Where both sides have one dtype and the scale is 1,
bits are copied. See kernels/reference.py.

**Order of elements.** A tensor whose elements fill a stretch of memory without gap or overlap (contiguous, channels_last, transposed: any
dense strides) is taken in the order of its memory, not of its indices. So flatten followed by unflatten restores tensors exactly if they
have the same strides. Any other tensor is taken in the order of its indices, by way of a contiguous copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddpcomm import _native, env
from ddpcomm.errors import ConfigurationError, ConfigurationTypeError
from ddpcomm.kernels import reference

_OPERATIONS = ("flatten", "unflatten")

# DLPack's (code, bits) of each dtype.
_DTYPES: dict[torch.dtype, tuple[int, int]] = {
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.uint16: (1, 16),
    torch.uint32: (1, 32),
    torch.uint64: (1, 64),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
    torch.complex32: (5, 32),
    torch.complex64: (5, 64),
    torch.complex128: (5, 128),
    torch.bool: (6, 8),
    torch.float8_e4m3fn: (10, 8),
    torch.float8_e5m2: (12, 8),
}
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_COMPLEX = (torch.complex64, torch.complex128)

_reader = _native.TensorReader(Tensor, _DTYPES)


def implementations(op: str, device: torch.device | str) -> tuple[str, ...]:
    """Names of the implementations of `op` ("flatten" or "unflatten") that can run on `device`, fastest first."""
    if op not in _OPERATIONS:
        raise ConfigurationError(f"implementations: op must be one of {', '.join(_OPERATIONS)}, got {op!r}")
    return ("native", "torch") if torch.device(device).type == "cpu" else ("torch",)


def flatten(
    tensors: Sequence[Tensor | None],
    out: Tensor,
    scale: float = 1.0,
    offsets: Sequence[int] | None = None,
    implementation: str | None = None,
) -> None:
    """Copies `tensors`, times `scale` and cast to `out`'s dtype, to their places in `out`. What no tensor covers becomes zero.

    Args:
        tensors: any number, of any floating-point dtypes (float32, float64, bfloat16, float16) or, uncast, of `out`'s own dtype. Taken
            without gradients. With `offsets` an entry may be None: it covers nothing.
        out: one-dimensional, contiguous. A tensor may lie in `out` at its own place, in `out`'s dtype; no other overlap is allowed.
        scale: factor; other than 1 only for floating-point and complex dtypes.
        offsets: each tensor's first element in `out`, ascending; None means packed one after another.
        implementation: one of `implementations("flatten", out.device)`; None means DDPCOMM_IMPLEMENTATION, else the fastest.

    Raises:
        ConfigurationError, ConfigurationTypeError: the arguments can't be served; nothing was written.
    """
    _check_buffer("flatten", "out", out)
    entries = [_readable("flatten", i, tensor, offsets is not None, out) for i, tensor in enumerate(tensors)]
    plan = _plan_for("flatten", entries, out, offsets, implementation)
    plan.flatten(entries, out, scale)


def unflatten(
    flat: Tensor,
    tensors: Sequence[Tensor | None],
    scale: float = 1.0,
    offsets: Sequence[int] | None = None,
    implementation: str | None = None,
) -> None:
    """The reverse of `flatten`: fills `tensors` from their places in `flat`, times `scale` and cast to each tensor's dtype.

    Arguments, order of elements and errors as for `flatten`. Entries that are None are skipped.
    """
    _check_buffer("unflatten", "flat", flat)
    written = [_readable("unflatten", i, tensor, offsets is not None, flat) for i, tensor in enumerate(tensors)]
    for i, (entry, tensor) in enumerate(zip(written, tensors, strict=True)):
        if entry is not None and tensor is not None and entry.data_ptr() != tensor.data_ptr() and _overlaps_itself(tensor):
            raise ConfigurationError(f"unflatten: several elements of tensor {i} share one place in memory; clone it first")
    plan = _plan_for("unflatten", written, flat, offsets, implementation)
    plan.unflatten(flat, written, scale)
    with torch.no_grad():
        for entry, tensor in zip(written, tensors, strict=True):
            if entry is not None and tensor is not None and entry.data_ptr() != tensor.data_ptr():
                tensor.copy_(entry)


class FlattenPlan:
    """`flatten` and `unflatten` between one buffer and tensors of the same sizes at the same places, many times over.

    What can be checked and computed beforehand is: a call costs about 1 us, and 0.02 us a tensor, besides the copy (implementation
    "native"). The tensors of a call are detached and dense in memory, without conj or neg bit; their dtypes may differ from the buffer's
    and from call to call.

    Args:
        numels: elements of each tensor.
        offsets: each tensor's first element in the buffer; ascending, ranges do not overlap.
        total_numel: elements of the buffer.
        dtype: of the buffer.
        device: of the buffer and all tensors.
        implementation: as for `flatten`.

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
        self.implementation = _choose("flatten", torch.device(device), implementation)
        if dtype not in _DTYPES:
            raise ConfigurationTypeError(f"FlattenPlan: a buffer can't have dtype {dtype}")
        try:
            plan = _native.FlattenPlan(_reader, numels, offsets, total_numel, _DTYPES[dtype])
        except (ValueError, OverflowError) as error:
            raise ConfigurationError(f"FlattenPlan: {error}") from None
        self._plan = plan if self.implementation == "native" else _TorchPlan(numels, offsets, total_numel, dtype)

    def flatten(self, tensors: Sequence[Tensor | None], out: Tensor, scale: float = 1.0) -> None:
        """Copies `tensors` to their places in `out`, as the function `flatten` does. None entries cover nothing."""
        try:
            self._plan.flatten(tensors, out, scale, torch.get_num_threads())
        except ValueError as error:
            raise ConfigurationError(f"flatten: {error}") from None
        except TypeError as error:
            raise ConfigurationTypeError(f"flatten: {error}") from None

    def unflatten(self, flat: Tensor, tensors: Sequence[Tensor | None], scale: float = 1.0) -> None:
        """Fills `tensors` from their places in `flat`, as the function `unflatten` does. None entries are skipped."""
        try:
            self._plan.unflatten(flat, tensors, scale, torch.get_num_threads())
        except ValueError as error:
            raise ConfigurationError(f"unflatten: {error}") from None
        except TypeError as error:
            raise ConfigurationTypeError(f"unflatten: {error}") from None


class _TorchPlan:
    """The plan of implementation "torch", with the interface of `_native.FlattenPlan`."""

    def __init__(self, numels: Sequence[int], offsets: Sequence[int], total_numel: int, dtype: torch.dtype) -> None:
        self._numels = tuple(numels)
        self._offsets = tuple(offsets)
        self._total_numel = total_numel
        self._dtype = dtype

    def flatten(self, tensors: Sequence[Tensor | None], out: Tensor, scale: float, threads: int) -> None:
        self._check(tensors, out, scale, into_buffer=True)
        with torch.no_grad():
            reference.flatten(tensors, self._offsets, out, scale)

    def unflatten(self, flat: Tensor, tensors: Sequence[Tensor | None], scale: float, threads: int) -> None:
        self._check(tensors, flat, scale, into_buffer=False)
        with torch.no_grad():
            reference.unflatten(flat, self._offsets, tensors, scale)

    def _check(self, tensors: Sequence[Tensor | None], buffer: Tensor, scale: float, *, into_buffer: bool) -> None:
        if buffer.dtype != self._dtype:
            raise TypeError(f"the buffer's dtype is {buffer.dtype}, the layout was made for {self._dtype}")
        if buffer.numel() != self._total_numel:
            raise ValueError(f"the buffer has {buffer.numel()} elements, the layout {self._total_numel}")
        if len(tensors) != len(self._numels):
            raise ValueError(f"there are {len(tensors)} tensors, the layout has {len(self._numels)}")
        start = buffer.data_ptr()
        end = start + buffer.numel() * buffer.element_size()
        for i, (tensor, numel, offset) in enumerate(zip(tensors, self._numels, self._offsets, strict=True)):
            if tensor is None:
                continue
            if tensor.device != buffer.device:
                raise ValueError(f"tensor {i} is on {tensor.device}, the buffer on {buffer.device}")
            if tensor.numel() != numel:
                raise ValueError(f"tensor {i} has {tensor.numel()} elements, the layout {numel}")
            same = tensor.dtype == buffer.dtype
            if not (same and (scale == 1 or tensor.dtype in _COMPLEX)) and not (tensor.dtype in _FLOATS and buffer.dtype in _FLOATS):
                raise TypeError(f"tensor {i} has dtype {tensor.dtype}, which can't be scaled and cast to or from {buffer.dtype}")
            begin = tensor.data_ptr()
            overlaps = begin < end and start < begin + numel * tensor.element_size()
            if numel and overlaps and not (same and begin == start + offset * tensor.element_size()):
                raise ValueError(f"tensor {i} overlaps the buffer, but not at its own place in it")


# ---- checks and choices ---------------------------------------------------------------------------------------------


def _choose(op: str, device: torch.device, implementation: str | None) -> str:
    """The implementation asked for by argument, else by environment, else the fastest."""
    available = implementations(op, device)
    wanted = implementation or env.read().implementation
    if wanted is None:
        return available[0]
    if wanted not in available:
        source = "implementation" if implementation else "DDPCOMM_IMPLEMENTATION"
        raise ConfigurationError(f"{op}: {source} is {wanted!r}; on {device} there are {', '.join(available)}")
    return wanted


def _plan_for(
    op: str, tensors: Sequence[Tensor | None], buffer: Tensor, offsets: Sequence[int] | None, implementation: str | None
) -> FlattenPlan:
    numels = [0 if tensor is None else tensor.numel() for tensor in tensors]
    if offsets is None:
        offsets = [0]
        for numel in numels:
            offsets.append(offsets[-1] + numel)
        offsets.pop()
    elif len(offsets) != len(numels):
        raise ConfigurationError(f"{op}: there are {len(numels)} tensors but {len(offsets)} offsets")
    return FlattenPlan(numels, offsets, buffer.numel(), buffer.dtype, buffer.device, _choose(op, buffer.device, implementation))


def _check_buffer(op: str, name: str, buffer: Tensor) -> None:
    if not isinstance(buffer, Tensor):
        raise ConfigurationTypeError(f"{op}: {name} must be a tensor, got {type(buffer).__name__}")
    if buffer.layout != torch.strided or buffer.dim() != 1 or not buffer.is_contiguous():
        raise ConfigurationError(f"{op}: {name} must be one-dimensional and contiguous, got shape {tuple(buffer.shape)}")


def _readable(op: str, index: int, tensor: Tensor | None, may_be_none: bool, buffer: Tensor) -> Tensor | None:
    """The tensor itself, detached, if its elements fill a stretch of memory; else a contiguous copy."""
    if tensor is None:
        if may_be_none:
            return None
        raise ConfigurationTypeError(f"{op}: tensor {index} is None, which needs offsets")
    if not isinstance(tensor, Tensor):
        raise ConfigurationTypeError(f"{op}: expected a tensor at {index}, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise ConfigurationTypeError(f"{op}: tensor {index} has layout {tensor.layout}; convert it with .to_dense() first")
    if tensor.device != buffer.device:
        raise ConfigurationError(f"{op}: tensor {index} is on {tensor.device}, the buffer on {buffer.device}")
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if _is_dense(tensor) else tensor.contiguous()


def _is_dense(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements may share one place in memory. Exact for every view that slicing, expanding and transposing make."""
    end = 0
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1):
        if stride <= end:
            return True
        end += stride * (size - 1)
    return False
