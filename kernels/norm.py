"""norm in Triton: sum of squares and number of non-finite values of a buffer's tensors, in one pass, deterministic.

Bytes: each covered byte of the buffer is read once, and 16 bytes a tile of 4096 elements are written and read again. Squares are added in
float32 within a tile (float64 for float64), the tiles in float64 by one program in a fixed order; no atomic operation is used, so two
runs give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .numbers import element_of, format_of, widen
from .tiles import COLUMNS, TILE, tile_table

_SUM_BLOCK = 1024


@triton.jit
def partial_norm(partials, tile, value):
    """Writes a tile's sum of squares and number of non-finite values."""
    tl.store(partials + tile * 2, tl.sum(value * value, axis=0).to(tl.float64))
    tl.store(partials + tile * 2 + 1, tl.sum((value - value != 0).to(tl.int32), axis=0).to(tl.float64))


@triton.jit
def norm_kernel(
    tiles,
    flat,
    partials,
    FORMAT: tl.constexpr,
    ELEMENT: tl.constexpr,
    BYTES: tl.constexpr,
    COMPUTE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    tile = tl.program_id(0)
    row = tiles + tile * COLUMNS
    valid = tl.load(row + 3).to(tl.int32)
    address = flat.to(tl.int64) + tl.load(row + 2) * BYTES
    pointer = address.to(tl.pointer_type(ELEMENT))
    places = tl.arange(0, TILE)
    if (valid == TILE) & (address % 16 == 0):
        partial_norm(partials, tile, widen(tl.load(tl.multiple_of(pointer, 16) + places), FORMAT, COMPUTE))
    else:
        partial_norm(partials, tile, widen(tl.load(pointer + places, mask=places < valid, other=0), FORMAT, COMPUTE))


@triton.jit
def sum_kernel(partials, statistics, count, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float64)
    nonfinite = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, count, BLOCK):
        mask = begin + places < count
        squares += tl.load(partials + (begin + places) * 2, mask=mask, other=0.0)
        nonfinite += tl.load(partials + (begin + places) * 2 + 1, mask=mask, other=0.0)
    tl.store(statistics, tl.sum(squares, axis=0))
    tl.store(statistics + 1, tl.sum(nonfinite, axis=0))


def sum_partials(partials: Tensor, statistics: Tensor) -> None:
    """Adds up the tiles, always in the same order."""
    sum_kernel[(1,)](partials, statistics, len(partials), BLOCK=_SUM_BLOCK)


class Norm:
    """norm over a fixed layout. Arguments as for `ddpcomm.plans.FlattenPlan`."""

    def __init__(self, numels: Sequence[int], offsets: Sequence[int], total_numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._tiles = torch.from_numpy(tile_table(numels, offsets, total_numel, gaps=False)).to(device)
        self._format = format_of(dtype)
        self._element = element_of(dtype, self._format)
        self._bytes = dtype.itemsize
        self._device = device

    def __call__(self, flat: Tensor, statistics: Tensor) -> None:
        partials = torch.empty(len(self._tiles), 2, dtype=torch.float64, device=self._device)
        if len(self._tiles) > 0:
            norm_kernel[(len(self._tiles),)](
                self._tiles,
                flat.view(torch.uint8),
                partials,
                FORMAT=self._format,
                ELEMENT=self._element,
                BYTES=self._bytes,
                COMPUTE=tl.float64 if self._format == "float64" else tl.float32,
                COLUMNS=COLUMNS,
                TILE=TILE,
                num_warps=8,
            )
        sum_partials(partials, statistics)
