"""Status words survive sums and averages in every dtype that a bucket can have, over many ranks."""

from __future__ import annotations

import itertools

import pytest
import torch

from ddpcomm.status import STATUS_NUMEL, TAGS, Notice, decode, encode

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WORLD_SIZES = [1, 2, 3, 7, 64, 1000]


def reduced(words: list[list[float]], world_size: int, dtype: torch.dtype, divisor: float) -> list[float]:
    """What an all-reduce leaves of these ranks' words; the other ranks say nothing. Each is scaled as it is flattened."""
    silent = [encode(set(), 0, 0)] * (world_size - len(words))
    total = torch.zeros(STATUS_NUMEL, dtype=dtype)
    for each in words + silent:
        total += torch.tensor(each, dtype=torch.float64).div(divisor).to(dtype)
    return total.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_notice(world_size: int, dtype: torch.dtype) -> None:
    for count in range(len(Notice) + 1):
        for said in itertools.combinations(Notice, count):
            status = decode(reduced([list(encode(set(said), 0, 0))], world_size, dtype, world_size), world_size)
            assert status.notices == set(said)
            assert not status.mixed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("divisor", [1, 2, 3, 1000])
def test_which_rank_was_interrupted(divisor: int, dtype: torch.dtype) -> None:
    """Told where it was one alone."""
    for rank in (0, 1, 31, 32, 999, 32767):
        words = [list(encode({Notice.INTERRUPTED}, rank, 0))]
        assert decode(reduced(words, 2, dtype, divisor), divisor).interrupted_rank == rank
        words.append(list(encode({Notice.INTERRUPTED}, 5, 0)))
        status = decode(reduced(words, 2, dtype, divisor), divisor)
        assert Notice.INTERRUPTED in status
        assert status.interrupted_rank is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_models_that_were_mixed_up(dtype: torch.dtype) -> None:
    for first, second in itertools.product(range(TAGS), repeat=2):
        words = [list(encode(set(), 0, first)), list(encode(set(), 1, second))]
        assert decode(reduced(words, 2, dtype, 2), 2).mixed == (first != second)


def test_silence() -> None:
    status = decode(reduced([], 4, torch.float16, 4), 4)
    assert not status.notices
    assert status.interrupted_rank is None
    assert not status.mixed
