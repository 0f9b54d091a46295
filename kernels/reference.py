"""The operations in plain torch: what every kernel's test compares with, and the implementation "torch" that runs on any device.

Arithmetic, the same for every implementation: a value is taken to the compute type (float64 if either side is float64, else float32),
multiplied by the scale in that type, and rounded to the result's type, ties to even. Results narrower than float32 are rounded from
float32; float8_e4m3fn saturates at its largest number, 448. Where both sides have one dtype and the scale is 1, bits are copied. Complex
tensors and a real scale: the two parts, each as above. Accumulating, the sum with what is there is formed in the compute type.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

QUANTISED_BLOCK = 256
"""Elements that share one scale."""

CODES: dict[str, tuple[torch.dtype, float]] = {
    "int8": (torch.int8, 127.0),
    "float8_e4m3": (torch.float8_e4m3fn, 448.0),
    "float8_e5m2": (torch.float8_e5m2, 57344.0),
}
"""Of each 8-bit code: the dtype, and its largest number."""


def compute_dtype(source: torch.dtype, result: torch.dtype) -> torch.dtype:
    """The type that a conversion between two floating-point types calculates in."""
    return torch.float64 if torch.float64 in (source, result) else torch.float32


def convert(source: Tensor, result: Tensor, scale: float, accumulate: bool = False) -> None:
    """Writes `source` times `scale` into `result`, a tensor of the same shape, or adds it to what is there."""
    if source.dtype == result.dtype and scale == 1 and not accumulate:
        result.copy_(source)
    elif source.is_complex():
        convert(torch.view_as_real(source), torch.view_as_real(result), scale, accumulate)
    elif source.dtype == result.dtype and source.dtype in (torch.float32, torch.float64) and not accumulate:
        torch.mul(source, scale, out=result)
    else:
        computed = source.to(compute_dtype(source.dtype, result.dtype)) * scale
        if accumulate:
            computed = result.to(computed.dtype) + computed
        result.copy_(_rounded(computed, result.dtype))


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype != torch.float64:
        values = values.to(torch.float32)
    if dtype == torch.float8_e4m3fn:
        values = values.clamp(-448.0, 448.0)
    return values.to(dtype)


def in_memory_order(tensor: Tensor) -> Tensor:
    """A one-dimensional view of a tensor whose elements fill a stretch of memory without gap or overlap."""
    return tensor.as_strided((tensor.numel(),), (1,))


def flatten(tensors: Sequence[Tensor | None], offsets: Sequence[int], out: Tensor, scale: float = 1.0, accumulate: bool = False) -> None:
    """out[offsets[i] + j] = tensors[i][j] * scale, in memory order; elements that no tensor covers become zero.

    Args:
        tensors: dense in memory; None entries cover nothing.
        offsets: each tensor's first element in `out`, ascending.
        out: one-dimensional and contiguous.
        accumulate: adds to what is in `out`; elements that no tensor covers stay as they are.
    """
    done = 0
    for tensor, offset in zip(tensors, offsets, strict=True):
        if tensor is None:
            continue
        end = offset + tensor.numel()
        if done < offset and not accumulate:
            out[done:offset].zero_()
        convert(in_memory_order(tensor), out[offset:end], scale, accumulate)
        done = end
    if not accumulate:
        out[done:].zero_()


def unflatten(flat: Tensor, offsets: Sequence[int], tensors: Sequence[Tensor | None], scale: float = 1.0, accumulate: bool = False) -> None:
    """tensors[i][j] = flat[offsets[i] + j] * scale, in memory order. None entries are skipped. Arguments as for `flatten`."""
    for tensor, offset in zip(tensors, offsets, strict=True):
        if tensor is not None:
            convert(flat[offset : offset + tensor.numel()], in_memory_order(tensor), scale, accumulate)


def norm(tensors: Sequence[Tensor | None]) -> Tensor:
    """[sum of squares, number of values that are not finite] over all tensors: two float64, on the tensors' device (or the CPU's).

    Squares are summed in float64. The kernels sum tiles of 4096 elements in float32 and only the tiles in float64, so they agree to about
    1e-6, not bit for bit.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    statistics = torch.zeros(2, dtype=torch.float64, device=present[0].device if present else "cpu")
    for tensor in present:
        statistics[0] += tensor.double().square().sum()
        statistics[1] += (~tensor.isfinite()).sum()
    return statistics


def quantise(values: Tensor, code: str, codes: Tensor, scales: Tensor) -> Tensor:
    """Codes and scales of `values`; returns what was lost.

    A block's scale is its largest magnitude times (1 / the code's largest number), so that nothing saturates. A block whose scale would be
    below the smallest normal float is sent as zero. A block with a value that is not finite gets the scale NaN, and loses nothing.

    Args:
        values: float32, a multiple of `QUANTISED_BLOCK` long.
        codes: uint8, as long; receives the codes' bits.
        scales: float32, one a block.
    """
    dtype, largest = CODES[code]
    blocks = values.view(-1, QUANTISED_BLOCK)
    magnitudes = blocks.abs().amax(dim=1, keepdim=True) if values.numel() else blocks.new_empty(0, 1)
    finite = magnitudes.isfinite()
    steps = magnitudes * torch.tensor(1.0 / largest, dtype=torch.float32, device=values.device)
    sent = finite & (steps >= torch.finfo(torch.float32).smallest_normal)
    steps = torch.where(sent, steps, 0.0)
    blocks = torch.where(finite, blocks, 0.0)
    scaled = blocks * torch.where(sent, 1.0 / steps, 0.0)
    rounded = scaled.round().clamp(-127, 127).to(dtype) if dtype == torch.int8 else _rounded(scaled, dtype)
    codes.view(-1, QUANTISED_BLOCK).copy_(rounded.view(torch.uint8))
    scales.copy_(torch.where(finite, steps, float("nan")).view(-1))
    return (blocks - rounded.to(torch.float32) * steps).view(-1)


def dequantise(codes: Tensor, scales: Tensor, code: str) -> Tensor:
    """The float32 values that codes and scales stand for."""
    decoded = codes.view(CODES[code][0]).to(torch.float32).view(-1, QUANTISED_BLOCK)
    return (decoded * scales.view(-1, 1)).view(-1)
