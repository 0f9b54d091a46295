"""The same bits as torch's own DistributedDataParallel, weights after every one of many steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from ddpcomm import DistributedDataParallel
from tests.ddp.models import Transformer, chain, convolutions, next_token, squares
from tests.ddp.on_ranks import on_two_ranks
from tests.ddp.oracle import TINY_BUCKETS_MB, Step, check_equal
from tests.ranks import RankContext

STEPS = 50


def train_both(rank: RankContext, make: Callable[[], nn.Module], step: Step, batch: Callable[[], Any], **options: Any) -> None:
    """Trains twins side by side; real-valued batches differ between ranks and steps."""
    models = []
    for wrapper in (TorchDDP, DistributedDataParallel):
        torch.manual_seed(7)
        models.append(wrapper(make(), **options))
    optimizers = [torch.optim.SGD(model.parameters(), 0.01, momentum=0.9) for model in models]
    torch.manual_seed(rank.rank)
    for turn in range(STEPS):
        data = batch()
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = step(model, data)
            assert loss is not None
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        check_equal(models[1].state_dict(), models[0].state_dict(), f"state after step {turn + 1} with {options}")


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@on_two_ranks
def test_chain(rank: RankContext, view: bool) -> None:
    for bucket_cap_mb in (TINY_BUCKETS_MB, None):
        train_both(rank, chain, squares, lambda: torch.randn(5, 3), bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=view)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@on_two_ranks
def test_convolutions(rank: RankContext, view: bool) -> None:
    train_both(rank, convolutions, squares, lambda: torch.randn(4, 2, 6, 6), gradient_as_bucket_view=view)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@on_two_ranks
def test_transformer(rank: RankContext, view: bool) -> None:
    for transport in ("process_group", "shared_memory"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DDPCOMM_TRANSPORT", transport)
            train_both(rank, Transformer, next_token, lambda: torch.randint(0, 11, (3, 7)), gradient_as_bucket_view=view)
