"""flatten, unflatten, norm, quantise: between many tensors and one buffer, each in one pass over the bytes.

Arithmetic, the same bits in every implementation: a value is taken to the compute type (float64 if either side is float64, else float32),
multiplied by the scale in that type, and rounded to the result's type, ties to even. Where both sides have one dtype and the scale is 1,
bits are copied. See kernels/reference.py.

**Order of elements.** A tensor whose elements fill a stretch of memory without gap or overlap (contiguous, channels_last, transposed: any
dense strides) is taken in the order of its memory, not of its indices. So flatten followed by unflatten restores tensors exactly if they
have the same strides. Any other tensor is taken in the order of its indices, by way of a contiguous copy.

A caller that does the same many times makes a plan once: `FlattenPlan`, `QuantisePlan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ddpcomm.argument_checks import check_integer, check_number, check_sequence
from ddpcomm.errors import ConfigurationError, ConfigurationTypeError
from ddpcomm.kernels.reference import QUANTISED_BLOCK
from ddpcomm.memory import by_stride, overlaps_itself
from ddpcomm.plans import FlattenPlan, QuantisePlan, choose, implementations

__all__ = ["FlattenPlan", "QuantisePlan", "dequantise", "flatten", "implementations", "is_taken_as_it_is", "norm", "quantise", "unflatten"]


def flatten(
    tensors: Sequence[Tensor | None],
    out: Tensor,
    scale: float = 1.0,
    offsets: Sequence[int] | None = None,
    implementation: str | None = None,
    *,
    accumulate: bool = False,
) -> None:
    """Copies `tensors`, times `scale` and cast to `out`'s dtype, to their places in `out`. What no tensor covers becomes zero.

    Args:
        tensors: any number, of any floating-point dtypes (float32, float64, bfloat16, float16, float8_e4m3fn, float8_e5m2) or, uncast, of
            `out`'s own dtype. Taken without gradients. With `offsets` an entry may be None: it covers nothing.
        out: one-dimensional, contiguous. A tensor may lie in `out` at its own place, in `out`'s dtype; no other overlap is allowed.
        scale: factor; other than 1 only for floating-point and complex dtypes.
        offsets: each tensor's first element in `out`, ascending; None means packed one after another.
        implementation: one of `implementations("flatten", out.device)`; None means DDPCOMM_IMPLEMENTATION, else the best.
        accumulate: adds to what is in `out` instead, and leaves alone what no tensor covers. Not for 8-bit floats.

    Raises:
        ConfigurationError, ConfigurationTypeError: the arguments can't be served; nothing was written.
    """
    _check_buffer("flatten", "out", out)
    check_number("flatten: scale", scale)
    entries = _readable("flatten", tensors, offsets is not None, out.device)
    _flatten_plan("flatten", entries, out, offsets, implementation).flatten(entries, out, scale, accumulate)


def unflatten(
    flat: Tensor,
    tensors: Sequence[Tensor | None],
    scale: float = 1.0,
    offsets: Sequence[int] | None = None,
    implementation: str | None = None,
    *,
    statistics: Tensor | None = None,
) -> None:
    """The reverse of `flatten`: fills `tensors` from their places in `flat`, times `scale` and cast to each tensor's dtype.

    Arguments, order of elements and errors as for `flatten`. Entries that are None are skipped. No two tensors may overlap.

    Args:
        statistics: two float64, on the same device, that receive what `norm` returns for the tensors as written. It costs no further pass.
    """
    _check_buffer("unflatten", "flat", flat)
    check_number("unflatten: scale", scale)
    written = _writable("unflatten", tensors, offsets is not None, flat.device)
    _flatten_plan("unflatten", written, flat, offsets, implementation).unflatten(flat, written, scale, statistics)
    _write_back(written, tensors)


def norm(tensors: Sequence[Tensor], implementation: str | None = None) -> Tensor:
    """[sum of squares, number of values that are not finite] over all `tensors`: two float64 on their device.

    Tiles of 4096 elements are summed in float32 (float64 for float64 tensors), the tiles in float64, in an order that does not depend on
    the number of threads.
    """
    check_sequence("norm: tensors", tensors)
    device = tensors[0].device if tensors and isinstance(tensors[0], Tensor) else torch.device("cpu")
    total = torch.zeros(2, dtype=torch.float64, device=device)
    each = torch.empty_like(total)
    for tensor in _readable("norm", tensors, False, device):
        if tensor is not None:
            flat = tensor.as_strided((tensor.numel(),), (1,))
            FlattenPlan([flat.numel()], [0], flat.numel(), flat.dtype, device, choose("norm", device, implementation)).norm(flat, each)
            total += each
    return total


def quantise(
    tensors: Sequence[Tensor | None],
    codes: Tensor,
    scales: Tensor,
    scale: float = 1.0,
    residual: Tensor | None = None,
    offsets: Sequence[int] | None = None,
    code: str = "int8",
    implementation: str | None = None,
) -> None:
    """Writes `tensors` times `scale`, plus `residual`, as 8-bit codes with a scale for each block of 256; `residual` becomes what was lost.

    A block's scale is its largest magnitude divided by the code's largest number, so that nothing saturates. A block with a value that is
    not finite gets the scale NaN, so that whoever decodes it sees NaN, and leaves a residual of zero.

    Args:
        tensors: of floating-point dtypes; order of elements as for `flatten`. None entries, and gaps, stand for zeros.
        codes: uint8, one-dimensional; its size is a multiple of 256.
        scales: float32, one for each 256 codes.
        residual: float32, of `codes`' size: error feedback. Start with zeros.
        offsets: each tensor's first element in `codes`: ascending multiples of 256. None means each at the first multiple of 256.
        code: "int8", "float8_e4m3" or "float8_e5m2".
    """
    _check_buffer("quantise", "codes", codes)
    check_number("quantise: scale", scale)
    entries = _readable("quantise", tensors, offsets is not None, codes.device)
    plan = _quantise_plan("quantise", entries, codes, offsets, code, implementation)
    plan.quantise(entries, codes, scales, scale, residual)


def dequantise(
    codes: Tensor,
    scales: Tensor,
    tensors: Sequence[Tensor | None],
    scale: float = 1.0,
    accumulate: bool = False,
    offsets: Sequence[int] | None = None,
    code: str = "int8",
    implementation: str | None = None,
) -> None:
    """Fills `tensors` with what codes and scales stand for, times `scale`, or adds that to them. Arguments as for `quantise`."""
    _check_buffer("dequantise", "codes", codes)
    check_number("dequantise: scale", scale)
    written = _writable("dequantise", tensors, offsets is not None, codes.device)
    plan = _quantise_plan("dequantise", written, codes, offsets, code, implementation)
    plan.dequantise(codes, scales, written, scale, accumulate)
    _write_back(written, tensors)


def is_taken_as_it_is(tensor: Tensor) -> bool:
    """Whether a plan takes this tensor, whose elements then fill a stretch of memory and mean what is written there."""
    if not isinstance(tensor, Tensor):
        raise ConfigurationTypeError(f"is_taken_as_it_is: expected a tensor, got {type(tensor).__name__}")
    return not (tensor.is_conj() or tensor.is_neg()) and _is_dense(tensor)


# ---- plans for one call ---------------------------------------------------------------------------------------------


def _numels(tensors: Sequence[Tensor | None]) -> list[int]:
    return [0 if tensor is None else tensor.numel() for tensor in tensors]


def _packed(numels: Sequence[int], alignment: int) -> list[int]:
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end += -(-numel // alignment) * alignment
    return offsets


def _offsets(op: str, numels: Sequence[int], offsets: Sequence[int] | None, alignment: int) -> Sequence[int]:
    if offsets is None:
        return _packed(numels, alignment)
    for offset in check_sequence(f"{op}: offsets", offsets):
        check_integer(f"{op}: offsets", offset)
    if len(offsets) != len(numels):
        raise ConfigurationError(f"{op}: there are {len(numels)} tensors but {len(offsets)} offsets")
    return offsets


def _flatten_plan(
    op: str, tensors: Sequence[Tensor | None], buffer: Tensor, offsets: Sequence[int] | None, implementation: str | None
) -> FlattenPlan:
    numels = _numels(tensors)
    places = _offsets(op, numels, offsets, 1)
    return FlattenPlan(numels, places, buffer.numel(), buffer.dtype, buffer.device, choose(op, buffer.device, implementation))


def _quantise_plan(
    op: str, tensors: Sequence[Tensor | None], codes: Tensor, offsets: Sequence[int] | None, code: str, implementation: str | None
) -> QuantisePlan:
    numels = _numels(tensors)
    places = _offsets(op, numels, offsets, QUANTISED_BLOCK)
    return QuantisePlan(numels, places, codes.numel(), codes.device, code, choose(op, codes.device, implementation))


# ---- tensors as the kernels take them -------------------------------------------------------------------------------


def _check_buffer(op: str, name: str, buffer: Tensor) -> None:
    if not isinstance(buffer, Tensor):
        raise ConfigurationTypeError(f"{op}: {name} must be a tensor, got {type(buffer).__name__}")
    if buffer.layout != torch.strided or buffer.dim() != 1 or not buffer.is_contiguous():
        raise ConfigurationError(f"{op}: {name} must be one-dimensional and contiguous, got shape {tuple(buffer.shape)}")


def _readable(op: str, tensors: Sequence[Tensor | None], may_be_none: bool, device: torch.device) -> list[Tensor | None]:
    """Each tensor itself, detached, if its elements fill a stretch of memory; else a contiguous copy."""
    entries: list[Tensor | None] = []
    for i, tensor in enumerate(check_sequence(f"{op}: tensors", tensors)):
        if tensor is None and may_be_none:
            entries.append(None)
            continue
        if tensor is None:
            raise ConfigurationTypeError(f"{op}: tensor {i} is None, which needs offsets")
        if not isinstance(tensor, Tensor):
            raise ConfigurationTypeError(f"{op}: expected a tensor at {i}, got {type(tensor).__name__}")
        if tensor.layout != torch.strided:
            raise ConfigurationTypeError(f"{op}: tensor {i} has layout {tensor.layout}; convert it with .to_dense() first")
        if tensor.device != device:
            raise ConfigurationError(f"{op}: tensor {i} is on {tensor.device}, the buffer on {device}")
        tensor = tensor.detach()
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        entries.append(tensor if _is_dense(tensor) else tensor.contiguous())
    return entries


def _writable(op: str, tensors: Sequence[Tensor | None], may_be_none: bool, device: torch.device) -> list[Tensor | None]:
    """As `_readable`; a copy is to be written back."""
    entries = _readable(op, tensors, may_be_none, device)
    for i, (entry, tensor) in enumerate(zip(entries, tensors, strict=True)):
        if entry is not None and tensor is not None and _is_copy(entry, tensor) and overlaps_itself(tensor):
            raise ConfigurationError(f"{op}: several elements of tensor {i} share one place in memory; clone it first")
    written = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, i) for i, t in enumerate(entries) if t is not None and t.numel())
    for (_, end, one), (begin, _, other) in pairwise(written):
        if begin < end:
            raise ConfigurationError(f"{op}: tensors {min(one, other)} and {max(one, other)} overlap in memory; clone one of them first")
    return entries


def _write_back(entries: Sequence[Tensor | None], tensors: Sequence[Tensor | None]) -> None:
    with torch.no_grad():
        for entry, tensor in zip(entries, tensors, strict=True):
            if entry is not None and tensor is not None and _is_copy(entry, tensor):
                tensor.copy_(entry)


def _is_copy(entry: Tensor, tensor: Tensor) -> bool:
    return entry.data_ptr() != tensor.data_ptr()


def _is_dense(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in by_stride(tensor):
        if stride != expected:
            return False
        expected *= size
    return True
