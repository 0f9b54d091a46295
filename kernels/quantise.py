"""quantise and dequantise in Triton: many tensors to 8-bit codes with a scale per block of 256, with error feedback, and back.

Bytes, for each element: quantise reads the tensor and 4 bytes of residual, and writes 1 byte and 4 bytes of residual; dequantise reads 1
byte and writes the tensor; and 4 bytes of scale for each 256. A tile is 16 blocks, so that no block is shared by two programs.

Every step is one correctly rounded operation (no fused multiply-add: `enable_fp_fusion=False`), so that the bits are those of the
reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .addresses import Groups
from .flatten import OPTIONS, Factor
from .numbers import element_of, format_of, narrow, widen
from .reference import CODES, QUANTISED_BLOCK
from .tiles import COLUMNS, TILE, AddressTable, tile_table


@triton.jit
def _encode(value, CODE: tl.constexpr):
    if CODE == "int8":
        rounded = (value + 12582912.0) - 12582912.0  # to an integer, ties to even
        clamped = tl.minimum(tl.maximum(rounded, -127.0), 127.0)
        return clamped.to(tl.int32).to(tl.uint8)
    else:
        return narrow(value, CODE, tl.uint8)


@triton.jit
def _decode(code, CODE: tl.constexpr):
    if CODE == "int8":
        return code.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        return widen(code, CODE, tl.float32)


@triton.jit
def quantise_kernel(
    addresses,
    tiles,
    factor_pointer,
    residual,
    codes,
    scales,
    reciprocal_of_largest_pointer,
    SOURCE: tl.constexpr,
    SOURCE_ELEMENT: tl.constexpr,
    SOURCE_BYTES: tl.constexpr,
    CODE: tl.constexpr,
    FEEDBACK: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = TILE // BLOCK
    row = tiles + tl.program_id(0) * COLUMNS
    address = tl.load(addresses + tl.load(row))
    if address != -1:  # tiles.OTHER
        counts = tl.load(row + 3)
        written = (counts >> 32).to(tl.int32)
        valid = tl.where(address == 0, 0, counts.to(tl.int32))  # tiles.ABSENT
        first = tl.multiple_of(tl.load(row + 2), BLOCK)
        block = tl.arange(0, BLOCKS)
        places = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        source_address = address + tl.load(row + 1) * SOURCE_BYTES
        source = source_address.to(tl.pointer_type(SOURCE_ELEMENT))
        COMPUTE: tl.constexpr = tl.float64 if SOURCE == "float64" else tl.float32
        factor = tl.load(factor_pointer).to(COMPUTE)
        inside = places < written
        if (valid == TILE) & (source_address % 16 == 0):
            element = tl.load(tl.multiple_of(source, 16) + places)
        else:
            element = tl.load(source + places, mask=places < valid, other=0)
        value = (widen(element, SOURCE, COMPUTE) * factor).to(tl.float32)
        if FEEDBACK:
            if written == TILE:
                value += tl.load(residual + first + places)
            else:
                value += tl.load(residual + first + places, mask=inside, other=0.0)

        magnitude = value.to(tl.uint32, bitcast=True) & 0x7FFFFFFF  # orders like the numbers; what is not finite comes last
        largest = tl.max(magnitude.to(tl.int32), axis=1)
        finite = largest < 0x7F800000
        step = largest.to(tl.float32, bitcast=True) * tl.load(reciprocal_of_largest_pointer)
        sent = finite & (step >= 1.1754943508222875e-38)
        step = tl.where(sent, step, 0.0)
        reciprocal = tl.where(sent, tl.div_rn(tl.full([BLOCKS], 1.0, tl.float32), tl.where(sent, step, 1.0)), 0.0)
        value = tl.where(finite[:, None], value, 0.0)
        code = _encode(value * reciprocal[:, None], CODE)
        lost = value - _decode(code, CODE) * step[:, None]
        if written == TILE:
            tl.store(codes + first + places, code)
            if FEEDBACK:
                tl.store(residual + first + places, lost)
        else:
            tl.store(codes + first + places, code, mask=inside)
            if FEEDBACK:
                tl.store(residual + first + places, lost, mask=inside)
        tl.store(scales + first // BLOCK + block, tl.where(finite, step, float("nan")), mask=block * BLOCK < written)


@triton.jit
def dequantise_kernel(
    addresses,
    tiles,
    factor_pointer,
    codes,
    scales,
    RESULT: tl.constexpr,
    RESULT_ELEMENT: tl.constexpr,
    RESULT_BYTES: tl.constexpr,
    CODE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tiles + tl.program_id(0) * COLUMNS
    address = tl.load(addresses + tl.load(row))
    if address > 0:  # neither ABSENT nor OTHER
        valid = tl.load(row + 3).to(tl.int32)
        first = tl.multiple_of(tl.load(row + 2), BLOCK)
        places = tl.arange(0, TILE)
        inside = places < valid
        reach = tl.multiple_of((valid + BLOCK - 1) // BLOCK * BLOCK, BLOCK)  # the codes' last block is whole
        COMPUTE: tl.constexpr = tl.float64 if RESULT == "float64" else tl.float32
        code = tl.load(codes + first + places, mask=places < reach, other=0)
        step = tl.load(scales + (first + places) // BLOCK, mask=places < reach, other=0.0)
        value = (_decode(code, CODE) * step).to(COMPUTE) * tl.load(factor_pointer).to(COMPUTE)
        target_address = address + tl.load(row + 1) * RESULT_BYTES
        target = target_address.to(tl.pointer_type(RESULT_ELEMENT))
        if ACCUMULATE:
            value = widen(tl.load(target + places, mask=inside, other=0), RESULT, COMPUTE) + value
        stored = narrow(value, RESULT, RESULT_ELEMENT)
        if (valid == TILE) & (target_address % 16 == 0):
            tl.store(tl.multiple_of(target, 16) + places, stored)
        else:
            tl.store(target + places, stored, mask=inside)


class Quantise:
    """quantise and dequantise over a fixed layout. Arguments as for `ddpcomm.plans.QuantisePlan`."""

    def __init__(self, numels: Sequence[int], offsets: Sequence[int], total_numel: int, code: str, device: torch.device) -> None:
        self._with_gaps = torch.from_numpy(tile_table(numels, offsets, total_numel, gaps=True)).to(device)
        self._without_gaps = torch.from_numpy(tile_table(numels, offsets, total_numel, gaps=False)).to(device)
        self._reciprocal = torch.tensor([1.0 / CODES[code][1]], dtype=torch.float32, device=device)
        self._factor = Factor(device)
        self._tables: dict[torch.dtype, AddressTable] = {}
        self._code = code
        self._count = len(numels)
        self._device = device

    def _table(self, dtype: torch.dtype) -> AddressTable:
        if dtype not in self._tables:
            self._tables[dtype] = AddressTable(self._count, self._device)
        return self._tables[dtype]

    def quantise(self, groups: Groups, codes: Tensor, scales: Tensor, scale: float, residual: Tensor | None) -> None:
        if len(self._with_gaps) == 0:
            return
        for dtype, addresses in groups:
            source = format_of(dtype)
            quantise_kernel[(len(self._with_gaps),)](
                self._table(dtype)(addresses),
                self._with_gaps,
                self._factor(scale),
                scales if residual is None else residual,
                codes,
                scales,
                self._reciprocal,
                SOURCE=source,
                SOURCE_ELEMENT=element_of(dtype, source),
                SOURCE_BYTES=dtype.itemsize,
                CODE=self._code,
                FEEDBACK=residual is not None,
                COLUMNS=COLUMNS,
                TILE=TILE,
                BLOCK=QUANTISED_BLOCK,
                **OPTIONS,
            )

    def dequantise(self, codes: Tensor, scales: Tensor, groups: Groups, scale: float, accumulate: bool) -> None:
        if len(self._without_gaps) == 0:
            return
        for dtype, addresses in groups:
            result = format_of(dtype)
            dequantise_kernel[(len(self._without_gaps),)](
                self._table(dtype)(addresses),
                self._without_gaps,
                self._factor(scale),
                codes,
                scales,
                RESULT=result,
                RESULT_ELEMENT=element_of(dtype, result),
                RESULT_BYTES=dtype.itemsize,
                CODE=self._code,
                ACCUMULATE=accumulate,
                COLUMNS=COLUMNS,
                TILE=TILE,
                BLOCK=QUANTISED_BLOCK,
                **OPTIONS,
            )
