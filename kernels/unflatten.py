"""unflatten in Triton: one buffer into many tensors, copy + scale + cast in one launch, and the norm of what was written in the same pass.

Bytes: each covered byte of the buffer is read once, each byte of the tensors written once. With the norm, 8 bytes more a tile, which a
second launch of one program adds up in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .addresses import Groups
from .flatten import OPTIONS, Factor, conversion, convert_block
from .norm import partial_norm, sum_partials
from .numbers import real_parts
from .tiles import AddressTable, tile_table


@triton.jit
def unflatten_kernel(
    addresses,
    tiles,
    factor_pointer,
    flat,
    partials,
    SOURCE: tl.constexpr,
    SOURCE_ELEMENT: tl.constexpr,
    SOURCE_BYTES: tl.constexpr,
    RESULT: tl.constexpr,
    RESULT_ELEMENT: tl.constexpr,
    RESULT_BYTES: tl.constexpr,
    COMPUTE: tl.constexpr,
    SCALED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    NORM: tl.constexpr,
):
    tile = tl.program_id(0)
    row = tiles + tile * COLUMNS
    address = tl.load(addresses + tl.load(row))
    if address > 0:  # neither ABSENT nor OTHER
        valid = tl.load(row + 3).to(tl.int32)
        factor = tl.load(factor_pointer).to(COMPUTE)
        places = tl.arange(0, TILE)
        target_address = address + tl.load(row + 1) * RESULT_BYTES
        source_address = flat.to(tl.int64) + tl.load(row + 2) * SOURCE_BYTES
        source = source_address.to(tl.pointer_type(SOURCE_ELEMENT))
        target = target_address.to(tl.pointer_type(RESULT_ELEMENT))
        if (valid == TILE) & ((source_address | target_address) % 16 == 0):
            value = convert_block(
                tl.multiple_of(source, 16), tl.multiple_of(target, 16), places, valid, valid, factor,
                False, SOURCE, RESULT, RESULT_ELEMENT, COMPUTE, SCALED, ACCUMULATE,
            )  # fmt: skip
            if NORM:
                partial_norm(partials, tile, value)
        else:
            value = convert_block(
                source, target, places, valid, valid, factor,
                True, SOURCE, RESULT, RESULT_ELEMENT, COMPUTE, SCALED, ACCUMULATE,
            )  # fmt: skip
            if NORM:
                partial_norm(partials, tile, tl.where(places < valid, value, 0))


class Unflatten:
    """unflatten over a fixed layout. Arguments as for `ddpcomm.plans.FlattenPlan`."""

    def __init__(self, numels: Sequence[int], offsets: Sequence[int], total_numel: int, dtype: torch.dtype, device: torch.device) -> None:
        parts = real_parts(dtype)[1]
        table = tile_table([n * parts for n in numels], [o * parts for o in offsets], total_numel * parts, gaps=False)
        self._tiles = torch.from_numpy(table).to(device)
        self._factor = Factor(device)
        self._tables: dict[torch.dtype, AddressTable] = {}
        self._count = len(numels)
        self._device = device

    def __call__(self, flat: Tensor, groups: Groups, scale: float, statistics: Tensor | None) -> None:
        partials = None
        if statistics is not None:
            partials = torch.zeros(len(self._tiles), 2, dtype=torch.float64, device=self._device)
        if len(self._tiles) > 0:
            for dtype, addresses in groups:
                table = self._tables.get(dtype)
                if table is None:
                    table = self._tables[dtype] = AddressTable(self._count, self._device)
                unflatten_kernel[(len(self._tiles),)](
                    table(addresses),
                    self._tiles,
                    self._factor(scale),
                    flat.view(torch.uint8),
                    self._tiles if partials is None else partials,
                    **conversion(flat.dtype, dtype, scale, False, copy_bits=partials is None),
                    NORM=partials is not None,
                    **OPTIONS,
                )
        if statistics is not None and partials is not None:
            sum_partials(partials, statistics)
