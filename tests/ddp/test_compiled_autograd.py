"""Compiled autograd drops what is to run at the end of a backward: that must not go unnoticed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpcomm import DistributedDataParallel
from ddpcomm.errors import ConfigurationError
from tests.ddp.on_ranks import on_two_ranks
from tests.ranks import RankContext


@pytest.mark.parametrize("synchronizes", [True, False])
@on_two_ranks
def test_refused(rank: RankContext, synchronizes: bool) -> None:
    from torch._dynamo import compiled_autograd

    ddp = DistributedDataParallel(nn.Linear(2, 1))
    batch = torch.full((1, 2), float(rank.rank))
    ddp.require_backward_grad_sync = synchronizes
    for _ in range(2):
        with (
            compiled_autograd._enable(torch.compile(backend="eager")),
            pytest.raises(ConfigurationError, match="compiled autograd"),
        ):
            ddp(batch).sum().backward()
    ddp.require_backward_grad_sync = True
    ddp.zero_grad()
    ddp(batch).sum().backward()
    assert ddp.module.weight.grad.tolist() == [[0.5, 0.5]], "an ordinary backward is synchronised as ever"
