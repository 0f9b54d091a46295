"""What the conformance checks are made of: the transport under test, the list of checks, and data whose sums are exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ddpcomm.comm.base import Communicator, ReduceOp
from ddpcomm.comm.factory import create_communicator
from tests.ranks import RankContext

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32)
DTYPES = (*FLOATS, *INTEGERS)
SIZES = (0, 1, 3, 63, 1023, 40_003)
OPS: tuple[ReduceOp, ...] = ("sum", "avg", "max")


@dataclass(frozen=True)
class Transport:
    """How a test makes the communicator that it checks."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    wrap: Callable[[Communicator], Communicator] | None = None
    dtypes: tuple[torch.dtype, ...] = DTYPES

    def make(self, context: RankContext, **options: Any) -> Communicator:
        communicator = create_communicator(context.process_group, "cpu", self.name, **(self.options | options))
        return communicator if self.wrap is None else self.wrap(communicator)


Check = Callable[[RankContext, Transport], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


# ---- data -----------------------------------------------------------------------------------------------------------


def values(numel: int, rank: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What a rank puts in: multiples of 8 from -64 to 56, so that an average over 2, 4 or 8 ranks is whole too."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randint(-8, 8, (numel,), generator=generator) * 8).to(dtype)


def expected(numel: int, world_size: int, dtype: torch.dtype, op: ReduceOp, seed: int = 0) -> Tensor:
    """The reduction, in float64 and so exactly."""
    everybody = torch.stack([values(numel, rank, torch.float64, seed) for rank in range(world_size)])
    if op == "max":
        return everybody.amax(0).to(dtype)
    return (everybody.sum(0) / (world_size if op == "avg" else 1)).to(dtype)


def same(actual: Tensor, wanted: Tensor, op: ReduceOp, world_size: int) -> None:
    """Bit for bit, but for averages over a number of ranks by which nothing can be divided exactly: each rank's part, up to 64, may then be
    rounded, and each sum."""
    if op == "avg" and world_size & (world_size - 1):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=64 * torch.finfo(actual.dtype).eps * world_size)
    else:
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0)


def memories(communicator: Communicator, numel: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Tensors of every kind of memory: the transport's own, somebody else's, and views that begin off any alignment."""
    yield communicator.empty(numel, dtype)
    yield torch.empty(numel, dtype=dtype)
    yield communicator.empty(numel + 1, dtype)[1:]
    yield torch.empty(numel + 3, dtype=dtype)[3:]


def ops_of(dtype: torch.dtype) -> tuple[ReduceOp, ...]:
    return OPS if dtype.is_floating_point else ("sum", "max")
