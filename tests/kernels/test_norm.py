"""norm, alone and fused into unflatten: the stated order of summation, whatever the instruction set and number of threads."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from ddpcomm import _native, native, ops
from ddpcomm.errors import ConfigurationError, ConfigurationTypeError
from ddpcomm.kernels import reference
from tests.kernels.cases import assert_same_bits

ISAS = _native.instruction_sets()
WIDE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def in_stated_order(tensors: list[Tensor]) -> tuple[float, int]:
    """Tiles of 4096; sixteen running sums; pairs at distance 8, 4, 2, 1; tiles in float64."""
    total, nonfinite = 0.0, 0
    for tensor in tensors:
        for tile in tensor.split(4096):
            values = tile.to(torch.float64 if tile.dtype == torch.float64 else torch.float32)
            padded = torch.zeros(-(-values.numel() // 16) * 16, dtype=values.dtype)
            padded[: values.numel()] = values
            sums = torch.zeros(16, dtype=values.dtype)
            for row in padded.view(-1, 16):
                sums = sums + row * row
            for distance in (8, 4, 2, 1):
                sums = sums[:distance] + sums[distance : 2 * distance]
            total += float(sums[0])
            nonfinite += int((~values.isfinite()).sum())
    return total, nonfinite


def native_norm(tensors: list[Tensor], isa: str, threads: int) -> tuple[float, int]:
    numels = [tensor.numel() for tensor in tensors]
    offsets = [sum(numels[:i]) for i in range(len(numels))]
    plan = _native.FlattenPlan(native.reader, numels, offsets, sum(numels), native.DTYPES[tensors[0].dtype], isa)
    return plan.norm(torch.cat(tensors), threads)


@pytest.mark.parametrize("dtype", WIDE)
def test_bits_on_every_instruction_set(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(n, generator=generator).to(dtype) for n in (0, 1, 3, 4, 15, 16, 17, 1023, 4096, 4097, 20_000)]
    expected = in_stated_order(tensors)
    for isa, threads in itertools.product(ISAS, (1, 3)):
        assert native_norm(tensors, isa, threads) == expected, isa


def test_threads_do_not_change_the_bits() -> None:
    tensors = [torch.randn(3_000_001), torch.randn(17)]
    assert len({native_norm(tensors, isa, threads) for isa in ISAS for threads in (1, 2, 3, 5)}) == 1


@pytest.mark.parametrize("implementation", ops.implementations("norm", "cpu"))
class TestEveryImplementation:
    @pytest.mark.parametrize(("source", "result"), list(itertools.product(WIDE, WIDE)))
    def test_fused_into_unflatten(self, source: torch.dtype, result: torch.dtype, implementation: str) -> None:
        numels, offsets = [5, 0, 4097, 64], [3, 8, 16, 5000]
        flat = torch.randn(5100).to(source)
        tensors: list[Tensor | None] = [torch.empty(n, dtype=result) for n in numels]
        statistics = torch.full((2,), 9.0, dtype=torch.float64)
        ops.unflatten(flat, tensors, 0.5, offsets, implementation, statistics=statistics)
        expected: list[Tensor | None] = [torch.empty(n, dtype=result) for n in numels]
        reference.unflatten(flat, offsets, expected, 0.5)
        for actual, wanted in zip(tensors, expected, strict=True):
            assert_same_bits(actual, wanted)
        torch.testing.assert_close(statistics, reference.norm(expected), rtol=2e-6, atol=0)

    def test_counts_what_is_not_finite(self, implementation: str) -> None:
        for dtype in WIDE:
            values = torch.ones(5000).to(dtype)
            values[[0, 17, 4095, 4096, 4999]] = torch.tensor([math.inf, -math.inf, math.nan, math.inf, -math.nan]).to(dtype)
            statistics = ops.norm([values], implementation)
            assert statistics[1] == 5
            assert not statistics[0].isfinite()

    def test_skips_absent_tensors_and_gaps(self, implementation: str) -> None:
        flat = torch.full((30,), math.nan)
        flat[4:8] = 2.0
        target = torch.empty(4)
        statistics = torch.empty(2, dtype=torch.float64)
        ops.unflatten(flat, [None, target, None], 1.0, [0, 4, 20], implementation, statistics=statistics)
        assert statistics.tolist() == [16.0, 0.0]
        plan = ops.FlattenPlan([4], [4], 30, torch.float32, "cpu", implementation)
        plan.norm(flat, statistics)
        assert statistics.tolist() == [16.0, 0.0]

    def test_nothing(self, implementation: str) -> None:
        assert ops.norm([], implementation).tolist() == [0, 0]
        assert ops.norm([torch.empty(0)], implementation).tolist() == [0, 0]

    def test_wrong_statistics(self, implementation: str) -> None:
        target = torch.zeros(4)
        for statistics, error in ((torch.empty(2), ConfigurationTypeError), (torch.empty(3, dtype=torch.float64), ConfigurationError)):
            with pytest.raises(error, match="statistics"):
                ops.unflatten(torch.ones(4), [target], implementation=implementation, statistics=statistics)
        assert target.tolist() == [0] * 4


def test_integers_have_no_norm() -> None:
    with pytest.raises(ConfigurationTypeError, match="norm"):
        ops.norm([torch.ones(3, dtype=torch.int32)], "native")
