"""Inputs for the kernel tests, and the comparison by bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FLOATS_8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SIZES = (0, 1, 3, 4, 1023, (1 << 20) + 1)
SCALES = (1.0, 0.5, 1 / 3, -1.75)

# Ties, the edges of every 16-bit format, signed zeros and infinities.
_SPECIAL = (
    0.0,
    -0.0,
    1.00390625,
    1.01171875,
    1.00048828125,
    65504.0,
    65519.0,
    65520.0,
    -65536.0,
    2.0**-14,
    2.0**-24,
    2.0**-25,
    1.5 * 2.0**-24,
)
_SPECIAL += (3.0e38, -3.4e38, 1e-40, float("inf"), float("-inf"))


def values(numel: int, dtype: torch.dtype, *, misaligned: int = 0, seed: int = 0) -> Tensor:
    """Numbers of very different sizes, `misaligned` elements after an aligned address."""
    generator = torch.Generator().manual_seed(seed + numel)
    numbers = torch.randn(numel + misaligned, generator=generator, dtype=torch.float64)
    numbers *= torch.exp2(torch.randint(-26, 20, numbers.shape, generator=generator).double())
    special = torch.tensor(_SPECIAL, dtype=torch.float64)[: max(0, numel // 2)]
    if numel >= 3:
        places = torch.randperm(numel, generator=generator)[: special.numel()] + misaligned
        numbers[places] = special
    return numbers.to(dtype)[misaligned:]


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal bit for bit; where both are not a number, any such bits will do."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    actual, expected = actual.flatten(), expected.flatten()
    if torch.equal(_bytes(actual), _bytes(expected)):
        return
    different = (_bytes(actual) != _bytes(expected)).any(dim=1) & ~(_is_nan(actual) & _is_nan(expected))
    places = different.nonzero().flatten()
    if places.numel():
        first = int(places[0])
        pytest.fail(f"{places.numel()} of {actual.numel()} differ, the first at {first}: {actual[first]!r} instead of {expected[first]!r}")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8).view(-1, tensor.element_size())


def _is_nan(tensor: Tensor) -> Tensor:
    return tensor.double().isnan() if tensor.is_floating_point() else torch.zeros_like(tensor, dtype=torch.bool)
