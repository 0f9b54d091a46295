"""ddpcomm.hooks.quantized: near the average, the same on all ranks, nothing lost for good, and it trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ddpcomm
from ddpcomm import DistributedDataParallel
from tests.ddp.models import Transformer, chain, next_token, squares
from tests.ddp.on_ranks import on_two_ranks, same_on_all_ranks
from tests.ddp.oracle import whole_numbers
from tests.ranks import RankContext

ERRORS = {"int8": 0.5 / 127, "float8_e4m3": 2.0**-4, "float8_e5m2": 2.0**-3}


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("code", ERRORS)
@on_two_ranks
def test_near_the_average_and_the_same_on_all_ranks(rank: RankContext, code: str, view: bool) -> None:
    torch.manual_seed(0)
    plain = DistributedDataParallel(chain())
    model = DistributedDataParallel(chain(), gradient_as_bucket_view=view, bucket_cap_mb=1e-4)
    model.module.load_state_dict(plain.module.state_dict())
    model.register_comm_hook(None, ddpcomm.hooks.Quantized(code))
    for turn in range(3):
        for each in (plain, model):
            each.zero_grad()
            squares(each, whole_numbers(turn, 5, 3)[rank.rank]).backward()
        largest = max(float(p.grad.abs().max()) for p in plain.parameters())
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            # two ranks' errors, and what error feedback adds of the step before; blocks hold no more than the largest number of all
            assert (one.grad - other.grad).abs().max() <= 8 * ERRORS[code] * max(largest, 1)
            same_on_all_ranks(one.grad.tolist())
    plain.close()
    model.close()


@on_two_ranks
def test_error_feedback_loses_nothing_for_good(rank: RankContext) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 64, bias=False))
    model.register_comm_hook(None, ddpcomm.hooks.quantized)
    batch = torch.randn(3, 64, generator=torch.Generator().manual_seed(rank.rank))
    sent, wanted = torch.zeros(64, 64, dtype=torch.float64), torch.zeros(64, 64, dtype=torch.float64)
    exact = torch.stack([torch.randn(3, 64, generator=torch.Generator().manual_seed(r)).sum(0).expand(64, 64) for r in (0, 1)]).mean(0)
    for _ in range(40):
        model.zero_grad()
        model(batch).sum().backward()
        sent += model.module.weight.grad
        wanted += exact
    step = float(exact.abs().max()) / 127
    assert (sent - wanted).abs().max() < 4 * step, "after 40 steps no more may be missing than one step loses"
    model.close()


@on_two_ranks
def test_what_is_not_finite_reaches_every_rank_and_is_gone_in_the_next_step(rank: RankContext) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(chain())
    model.register_comm_hook(None, ddpcomm.hooks.quantized)
    for bad in (False, True, False, False):
        model.zero_grad()
        batch = whole_numbers(0, 5, 3)[rank.rank]
        squares(model, batch * float("inf") if bad and rank.rank == 1 else batch).backward()
        assert model.grad_norm().isfinite() == (not bad)
    model.close()


@on_two_ranks
def test_it_trains(rank: RankContext) -> None:
    """The same loss as uncompressed, within 1 %."""
    losses = {}
    for hook in (None, ddpcomm.hooks.quantized, ddpcomm.hooks.Quantized("float8_e4m3")):
        torch.manual_seed(0)
        model = DistributedDataParallel(Transformer())
        if hook is not None:
            model.register_comm_hook(None, hook)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        generator = torch.Generator().manual_seed(rank.rank)
        for _ in range(60):
            start = torch.randint(0, 10, (8, 1), generator=generator)
            optimizer.zero_grad()
            loss = next_token(model, (start + torch.arange(7)) % 10)
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            losses[str(hook)] = float(next_token(model, (torch.arange(10)[:, None] + torch.arange(7)) % 10))
        model.close()
    exact = losses.pop("None")
    for name, loss in losses.items():
        assert loss <= exact * 1.01 + 1e-3, f"{name}: {loss} instead of {exact}"


def test_bytes_on_the_wire() -> None:
    """One byte an element, and four for each 256."""
    from ddpcomm.comm.base import CompletedWork
    from ddpcomm.hooks.quantized import _QuantizedBucket

    class Recorder:
        world_size = 2
        sent = 0

        def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(numel, dtype=dtype)

        def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> CompletedWork:
            self.sent += tensor.numel() * tensor.element_size()
            for part in out.chunk(2):
                part.copy_(tensor)
            return CompletedWork()

    recorder = Recorder()
    buffer = torch.randn(10_000)
    result = _QuantizedBucket((), buffer, recorder, "int8").start(buffer).wait()
    assert recorder.sent == 40 * 256 + 40 * 4
    torch.testing.assert_close(result, buffer, atol=0.05, rtol=0)
