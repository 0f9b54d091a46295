"""The operations in plain torch: what every kernel's test compares with, and the implementation "torch" that runs on any device.

Arithmetic, the same for every implementation: a value is taken to the compute type (float64 if either side is float64, else float32),
multiplied by the scale in that type, and rounded to the result's type, ties to even. 16-bit results are rounded from float32. Where both
sides have one dtype and the scale is 1, bits are copied. Complex tensors and a real scale: the two parts, each as above.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def compute_dtype(source: torch.dtype, result: torch.dtype) -> torch.dtype:
    """The type that a conversion between two floating-point types calculates in."""
    return torch.float64 if torch.float64 in (source, result) else torch.float32


def convert(source: Tensor, result: Tensor, scale: float) -> None:
    """Writes `source` times `scale` into `result`, a tensor of the same shape."""
    if source.dtype == result.dtype and scale == 1:
        result.copy_(source)
    elif source.is_complex():
        convert(torch.view_as_real(source), torch.view_as_real(result), scale)
    elif source.dtype == result.dtype and source.dtype in (torch.float32, torch.float64):
        torch.mul(source, scale, out=result)
    else:
        computed = source.to(compute_dtype(source.dtype, result.dtype))
        if computed.dtype == torch.float64 and result.dtype != torch.float64:
            computed = (computed * scale).to(torch.float32)
            result.copy_(computed)
        else:
            result.copy_(computed * scale)


def in_memory_order(tensor: Tensor) -> Tensor:
    """A one-dimensional view of a tensor whose elements fill a stretch of memory without gap or overlap."""
    return tensor.as_strided((tensor.numel(),), (1,))


def flatten(tensors: Sequence[Tensor | None], offsets: Sequence[int], out: Tensor, scale: float) -> None:
    """out[offsets[i] + j] = tensors[i][j] * scale, in memory order; elements that no tensor covers become zero.

    Args:
        tensors: dense in memory; None entries are skipped.
        offsets: each tensor's first element in `out`, ascending.
        out: one-dimensional and contiguous.
    """
    done = 0
    for tensor, offset in zip(tensors, offsets, strict=True):
        if tensor is None:
            continue
        end = offset + tensor.numel()
        if done < offset:
            out[done:offset].zero_()
        convert(in_memory_order(tensor), out[offset:end], scale)
        done = end
    out[done:].zero_()


def unflatten(flat: Tensor, offsets: Sequence[int], tensors: Sequence[Tensor | None], scale: float) -> None:
    """tensors[i][j] = flat[offsets[i] + j] * scale, in memory order. None entries are skipped. Arguments as for `flatten`."""
    for tensor, offset in zip(tensors, offsets, strict=True):
        if tensor is not None:
            convert(flat[offset : offset + tensor.numel()], in_memory_order(tensor), scale)
