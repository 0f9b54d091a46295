"""unflatten, every implementation and instruction set, bit for bit against kernels/reference.py."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from ddpcomm import _native, native, ops
from ddpcomm.errors import ConfigurationError, ConfigurationTypeError
from ddpcomm.kernels import reference
from tests.kernels.cases import FLOATS, SCALES, SIZES, assert_same_bits, values

ISAS = _native.instruction_sets()


def native_unflatten(flat: Tensor, offsets: list[int], tensors: list[Tensor | None], scale: float, isa: str, threads: int = 1) -> None:
    reader = _native.TensorReader(Tensor, native.DTYPES)
    numels = [0 if tensor is None else tensor.numel() for tensor in tensors]
    plan = _native.FlattenPlan(reader, numels, offsets, flat.numel(), native.DTYPES[flat.dtype], isa)
    plan.unflatten(flat, tensors, scale, threads)


@pytest.mark.parametrize(("source", "result"), list(itertools.product(FLOATS, FLOATS)))
def test_dtypes_sizes_scales(source: torch.dtype, result: torch.dtype) -> None:
    for numel, scale in [*itertools.product(SIZES[:-1], SCALES), (SIZES[-1], 1 / 3)]:
        flat = values(numel, source)
        expected = torch.empty(numel, dtype=result)
        reference.unflatten(flat, [0], [expected], scale)
        for isa in ISAS:
            tensor = torch.full((numel,), 7.0).to(result)
            native_unflatten(flat, [0], [tensor], scale, isa)
            assert_same_bits(tensor, expected)


@pytest.mark.parametrize(("source", "result"), list(itertools.product(FLOATS, FLOATS)))
def test_misaligned(source: torch.dtype, result: torch.dtype) -> None:
    flat = values(1100, source, misaligned=1)
    for shift_source, shift_result in itertools.product((0, 1, 3), (0, 1, 5)):
        expected = torch.empty(1023, dtype=result)
        reference.unflatten(flat, [shift_source], [expected], 0.5)
        for isa in ISAS:
            memory = torch.full((1023 + 10,), 7.0).to(result)
            native_unflatten(flat, [shift_source], [memory[shift_result : shift_result + 1023]], 0.5, isa)
            assert_same_bits(memory[shift_result : shift_result + 1023], expected)
            memory[shift_result : shift_result + 1023] = 7.0
            assert torch.equal(memory, torch.full((1033,), 7.0).to(result)), "wrote outside the tensor"


@pytest.mark.parametrize("implementation", ops.implementations("unflatten", "cpu"))
@pytest.mark.parametrize("count", [1, 2, 400, 5000])
def test_many_tensors(count: int, implementation: str) -> None:
    numels = [i % 19 for i in range(count)]
    offsets = [20 * i + i % 3 for i in range(count)]
    flat = values(20 * count + 5, torch.bfloat16)
    tensors = [None if i % 7 == 3 else torch.full((numel,), 7.0, dtype=FLOATS[i % 4]) for i, numel in enumerate(numels)]
    expected = [None if tensor is None else torch.empty_like(tensor) for tensor in tensors]
    reference.unflatten(flat, offsets, expected, 0.25)
    ops.unflatten(flat, tensors, 0.25, offsets, implementation)
    plan = ops.FlattenPlan(numels, offsets, flat.numel(), flat.dtype, "cpu", implementation)
    planned = [None if tensor is None else torch.empty_like(tensor) for tensor in tensors]
    plan.unflatten(flat, planned, 0.25)
    for actual, again, wanted in zip(tensors, planned, expected, strict=True):
        if wanted is not None:
            assert_same_bits(actual, wanted)
            assert_same_bits(again, wanted)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("result", [torch.float32, torch.bfloat16])
def test_threads_and_streamed_stores(result: torch.dtype, threads: int, isa: str) -> None:
    numels = [1, 4_000_003, 17, 2_000_000, 0, 13]
    offsets = [3, 4, 4_000_100, 4_000_117, 6_000_200, 6_000_201]
    flat = values(6_000_300, torch.float32)
    tensors, expected = ([torch.empty(numel, dtype=result) for numel in numels] for _ in range(2))
    native_unflatten(flat, offsets, tensors, 0.5, isa, threads)
    reference.unflatten(flat, offsets, expected, 0.5)
    for actual, wanted in zip(tensors, expected, strict=True):
        assert_same_bits(actual, wanted)


@pytest.mark.parametrize("implementation", ops.implementations("unflatten", "cpu"))
class TestEveryImplementation:
    def test_restores_what_flatten_took(self, implementation: str) -> None:
        image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
        tensors = [torch.randn(7), image, torch.randn(5, 3).t(), torch.randn(8, 6)[:, ::2], torch.tensor(2.0), torch.randn(0)]
        flat = torch.empty(sum(tensor.numel() for tensor in tensors))
        ops.flatten(tensors, flat, implementation=implementation)
        restored = [torch.empty_like(tensor) for tensor in tensors]
        restored[3] = torch.zeros(8, 6)[:, 1::2]
        ops.unflatten(flat, restored, implementation=implementation)
        for actual, wanted in zip(restored, tensors, strict=True):
            assert torch.equal(actual, wanted)

    def test_complex(self, implementation: str) -> None:
        flat = torch.randn(9, dtype=torch.complex64)
        tensors = [torch.empty(4, dtype=torch.complex64), torch.empty(5, dtype=torch.complex64)]
        ops.unflatten(flat, tensors, 0.5, implementation=implementation)
        assert torch.equal(torch.cat(tensors), flat * 0.5)

    def test_conjugate_and_negative_views_are_written_through(self, implementation: str) -> None:
        flat = torch.tensor([1 + 2j, 3 - 4j])
        memory = torch.zeros(2, dtype=torch.complex64)
        ops.unflatten(flat, [memory.conj()], implementation=implementation)
        assert torch.equal(memory.conj().resolve_conj(), flat)
        ops.unflatten(flat.real.contiguous(), [memory.conj().imag], implementation=implementation)
        assert torch.equal(memory.imag, -flat.real)

    def test_parameters_can_be_written(self, implementation: str) -> None:
        parameter = torch.nn.Parameter(torch.zeros(2, 4)[:, ::2])
        ops.unflatten(torch.ones(4), [parameter], implementation=implementation)
        assert torch.equal(parameter, torch.ones(2, 2))

    def test_wrong_arguments(self, implementation: str) -> None:
        flat = torch.ones(8)
        target = torch.zeros(4)
        for tensors, offsets, error in (
            ([target, torch.zeros(5)], None, ConfigurationError),
            ([target], [5], ConfigurationError),
            ([target, torch.zeros(2)], [0, 3], ConfigurationError),
            ([target, torch.zeros(1).expand(3)], None, ConfigurationError),
            ([target, torch.zeros(3, dtype=torch.int32)], None, ConfigurationTypeError),
            ([target, None], None, ConfigurationTypeError),
            ([target, flat[1:3]], None, ConfigurationError),
        ):
            with pytest.raises(error):
                ops.unflatten(flat, tensors, 1.0, offsets, implementation)
            assert target.tolist() == [0] * 4, "nothing may be written"
        assert flat.tolist() == [1] * 8
