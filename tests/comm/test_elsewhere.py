"""`all_reduce_from`: elements that a rank alone reads may lie elsewhere than in its tensor."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ddpcomm.comm.base import Communicator, Elsewhere, ReduceOp
from ddpcomm.comm.factory import create_communicator
from ddpcomm.errors import CollectiveMismatchError, ConfigurationError
from tests.ranks import RankContext, RankPool

pytestmark = pytest.mark.timeout(120)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32]
SIZES = [17, 1000, 40_003]


def make(context: RankContext, **options: Any) -> Communicator:
    return create_communicator(context.process_group, "cpu", "shared_memory", **{"small_bytes": 64, **options})


def numbers(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).mul_(10).to(dtype)


def parts_of(share: range, cuts: int) -> list[range]:
    """Every other of so many parts of a range, of different lengths, of one element at least."""
    bounds = sorted({share.start + len(share) * i * i // (cuts * cuts) for i in range(cuts + 1)})
    return [range(a, b) for a, b in pairwise(bounds)][::2]


def compare(context: RankContext) -> list[str]:
    """What differs from an all-reduce of whole tensors."""
    wrong, tried = [], 0
    with make(context) as communicator:
        for dtype in DTYPES:
            for op in ("sum", "avg", "max") if dtype.is_floating_point else ("sum", "max"):
                for numel in SIZES:
                    tried += compare_one(communicator, dtype, op, numel, wrong)  # type: ignore[arg-type]
    assert tried > 50
    return wrong


def compare_one(communicator: Communicator, dtype: torch.dtype, op: ReduceOp, numel: int, wrong: list[str]) -> int:
    mine = numbers(communicator.rank, numel, dtype)
    whole = communicator.empty(numel, dtype).copy_(mine)
    communicator.all_reduce(whole, op).wait()
    share = communicator.own_share(numel, dtype)
    tried = 0
    for cuts in (1, 2, 7):
        tensor, keep, elsewhere = communicator.empty(numel, dtype).copy_(mine), [], []
        for part in parts_of(share, cuts):
            other = torch.empty(len(part) + 1, dtype=dtype)[1:].copy_(mine[part.start : part.stop])  # not aligned
            tensor[part.start : part.stop] = 77
            keep.append(other)
            elsewhere.append(Elsewhere(part.start, len(part), other.data_ptr()))
        tried += len(elsewhere)
        communicator.all_reduce_from(tensor, op, elsewhere, keep).wait()
        if not torch.equal(tensor.view(torch.uint8), whole.view(torch.uint8)):
            wrong.append(f"{dtype} {op} {numel} in {cuts}")
        if any(not torch.equal(other, mine[part.start : part.stop]) for part, other in zip(parts_of(share, cuts), keep, strict=True)):
            wrong.append(f"{dtype} {op} {numel} in {cuts}: written to what was elsewhere")
    return tried


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_result_is_that_of_whole_tensors(ranks: Any, world_size: int) -> None:
    assert ranks(world_size).run(compare) == [[]] * world_size


def shares(context: RankContext) -> list[range]:
    with make(context) as communicator:
        return [communicator.own_share(numel, torch.float32) for numel in (16, 17, 40_003)] + [
            communicator.own_share(1000, torch.complex64)
        ]


def test_shares_are_all_elements_once(ranks: Any) -> None:
    for of_all in zip(*ranks(3).run(shares), strict=True):
        ends = [share.stop for share in of_all]
        assert [share.start for share in of_all] == [0, *ends[:-1]]
        assert ends[-1] in (0, 17, 40_003)  # none where the tensor is small, or of complex numbers


def refuse(context: RankContext) -> None:
    """Whatever is refused was not sent: the ranks still agree."""
    numel, other = 1000, torch.ones(1000)
    with make(context) as communicator, create_communicator(context.process_group, "cpu", "process_group") as plain:
        tensor = communicator.empty(numel, torch.float32).fill_(1)
        share = communicator.own_share(numel, torch.float32)
        outside = [
            [Elsewhere(share.start, len(share) + 1, other.data_ptr())],
            [Elsewhere(share.start - 1, 2, other.data_ptr())] if share.start else [Elsewhere(share.stop, 1, other.data_ptr())],
            [Elsewhere(share.start + 4, 4, other.data_ptr()), Elsewhere(share.start, 4, other.data_ptr())],
            [Elsewhere(share.start, 4, other.data_ptr()), Elsewhere(share.start + 3, 4, other.data_ptr())],
        ]
        for elsewhere in outside:
            with pytest.raises(ConfigurationError, match="outside of this rank's own share, or out of order"):
                communicator.all_reduce_from(tensor, "sum", elsewhere, [other])
        inside = [Elsewhere(share.start, len(share), other.data_ptr())]
        with pytest.raises(ConfigurationError, match="in this rank's own shared memory"):
            communicator.all_reduce_from(torch.ones(numel), "sum", inside, [other])
        with pytest.raises(ConfigurationError, match="process_group reads nothing elsewhere"):
            plain.all_reduce_from(torch.ones(numel), "sum", inside, [other])
        assert plain.own_share(numel, torch.float32) == range(0)
        communicator.all_reduce(tensor).wait()
        assert torch.equal(tensor, torch.full((numel,), 2.0))


def test_what_is_refused(two_ranks: RankPool) -> None:
    two_ranks.run(refuse)


def mix(context: RankContext) -> str:
    """Rank 1's tensor is staged: rank 0 would have to read all of it, and rank 1 all of rank 0's."""
    with make(context) as communicator:
        tensor, share = communicator.empty(1000, torch.float32).fill_(1), communicator.own_share(1000, torch.float32)
        other = torch.ones(1000)
        elsewhere = [Elsewhere(share.start, len(share), other.data_ptr())]
        work = communicator.all_reduce_from(tensor, "sum", elsewhere, [other]) if context.rank == 0 else communicator.all_reduce(other)
        with pytest.raises(CollectiveMismatchError) as caught:
            work.wait()
        return str(caught.value)


def test_a_tensor_outside_of_shared_memory_meets_one_with_elements_elsewhere(two_ranks: RankPool) -> None:
    for text in two_ranks.run(mix):
        assert "in its shared memory only in part, while another's is outside of its own" in text


def ask_behind_a_staged_call(context: RankContext) -> tuple[bool, bool]:
    """Whether the others have called, on rank 0: while a call before that is still in the middle of its pieces, and when it is over."""
    with make(context, piece_bytes=4096) as communicator, create_communicator(context.process_group, "cpu", "process_group") as turns:
        staged = communicator.all_reduce(torch.ones(50_000)) if context.rank == 1 else None
        own = communicator.all_reduce(communicator.empty(1000, torch.float32).fill_(1)) if context.rank == 1 else None
        turns.barrier().wait()  # rank 1 has called both, and does nothing more
        answers = []
        if context.rank == 0:
            staged = communicator.all_reduce(torch.ones(50_000))
            answers.append(communicator.others_have_called())
        turns.barrier().wait()
        if staged is not None:
            staged.wait()
        if context.rank == 0:
            answers.append(communicator.others_have_called())
            own = communicator.all_reduce(communicator.empty(1000, torch.float32).fill_(1))
        if own is not None:
            own.wait()
        return (answers[0], answers[1]) if answers else (False, True)


def test_others_have_not_called_while_a_call_before_is_under_way(two_ranks: RankPool) -> None:
    assert two_ranks.run(ask_behind_a_staged_call) == [(False, True)] * 2
