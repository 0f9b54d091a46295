"""flatten, every implementation and instruction set, bit for bit against kernels/reference.py."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from ddpcomm import _native, native, ops
from ddpcomm.errors import ConfigurationError, ConfigurationTypeError
from ddpcomm.kernels import reference
from tests.kernels.cases import FLOATS, FLOATS_8, SCALES, SIZES, assert_same_bits, values

ISAS = _native.instruction_sets()


def native_flatten(
    tensors: list[Tensor | None], offsets: list[int], out: Tensor, scale: float, isa: str, *, threads: int = 1, dlpack: bool = True
) -> None:
    reader = _native.TensorReader(Tensor, native.DTYPES, dlpack)
    numels = [0 if tensor is None else tensor.numel() for tensor in tensors]
    plan = _native.FlattenPlan(reader, numels, offsets, out.numel(), native.DTYPES[out.dtype], isa)
    plan.flatten(tensors, out, scale, threads)


def aligned_offsets(tensors: list[Tensor | None], alignment: int) -> tuple[list[int], int]:
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += 0 if tensor is None else -(-tensor.numel() // alignment) * alignment
    return offsets, end


def expected_flat(tensors: list[Tensor | None], offsets: list[int], total: int, dtype: torch.dtype, scale: float) -> Tensor:
    out = torch.full((total,), 77.0).to(dtype)
    reference.flatten(tensors, offsets, out, scale)
    return out


@pytest.mark.parametrize(("source", "result"), list(itertools.product(FLOATS, FLOATS)))
def test_dtypes_sizes_scales(source: torch.dtype, result: torch.dtype) -> None:
    for numel, scale in [*itertools.product(SIZES[:-1], SCALES), (SIZES[-1], 1.0), (SIZES[-1], 1 / 3)]:
        tensors: list[Tensor | None] = [values(numel, source)]
        expected = expected_flat(tensors, [0], numel, result, scale)
        for isa in ISAS:
            out = torch.full((numel,), 7.0).to(result)
            native_flatten(tensors, [0], out, scale, isa)
            assert_same_bits(out, expected)


@pytest.mark.parametrize(("source", "result"), list(itertools.product(FLOATS, FLOATS)))
def test_misaligned(source: torch.dtype, result: torch.dtype) -> None:
    for shift_source, shift_result in itertools.product((0, 1, 3), (0, 1, 5)):
        tensors: list[Tensor | None] = [values(1023, source, misaligned=shift_source), None, values(7, source, misaligned=1)]
        offsets, total = [shift_result, 1030 + shift_result, 1030 + shift_result], 1050
        expected = expected_flat(tensors, offsets, total, result, 0.5)
        for isa in ISAS:
            memory = torch.full((total + 3,), 7.0).to(result)
            native_flatten(tensors, offsets, memory[3:], 0.5, isa)
            assert_same_bits(memory[3:], expected)
            assert torch.equal(memory[:3], torch.full((3,), 7.0).to(result)), "wrote before the buffer"


@pytest.mark.parametrize(
    ("source", "result"), list(itertools.product((*FLOATS, *FLOATS_8), FLOATS_8)) + list(itertools.product(FLOATS_8, FLOATS))
)
def test_floats_of_8_bits(source: torch.dtype, result: torch.dtype) -> None:
    for numel, scale in itertools.product(SIZES[:-1], SCALES):
        tensors: list[Tensor | None] = [values(numel, source), values(100, source)]
        expected = expected_flat(tensors, [1, numel + 1], numel + 102, result, scale)
        for isa in ISAS:
            out = torch.full((numel + 102,), 7.0).to(result)
            native_flatten(tensors, [1, numel + 1], out, scale, isa)
            assert_same_bits(out, expected)


@pytest.mark.parametrize(("source", "result"), list(itertools.product(FLOATS, FLOATS)))
def test_accumulate(source: torch.dtype, result: torch.dtype) -> None:
    for numel, scale in itertools.product(SIZES[:-1], SCALES):
        tensors: list[Tensor | None] = [values(numel, source), None, values(100, source, misaligned=1)]
        offsets = [2, numel + 2, numel + 5]
        before = values(numel + 110, result, seed=5)
        expected = before.clone()
        reference.flatten(tensors, offsets, expected, scale, accumulate=True)
        assert torch.equal(expected[:2].isnan(), before[:2].isnan())
        for implementation in ops.implementations("flatten", "cpu"):
            out = before.clone()
            ops.flatten(tensors, out, scale, offsets, implementation, accumulate=True)
            assert_same_bits(out, expected)
        for isa in ISAS:
            out = before.clone()
            plan = native.FlattenPlan([numel, 0, 100], offsets, out.numel(), result, isa)
            plan.flatten(tensors, out, scale, True)
            assert_same_bits(out, expected)


@pytest.mark.parametrize("isa", ISAS)
def test_not_aligned_to_an_element(isa: str) -> None:
    for shift in (1, 2, 3):
        memory = torch.zeros(4096 + 8, dtype=torch.uint8).numpy()
        source = torch.frombuffer(memory, dtype=torch.float32, count=1000, offset=shift)
        source.copy_(values(1000, torch.float32))
        for result in (torch.float32, torch.bfloat16):
            out = torch.empty(1000, dtype=result)
            native_flatten([source], [0], out, 0.5, isa)
            assert_same_bits(out, expected_flat([source.clone()], [0], 1000, result, 0.5))


@pytest.mark.parametrize("isa", ISAS)
def test_not_a_number_stays_one(isa: str) -> None:
    payloads = torch.tensor([0x7FC00000, 0x7F800001, -1, -0x400000, 0x7FFFFFFF], dtype=torch.int64).to(torch.int32).view(torch.float32)
    for source, result, scale in itertools.product(FLOATS, FLOATS, (1.0, 0.5)):
        tensor = payloads.repeat(7).to(source)
        out = torch.zeros(35, dtype=result)
        native_flatten([tensor], [0], out, scale, isa)
        assert out.isnan().all(), (source, result)


@pytest.mark.parametrize("implementation", ops.implementations("flatten", "cpu"))
@pytest.mark.parametrize("count", [1, 2, 400, 5000])
def test_many_tensors_with_gaps_and_absent_entries(count: int, implementation: str) -> None:
    tensors: list[Tensor | None] = []
    for i in range(count):
        dtype = FLOATS[i % 4]
        tensors.append(None if i % 7 == 3 else values(i % 19, dtype, misaligned=i % 3, seed=i))
    for alignment, result in ((1, torch.float32), (16, torch.bfloat16)):
        offsets, total = aligned_offsets(tensors, alignment)
        out = torch.full((total + 5,), float("nan")).to(result)
        ops.flatten(tensors, out, 0.25, offsets, implementation)
        assert_same_bits(out, expected_flat(tensors, offsets, total + 5, result, 0.25))
        plan = ops.FlattenPlan([0 if t is None else t.numel() for t in tensors], offsets, total + 5, result, "cpu", implementation)
        for _ in range(2):
            out.fill_(float("nan"))
            plan.flatten(tensors, out, 0.25)
            assert_same_bits(out, expected_flat(tensors, offsets, total + 5, result, 0.25))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_threads_and_streamed_stores(source: torch.dtype, threads: int, isa: str) -> None:
    sizes = [1, 4_000_003, 17, 2_000_000, 0, 13]
    tensors: list[Tensor | None] = [values(size, source) for size in sizes]
    tensors.insert(3, None)
    offsets, total = aligned_offsets(tensors, 16)
    for shift in (0, 1):
        out = torch.full((total + 3 + shift,), float("nan"))[shift:]
        native_flatten(tensors, offsets, out, 0.5, isa, threads=threads)
        assert_same_bits(out, expected_flat(tensors, offsets, total + 3, torch.float32, 0.5))


def test_tensors_are_read_alike_without_dlpack() -> None:
    assert _native.TensorReader(Tensor, native.DTYPES, True).uses_dlpack, "torch 2.10 and later offer DLPack's C interface"
    tensors: list[Tensor | None] = [
        values(5, torch.float32),
        None,
        torch.arange(24.0).view(1, 2, 3, 4).permute(0, 3, 1, 2),
        torch.tensor(3.0),
    ]
    offsets, total = aligned_offsets(tensors, 4)
    out = torch.empty(total)
    native_flatten(tensors, offsets, out, 0.5, ISAS[0], dlpack=False)
    assert_same_bits(out, expected_flat(tensors, offsets, total, torch.float32, 0.5))
    by_dlpack, by_attributes = (_native.TensorReader(Tensor, native.DTYPES, dlpack) for dlpack in (True, False))
    for dtype in native.DTYPES:
        tensor = torch.zeros(6, 4, dtype=torch.uint8).view(torch.uint8).repeat(1, 16).view(dtype)
        for view in (tensor, tensor.t(), tensor[:, 1:], tensor[1:], tensor[2:3, 1:]):
            assert by_dlpack.read(view) == by_attributes.read(view)


@pytest.mark.parametrize("implementation", ops.implementations("flatten", "cpu"))
class TestEveryImplementation:
    def test_packed_without_offsets(self, implementation: str) -> None:
        out = torch.empty(6)
        ops.flatten([torch.ones(2), torch.zeros(0), torch.full((2, 2), 3.0)], out, 2.0, implementation=implementation)
        assert out.tolist() == [2, 2, 6, 6, 6, 6]

    def test_what_is_not_covered_becomes_zero(self, implementation: str) -> None:
        out = torch.full((6,), 9.0)
        ops.flatten([torch.ones(1), None, torch.ones(1)], out, offsets=[1, 2, 4], implementation=implementation)
        assert out.tolist() == [0, 1, 0, 0, 1, 0]
        ops.flatten([], out, implementation=implementation)
        assert out.tolist() == [0] * 6

    @pytest.mark.parametrize("dtype", [d for d in native.DTYPES if d not in FLOATS])
    def test_same_dtype_copies_bits(self, implementation: str, dtype: torch.dtype) -> None:
        source = torch.arange(64, dtype=torch.uint8).view(dtype) if dtype != torch.bool else torch.arange(64) % 3 == 0
        out = torch.zeros_like(source)
        ops.flatten([source[:1], source[1:]], out, implementation=implementation)
        assert torch.equal(out.view(torch.uint8), source.view(torch.uint8))

    @pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
    def test_complex(self, implementation: str, dtype: torch.dtype) -> None:
        source = torch.randn(37, dtype=dtype)
        out = torch.zeros(40, dtype=dtype)
        ops.flatten([source[:5].conj(), source[5:]], out, 0.5, [0, 8], implementation=implementation)
        assert torch.equal(out[:5], source[:5].conj() * 0.5)
        assert torch.equal(out[5:8], torch.zeros(3, dtype=dtype))
        assert torch.equal(out[8:], source[5:] * 0.5)

    def test_memory_order_of_dense_tensors(self, implementation: str) -> None:
        image = torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
        out = torch.empty(120)
        ops.flatten([image], out, implementation=implementation)
        assert torch.equal(out, image.permute(0, 2, 3, 1).reshape(-1))

    def test_other_tensors_in_index_order(self, implementation: str) -> None:
        sliced, expanded = torch.arange(12.0).view(3, 4)[:, ::2], torch.tensor([5.0]).expand(3)
        out = torch.empty(9)
        ops.flatten([sliced, expanded], out, implementation=implementation)
        assert out.tolist() == [0, 2, 4, 6, 8, 10, 5, 5, 5]

    def test_negative_view(self, implementation: str) -> None:
        negative = torch.randn(4, dtype=torch.complex64).conj().imag
        assert negative.is_neg()
        out = torch.empty(4)
        ops.flatten([negative], out, implementation=implementation)
        assert torch.equal(out, negative.clone())

    def test_parameters_are_taken_without_gradients(self, implementation: str) -> None:
        parameter = torch.nn.Parameter(torch.ones(3))
        out = torch.empty(3)
        ops.flatten([parameter], out, implementation=implementation)
        assert not out.requires_grad
        assert out.tolist() == [1, 1, 1]

    def test_in_place(self, implementation: str) -> None:
        out = torch.arange(1000.0)
        ops.flatten([out[:500], out[500:]], out, 0.5, implementation=implementation)
        assert torch.equal(out, torch.arange(1000.0) * 0.5)

    @pytest.mark.parametrize(
        ("tensors", "offsets", "message"),
        [
            ([torch.ones(3), torch.ones(3)], [0, 2], "before element 3"),
            ([torch.ones(3), torch.ones(3)], [3, 0], "before element 6"),
            ([torch.ones(3), torch.ones(6)], None, "outside the buffer"),
            ([torch.ones(3)], [-1], "negative"),
            ([torch.ones(3)], [1 << 62], "outside the buffer"),
            ([torch.ones(3)], [0, 3], "1 tensors but 2 offsets"),
            ([torch.ones(3, device="meta")], None, "is on meta"),
        ],
    )
    def test_wrong_places(self, implementation: str, tensors: list[Tensor], offsets: list[int] | None, message: str) -> None:
        out = torch.full((8,), 5.0)
        with pytest.raises(ConfigurationError, match=message):
            ops.flatten(tensors, out, 1.0, offsets, implementation)
        assert out.tolist() == [5] * 8, "nothing may be written"

    @pytest.mark.parametrize(
        ("tensor", "scale"),
        [
            (torch.ones(3, dtype=torch.int32), 1.0),
            (torch.ones(3, dtype=torch.complex64), 1.0),
            (torch.ones(3).to_sparse(), 1.0),
            (None, 1.0),
            ([1.0], 1.0),
        ],
    )
    def test_wrong_types(self, implementation: str, tensor: Tensor | None, scale: float) -> None:
        out = torch.full((6,), 5.0)
        with pytest.raises(ConfigurationTypeError):
            ops.flatten([torch.ones(1), tensor], out, scale, None, implementation)
        assert out.tolist() == [5] * 6, "nothing may be written"

    def test_integers_are_not_scaled(self, implementation: str) -> None:
        with pytest.raises(ConfigurationTypeError, match="scaled"):
            ops.flatten([torch.ones(3, dtype=torch.int64)], torch.empty(3, dtype=torch.int64), 0.5, implementation=implementation)

    def test_wrong_overlap(self, implementation: str) -> None:
        out = torch.zeros(8)
        with pytest.raises(ConfigurationError, match="overlaps"):
            ops.flatten([out[1:4]], out, implementation=implementation)

    def test_wrong_buffer(self, implementation: str) -> None:
        for out in (torch.empty(2, 3), torch.empty(8)[::2]):
            with pytest.raises(ConfigurationError, match="one-dimensional and contiguous"):
                ops.flatten([torch.ones(1)], out, implementation=implementation)

    def test_plan_checks_each_call(self, implementation: str) -> None:
        plan = ops.FlattenPlan([3, 4], [0, 4], 8, torch.float32, "cpu", implementation)
        good = [torch.ones(3), torch.ones(4)]
        for tensors, out in (
            ([torch.ones(3)], torch.empty(8)),
            ([torch.ones(3), torch.ones(5)], torch.empty(8)),
            (good, torch.empty(9)),
        ):
            with pytest.raises(ConfigurationError):
                plan.flatten(tensors, out)
        with pytest.raises(ConfigurationTypeError):
            plan.flatten(good, torch.empty(8, dtype=torch.float64))


def test_choice_of_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ops.implementations("flatten", "cpu")[0] == "native"
    assert ops.implementations("flatten", torch.device("meta")) == ("torch",)
    monkeypatch.setenv("DDPCOMM_IMPLEMENTATION", "torch")
    assert ops.FlattenPlan([], [], 0, torch.float32, "cpu").implementation == "torch"
    assert ops.FlattenPlan([], [], 0, torch.float32, "cpu", "native").implementation == "native"
    monkeypatch.setenv("DDPCOMM_IMPLEMENTATION", "abacus")
    with pytest.raises(ConfigurationError, match=r"DDPCOMM_IMPLEMENTATION is 'abacus'"):
        ops.flatten([torch.ones(1)], torch.empty(1))
    with pytest.raises(ConfigurationError, match="op must be one of"):
        ops.implementations("fold", "cpu")
