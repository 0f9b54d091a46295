"""Conversion of numbers inside Triton kernels, to and from every format of a buffer.

A format is named by a string: "float32", "float64", "bfloat16", "float16", "float8_e4m3", "float8_e5m2", or "bits" for anything that is
only copied. bfloat16 and the 8-bit floats are loaded and stored as integers and converted by integer arithmetic on the bits of a float:
the same on every GPU, before and after those that have an instruction for it, and under Triton's interpreter, whose own casts to bfloat16
truncate and lose subnormal numbers. The kernels are bound by memory, so that it costs nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_FORMATS: dict[torch.dtype, str] = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "float8_e4m3",
    torch.float8_e5m2: "float8_e5m2",
}
_ELEMENTS = {"float32": tl.float32, "float64": tl.float64, "bfloat16": tl.uint16, "float16": tl.float16}
_INTEGERS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


def real_parts(dtype: torch.dtype) -> tuple[torch.dtype, int]:
    """The real dtype that a complex one consists of, and 2; any other dtype itself, and 1."""
    parts = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}
    return (parts[dtype], 2) if dtype in parts else (dtype, 1)


def format_of(dtype: torch.dtype) -> str:
    """The format of a dtype's numbers."""
    return _FORMATS.get(real_parts(dtype)[0], "bits")


def element_of(dtype: torch.dtype, name: str) -> tl.dtype:
    """The type by which a kernel loads and stores numbers of this dtype in this format."""
    return _ELEMENTS.get(name) or _INTEGERS[real_parts(dtype)[0].itemsize]


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bits(value):
    return value.to(tl.uint32, bitcast=True)


@triton.jit
def _narrow_finite(magnitude, SMALLEST_NORMAL: tl.constexpr, ROUNDER: tl.constexpr, BIAS: tl.constexpr, SHIFT: tl.constexpr):
    # Where the result is subnormal, adding a power of two puts its last bit where float rounds.
    rounder = tl.full([1], ROUNDER, tl.uint32)
    subnormal = _bits(_float(magnitude) + _float(rounder)) - rounder
    normal = (magnitude - BIAS + ((1 << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1)) >> SHIFT
    return tl.where(magnitude < SMALLEST_NORMAL, subnormal, normal)


@triton.jit
def narrow(value, FORMAT: tl.constexpr, ELEMENT: tl.constexpr):
    """float32 or float64 values rounded to FORMAT, to nearest, ties to even, as elements to store."""
    if FORMAT == "bits" or FORMAT == "float64":
        return value.to(ELEMENT)
    value = value.to(tl.float32)
    bits = _bits(value)
    magnitude = bits & 0x7FFFFFFF
    if FORMAT == "bfloat16":
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(magnitude > 0x7F800000, (bits >> 16) | 0x40, rounded).to(tl.uint16)
    elif FORMAT == "float8_e4m3":
        result = _narrow_finite(magnitude, 0x3C800000, 0x46800000, 0x3C000000, 20)
        result = tl.where(magnitude >= 0x43E00000, 0x7E, result)  # 448 and more, infinity too: 448
        result = tl.where(magnitude > 0x7F800000, 0x7F, result)
        return (((bits >> 24) & 0x80) | result).to(tl.uint8)
    elif FORMAT == "float8_e5m2":
        result = _narrow_finite(magnitude, 0x38800000, 0x43000000, 0x38000000, 21)
        result = tl.where(magnitude >= 0x47700000, 0x7C, result)  # from 61440 on: infinity
        result = tl.where(magnitude > 0x7F800000, 0x7F, result)
        return (((bits >> 24) & 0x80) | result).to(tl.uint8)
    else:
        return value.to(ELEMENT)


@triton.jit
def widen(element, FORMAT: tl.constexpr, COMPUTE: tl.constexpr):
    """Loaded elements of FORMAT as values of the compute type."""
    if FORMAT == "bits":
        return element
    elif FORMAT == "bfloat16":
        return _float(element.to(tl.uint32) << 16).to(COMPUTE)
    elif FORMAT == "float8_e4m3":
        wide = element.to(tl.uint32)
        magnitude = (wide & 0x7F) << 20
        tiny = tl.full([1], 0x3C800000, tl.uint32)
        subnormal = _bits(_float(magnitude + tiny) - _float(tiny))
        number = tl.where(magnitude < 0x00800000, subnormal, magnitude + 0x3C000000)
        return _float(((wide & 0x80) << 24) | tl.where(magnitude == 0x07F00000, 0x7FC00000, number)).to(COMPUTE)
    elif FORMAT == "float8_e5m2":
        # The upper half of a float16.
        return (element.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(COMPUTE)
    else:
        return element.to(COMPUTE)
