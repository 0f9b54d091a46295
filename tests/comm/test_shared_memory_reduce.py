"""The reduction loops of the shared-memory transport, in every instruction set, against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ddpcomm import _native

SUM, MAX = 0, 2
CODES = {
    torch.float64: (2, 64),
    torch.float32: (2, 32),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.int64: (0, 64),
    torch.int32: (0, 32),
    torch.int16: (0, 16),
    torch.int8: (0, 8),
    torch.uint8: (1, 8),
}
SIZES = (0, 1, 3, 4, 15, 16, 17, 63, 64, 65, 257, 1023, 4096, 10_007)

every_isa = pytest.mark.parametrize("isa", _native.instruction_sets())
every_dtype = pytest.mark.parametrize("dtype", CODES, ids=str)


def reduce(isa: str, op: int, sources: list[Tensor], targets: list[Tensor], scale: float = 1.0) -> None:
    dtype = sources[0].dtype
    addresses = [[tensor.data_ptr() for tensor in tensors] for tensors in (sources, targets)]
    _native.shared_memory_reduce(isa, op, *CODES[dtype], *addresses, sources[0].numel(), scale)


def oracle(op: int, sources: list[Tensor], scale: float) -> Tensor:
    """By rank, 16-bit floats in float32."""
    dtype = sources[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = sources[0].to(wide)
    if op == MAX:
        for source in sources[1:]:
            total = torch.maximum(total, source.to(wide))
        return total.to(dtype)
    scaled = scale != 1.0 and dtype.is_floating_point
    total = total * scale if scaled else total
    for source in sources[1:]:
        total = total + (source.to(wide) * scale if scaled else source.to(wide))
    return total.to(dtype)


def random_bits(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits at all: with subnormal numbers, infinities and NaNs among the floats."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)


def same_numbers(actual: Tensor, wanted: Tensor) -> None:
    """Bit for bit, but that a NaN may be any NaN."""
    if not wanted.is_floating_point():
        assert torch.equal(actual, wanted)
        return
    nan = wanted.isnan()
    assert torch.equal(actual.isnan(), nan)
    assert torch.equal(actual[~nan].view(torch.uint8), wanted[~nan].view(torch.uint8))


@every_isa
@every_dtype
@pytest.mark.parametrize("op", [SUM, MAX], ids=["sum", "max"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_any_bits(isa: str, dtype: torch.dtype, op: int, count: int) -> None:
    for numel in SIZES:
        sources = [random_bits(numel, dtype, seed) for seed in range(count)]
        out = torch.empty(numel, dtype=dtype)
        reduce(isa, op, sources, [out])
        same_numbers(out, oracle(op, sources, 1.0))


@every_isa
@every_dtype
@pytest.mark.parametrize("scale", [0.5, 1 / 3])
def test_scale(isa: str, dtype: torch.dtype, scale: float) -> None:
    """Rounded as torch rounds a product, then a sum: never both at once."""
    scale = torch.tensor(scale).item() if dtype != torch.float64 else scale
    for numel in SIZES:
        generator = torch.Generator().manual_seed(numel)
        sources = [torch.randn(numel, generator=generator).mul(100).to(dtype) for _ in range(3)]
        out = torch.empty(numel, dtype=dtype)
        reduce(isa, SUM, sources, [out], scale)
        same_numbers(out, oracle(SUM, sources, scale))


@every_isa
@every_dtype
@pytest.mark.parametrize("shift", [0, 1])
def test_in_place(isa: str, dtype: torch.dtype, shift: int) -> None:
    """From every array into every array, aligned and not; what lies around them stays."""
    for numel in SIZES:
        arrays = [random_bits(numel + 64, dtype, seed) for seed in range(3)]
        before = [array.clone() for array in arrays]
        parts = [array[32 + shift :][:numel] for array in arrays]
        wanted = oracle(SUM, [part.clone() for part in parts], 1.0)
        reduce(isa, SUM, parts, parts)
        for array, old, part in zip(arrays, before, parts, strict=True):
            same_numbers(part, wanted)
            for around in (slice(0, 32 + shift), slice(32 + shift + numel, None)):
                assert torch.equal(array[around].view(torch.uint8), old[around].view(torch.uint8))


def test_instruction_sets_agree() -> None:
    """To the last bit, NaNs included: ranks on one host may not differ."""
    for dtype in CODES:
        sources = [random_bits(5000, dtype, seed) for seed in range(4)]
        results = []
        for isa in _native.instruction_sets():
            out = torch.empty(5000, dtype=dtype)
            reduce(isa, SUM, sources, [out])
            results.append(out.view(torch.uint8))
        assert all(torch.equal(result, results[0]) for result in results)


def test_the_maximum_of_anything_and_nan_is_nan() -> None:
    nan = float("nan")
    for isa in _native.instruction_sets():
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            out = torch.empty(4, dtype=dtype)
            reduce(isa, MAX, [torch.tensor([nan, 1, 2, nan], dtype=dtype), torch.tensor([1, nan, 3, nan], dtype=dtype)], [out])
            assert out.isnan().tolist() == [True, True, False, True]
            assert out[2] == 3


@pytest.mark.parametrize("code", [(5, 64), (6, 8), (2, 8), (0, 0)])
def test_types_that_cannot_be_reduced(code: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="can't be reduced"):
        _native.shared_memory_reduce("", SUM, *code, [torch.ones(1).data_ptr()], [], 1, 1.0)
    with pytest.raises(ValueError, match="can't be reduced"):
        _native.shared_memory_reduce("", SUM, 2, 32, [], [], 1, 1.0)


def test_unknown_instruction_set() -> None:
    with pytest.raises(ValueError, match="avx9"):
        _native.shared_memory_reduce("avx9", SUM, 2, 32, [torch.ones(1).data_ptr()], [], 1, 1.0)
