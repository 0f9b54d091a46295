"""What every implementation must do, bit for bit as kernels/reference.py: called by the tests of each, on the device at hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ddpcomm.kernels import plain, reference
from ddpcomm.kernels.addresses import group
from tests.kernels.cases import FLOATS, FLOATS_8, assert_same_bits, values

FlattenFactory = Callable[..., Any]
DTYPES = (*FLOATS, *FLOATS_8)


def _mixed(source: torch.dtype, device: str) -> tuple[list[Tensor | None], list[int], int]:
    """Whole tiles, rests, nothing, absent, misaligned, and of another dtype; with gaps before, between and after."""
    tensors: list[Tensor | None] = [
        _placed(values(5, source), device),
        None,
        _placed(values(8192, source), device),
        _placed(values(9000, source), device, misaligned=1),
        _placed(values(0, source), device),
        _placed(values(17, torch.float32), device, misaligned=3),
        None,
        _placed(values(4100, source), device),
    ]
    return tensors, [16, 32, 64, 8256, 17_300, 17_301, 17_400, 17_408], 21_600


def _placed(tensor: Tensor, device: str, misaligned: int = 0) -> Tensor:
    """The tensor on the device, `misaligned` elements after an aligned address."""
    memory = torch.zeros(tensor.numel() + misaligned, dtype=tensor.dtype, device=device)
    memory[misaligned:] = tensor.to(device)
    return memory[misaligned:]


def _numels(tensors: list[Tensor | None]) -> list[int]:
    return [0 if tensor is None else tensor.numel() for tensor in tensors]


def check_flatten(plan: FlattenFactory, source: torch.dtype, result: torch.dtype, device: str) -> None:
    tensors, offsets, total = _mixed(source, device)
    flatten = plan(_numels(tensors), offsets, total, result, torch.device(device))
    for scale, accumulate in itertools.product((1.0, 1 / 3), (False, True)):
        if accumulate and (source in FLOATS_8 or result in FLOATS_8):
            continue
        before = values(total, result, seed=3).to(device)
        out, expected = before.clone(), before.clone()
        flatten.flatten(group(tensors, result), out, scale, accumulate)
        reference.flatten(tensors, offsets, expected, scale, accumulate)
        assert_same_bits(out.cpu(), expected.cpu())


def check_unflatten(plan: FlattenFactory, source: torch.dtype, result: torch.dtype, device: str) -> None:
    tensors, offsets, total = _mixed(result, device)
    flat = values(total, source, seed=4).to(device)
    unflatten = plan(_numels(tensors), offsets, total, source, torch.device(device))
    for scale, with_norm in itertools.product((1.0, 1 / 3), (False, True)):
        if with_norm and result in FLOATS_8:
            continue
        ours, theirs = ([None if t is None else torch.full_like(t, 7) for t in tensors] for _ in range(2))
        statistics = torch.full((2,), 9.0, dtype=torch.float64, device=device) if with_norm else None
        unflatten.unflatten(flat, group(ours, source), scale, statistics)
        reference.unflatten(flat, offsets, theirs, scale)
        for one, other in zip(ours, theirs, strict=True):
            if one is not None and other is not None:
                assert_same_bits(one.cpu(), other.cpu())
        if statistics is not None:
            check_statistics(statistics, reference.norm(theirs))


def check_norm(plan: FlattenFactory, dtype: torch.dtype, device: str) -> None:
    numels, offsets, total = [5, 0, 9000, 64], [3, 8, 16, 9100], 9300
    flat = torch.randn(total, generator=torch.Generator().manual_seed(1)).to(dtype)
    inside = torch.cat([flat[o : o + n] for o, n in zip(offsets, numels, strict=True)])
    norm = plan(numels, offsets, total, dtype, torch.device(device))
    statistics = torch.full((2,), 9.0, dtype=torch.float64, device=device)
    norm.norm(flat.to(device), statistics)
    check_statistics(statistics, reference.norm([inside]))
    again = torch.empty_like(statistics)
    norm.norm(flat.to(device), again)
    assert torch.equal(statistics, again), "two runs give the same bits"
    flat[[3, 4000, 9101]] = torch.tensor([float("inf"), float("nan"), float("-inf")]).to(dtype)
    norm.norm(flat.to(device), statistics)
    assert statistics[1] == 3
    assert not statistics[0].isfinite()


def check_statistics(actual: Tensor, expected: Tensor) -> None:
    assert actual[1] == expected[1]
    if expected[1] == 0 and expected[0] < 1e30:  # above, squares in float32 overflow
        torch.testing.assert_close(actual[0].cpu(), expected[0].cpu(), rtol=3e-6, atol=0)


def check_many_tensors(plan: FlattenFactory, device: str, count: int) -> None:
    tensors: list[Tensor | None] = [None if i % 7 == 3 else values(i % 19, torch.float32, seed=i).to(device) for i in range(count)]
    offsets = [20 * i for i in range(count)]
    out, expected = (torch.full((20 * count,), float("nan"), device=device) for _ in range(2))
    both = plan(_numels(tensors), offsets, 20 * count, torch.float32, torch.device(device))
    both.flatten(group(tensors, out.dtype), out, 0.5, False)
    reference.flatten(tensors, offsets, expected, 0.5)
    assert_same_bits(out.cpu(), expected.cpu())
    restored = [None if tensor is None else torch.empty_like(tensor) for tensor in tensors]
    both.unflatten(out, group(restored, out.dtype), 2.0, None)
    for tensor, again in zip(tensors, restored, strict=True):
        if tensor is not None and again is not None:
            torch.testing.assert_close(again, tensor, equal_nan=True)


def check_quantise(plan: Callable[..., Any], code: str, source: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors: list[Tensor | None] = [
        (torch.randn(n, generator=generator) * size).to(source).to(device)
        for n, size in ((0, 1), (1, 1e-3), (255, 1e3), (256, 1.0), (5000, 1e-4), (300, 0.0), (8192, 10.0))
    ]
    tensors.insert(2, None)
    tensors.append(torch.full((300,), 1e-42, device=device))
    tensors.append(torch.full((300,), float("inf"), device=device))
    offsets, total = [], 256
    for tensor in tensors:
        offsets.append(total)
        total += -(-(300 if tensor is None else tensor.numel()) // 256) * 256
    numels, total = _numels(tensors), total + 512
    kernel = plan(numels, offsets, total, code, torch.device(device))
    oracle = plain.QuantisePlan(numels, offsets, total, code)
    ours, theirs = (
        (
            torch.full((total,), 99, dtype=torch.uint8, device=device),
            torch.full((total // 256,), 9.0, device=device),
            torch.zeros(total, device=device),
        )
        for _ in range(2)
    )
    for feedback in (True, True, False):
        kernel.quantise(group(tensors, torch.float32), ours[0], ours[1], 0.25, ours[2] if feedback else None)
        oracle.quantise(tensors, theirs[0], theirs[1], 0.25, theirs[2] if feedback else None)
        for one, other in zip(ours, theirs, strict=True):
            assert_same_bits(one.cpu(), other.cpu())
    for accumulate in (False, True):
        results = [[None if t is None else torch.ones_like(t) for t in tensors] for _ in range(2)]
        kernel.dequantise(ours[0], ours[1], group(results[0], torch.float32), 3.0, accumulate)
        oracle.dequantise(theirs[0], theirs[1], results[1], 3.0, accumulate)
        for one, other in zip(*results, strict=True):
            if one is not None and other is not None:
                assert_same_bits(one.cpu(), other.cpu())
