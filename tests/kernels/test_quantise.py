"""quantise and dequantise, every implementation and instruction set, bit for bit against kernels/reference.py."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from ddpcomm import _native, native, ops
from ddpcomm.errors import ConfigurationError, ConfigurationTypeError
from ddpcomm.kernels import plain, reference
from tests.kernels.cases import FLOATS, assert_same_bits

ISAS = _native.instruction_sets()
CODES = tuple(reference.CODES)


def gradients(seed: int = 0) -> tuple[list[Tensor | None], list[int], int]:
    generator = torch.Generator().manual_seed(seed)
    tensors: list[Tensor | None] = []
    for i, numel in enumerate((0, 1, 3, 255, 256, 257, 1023, 5000)):
        size = 10.0 ** (4 * i - 16)
        tensors.append((torch.randn(numel, generator=generator) * size).to(FLOATS[i % 3]))
    tensors.insert(3, None)
    tensors.append(torch.zeros(300))
    tensors.append(torch.full((300,), 1e-42))
    offsets, end = [], 256
    for tensor in tensors:
        offsets.append(end)
        end += -(-(300 if tensor is None else tensor.numel()) // 256) * 256
    return tensors, offsets, end + 512


class State:
    """The buffers of one implementation."""

    def __init__(self, total: int) -> None:
        self.codes = torch.full((total,), 99, dtype=torch.uint8)
        self.scales = torch.full((total // 256,), 9.0)
        self.residual = torch.zeros(total)

    def assert_same(self, other: State) -> None:
        assert_same_bits(self.codes, other.codes)
        assert_same_bits(self.scales, other.scales)
        assert_same_bits(self.residual, other.residual)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("code", CODES)
def test_bits_with_error_feedback(code: str, isa: str) -> None:
    tensors, offsets, total = gradients()
    numels = [0 if tensor is None else tensor.numel() for tensor in tensors]
    kernel = native.QuantisePlan(numels, offsets, total, code, isa)
    oracle = plain.QuantisePlan(numels, offsets, total, code)
    actual, expected = State(total), State(total)
    for step in range(4):
        tensors, _, _ = gradients(step)
        for plan, state in ((kernel, actual), (oracle, expected)):
            plan.quantise(tensors, state.codes, state.scales, 0.25, state.residual)
        actual.assert_same(expected)
    for accumulate in (False, True):
        ours, theirs = ([None if t is None else torch.ones_like(t) for t in tensors] for _ in range(2))
        kernel.dequantise(actual.codes, actual.scales, ours, 3.0, accumulate)
        oracle.dequantise(expected.codes, expected.scales, theirs, 3.0, accumulate)
        for one, other in zip(ours, theirs, strict=True):
            if one is not None and other is not None:
                assert_same_bits(one, other)


@pytest.mark.parametrize("code", CODES)
def test_every_code_decodes_as_torch_does(code: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(reference.CODES[code][0]).to(torch.float32)
    for isa in ISAS:
        values = torch.empty(256)
        native.QuantisePlan([256], [0], 256, code, isa).dequantise(codes, torch.ones(1), [values], 1.0, False)
        assert_same_bits(values, expected)


@pytest.mark.parametrize("implementation", ops.implementations("quantise", "cpu"))
class TestEveryImplementation:
    @pytest.mark.parametrize(("code", "relative_error"), [("int8", 0.5 / 127), ("float8_e4m3", 2.0**-4), ("float8_e5m2", 2.0**-3)])
    def test_error_is_bounded_by_the_block(self, code: str, relative_error: float, implementation: str) -> None:
        values = torch.randn(10 * 256) * torch.logspace(-10, 10, 10).repeat_interleave(256)
        codes, scales, restored = torch.empty(2560, dtype=torch.uint8), torch.empty(10), torch.empty(2560)
        ops.quantise([values], codes, scales, code=code, implementation=implementation)
        ops.dequantise(codes, scales, [restored], code=code, implementation=implementation)
        largest = values.view(10, 256).abs().amax(dim=1, keepdim=True)
        assert ((values - restored).view(10, 256).abs() <= largest * relative_error * 1.001).all()

    def test_residual_is_what_was_lost(self, implementation: str) -> None:
        values = torch.randn(512)
        residual, restored = torch.zeros(512), torch.empty(512)
        codes, scales = torch.empty(512, dtype=torch.uint8), torch.empty(2)
        ops.quantise([values], codes, scales, 1.0, residual, implementation=implementation)
        ops.dequantise(codes, scales, [restored], implementation=implementation)
        assert torch.equal(values - restored, residual)
        total = torch.zeros(512, dtype=torch.float64)
        residual.zero_()
        for _ in range(50):  # what is sent over many steps adds up to what was to be sent
            ops.quantise([values], codes, scales, 1.0, residual, implementation=implementation)
            ops.dequantise(codes, scales, [restored], implementation=implementation)
            total += restored
        torch.testing.assert_close(total + residual, values.double() * 50, rtol=1e-5, atol=1e-4)

    def test_not_finite_is_seen_by_the_receiver_and_not_kept(self, implementation: str) -> None:
        for bad, code in itertools.product((math.inf, -math.inf, math.nan), CODES):
            values = torch.ones(512)
            values[300] = bad
            residual, restored = torch.zeros(512), torch.empty(512)
            codes, scales = torch.empty(512, dtype=torch.uint8), torch.empty(2)
            ops.quantise([values], codes, scales, 1.0, residual, code=code, implementation=implementation)
            ops.dequantise(codes, scales, [restored], code=code, implementation=implementation)
            assert restored[:256].isfinite().all()
            assert restored[256:].isnan().all()
            assert residual.isfinite().all()

    def test_wrong_arguments(self, implementation: str) -> None:
        codes, scales, values = torch.zeros(512, dtype=torch.uint8), torch.zeros(2), torch.ones(512)
        for arguments, error in (
            ({"codes": torch.zeros(500, dtype=torch.uint8)}, ConfigurationError),
            ({"codes": torch.zeros(512)}, ConfigurationTypeError),
            ({"scales": torch.zeros(3)}, ConfigurationError),
            ({"residual": torch.zeros(511)}, ConfigurationError),
            ({"residual": torch.zeros(512, dtype=torch.float64)}, ConfigurationTypeError),
            ({"offsets": [128]}, ConfigurationError),
            ({"tensors": [torch.ones(3, dtype=torch.int32)]}, ConfigurationTypeError),
            ({"code": "int7"}, ConfigurationError),
        ):
            with pytest.raises(error):
                ops.quantise(**{"tensors": [values], "codes": codes, "scales": scales, "implementation": implementation, **arguments})
            assert not codes.any(), "nothing may be written"


@pytest.mark.parametrize("isa", ISAS)
def test_threads(isa: str) -> None:
    values = torch.randn(4_000_000)
    total = 4_000_000 // 256 * 256 + 256
    states = []
    for threads in (1, 3):
        state = State(total)
        plan = _native.QuantisePlan(native.reader, [values.numel()], [0], total, "int8", isa)
        plan.quantise([values], state.codes, state.scales, state.residual, 1.0, threads)
        states.append(state)
    states[0].assert_same(states[1])
