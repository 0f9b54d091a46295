"""Large gradients over shared memory: what a rank reduces of its own bucket is read where the gradients are, and they are watched."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

import ddpcomm.buckets
from ddpcomm import DistributedDataParallel
from ddpcomm.comm.shared_memory import SharedMemoryCommunicator
from tests.ddp.on_ranks import on_two_ranks
from tests.ddp.oracle import Trial, no_sync, whole_numbers
from tests.ranks import RankContext, RankPool

WIDE = 200  # a weight of 160,000 bytes


class Wide(nn.Module):
    """Weights above and below the size from which gradients are left where they are; `spare` is not always used."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDE, dtype=dtype)
        self.second = nn.Linear(WIDE, WIDE, dtype=dtype)
        self.spare = nn.Linear(WIDE, WIDE, dtype=dtype)
        self.third = nn.Linear(WIDE, WIDE, dtype=dtype)
        self.last = nn.Linear(WIDE, 1, dtype=dtype)

    def forward(self, x: Tensor, spare: bool = True) -> Tensor:
        hidden = self.second(self.first(x))
        return self.last(self.third(hidden + self.spare(hidden) if spare else hidden))


def with_spare(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum()


def without_spare(model: nn.Module, x: Tensor) -> Tensor:
    return model(x, False).sum()


def accumulated(model: nn.Module, x: Tensor) -> Tensor:
    with no_sync(model):
        model(x + 1).sum().backward()
    return model(x).sum()


def count_parts(patch: pytest.MonkeyPatch) -> list[int]:
    """How many parts of gradients each all-reduce read where they were."""
    counts: list[int] = []
    send = SharedMemoryCommunicator._all_reduce_from

    def counted(self: SharedMemoryCommunicator, tensor: Tensor, op: str, elsewhere: list[object], keep: list[Tensor]) -> object:
        counts.append(len(elsewhere))
        return send(self, tensor, op, elsewhere, keep)  # type: ignore[arg-type]

    patch.setattr(SharedMemoryCommunicator, "_all_reduce_from", counted)
    return counts


@on_two_ranks
def averages(rank: RankContext, view: bool, bucket_cap_mb: float | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        counts = count_parts(patch)
        options = {"gradient_as_bucket_view": view, "bucket_cap_mb": bucket_cap_mb, "find_unused_parameters": True}
        trial = Trial(rank, Wide, transport="shared_memory", **options)
        for step in range(8):
            run = (with_spare, without_spare, accumulated, with_spare)[step % 4]
            trial.step(run, whole_numbers(step, 2, 3), zero_grad=step != 3)
        assert counts  # in the first backward at least, where all buckets go out when it is over
        assert min(counts) > 0


@pytest.mark.parametrize("bucket_cap_mb", [None, 0.1])
@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_averages(two_ranks: RankPool, view: bool, bucket_cap_mb: float | None) -> None:
    averages(two_ranks, view=view, bucket_cap_mb=bucket_cap_mb)


def average_of_three(rank: RankContext, view: bool, dtype: torch.dtype) -> None:
    """All ranks hold the same bits; with a third, a sum in float32 is rounded."""
    torch.manual_seed(0)
    module = Wide(dtype)
    ddp = DistributedDataParallel(module, gradient_as_bucket_view=view, transport="shared_memory")
    for step in range(3):
        ddp.zero_grad()
        batches = [torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + r)).to(dtype) for r in range(3)]
        with_spare(ddp, batches[rank.rank]).backward()
        found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        wanted = [torch.autograd.grad(with_spare(module, batch), list(module.parameters())) for batch in batches]
        for (name, value), *own in zip(found.items(), *wanted, strict=True):
            expected = sum(each.double() for each in own) / 3  # type: ignore[union-attr]
            torch.testing.assert_close(value.double(), expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-4)
            everyone = [torch.empty_like(value) for _ in range(3)]
            torch.distributed.all_gather(everyone, value)
            assert all(torch.equal(each, value) for each in everyone), name
    ddp.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_average_of_three(ranks, view: bool, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    ranks(3).run(average_of_three, view, dtype)


CHANGES = {
    "in place": lambda gradient: gradient.add_(1),
    "through .data": lambda gradient: gradient.data.mul_(7),
    "through numpy": lambda gradient: gradient.numpy().fill(9),
    "other memory": lambda gradient: setattr(gradient, "data", torch.full_like(gradient, 5)),
}


@on_two_ranks
def changed(rank: RankContext, view: bool, change: str, late: int) -> None:
    """Whatever a hook does to a gradient whose bucket has gone out, the average is that of what went out; whether or not the other rank had
    arrived by then."""
    trial = Trial(rank, Wide, transport="shared_memory", bucket_cap_mb=0.1, gradient_as_bucket_view=view)
    trial.step(with_spare, whole_numbers(0, 2, 3))
    module = trial.module

    def spoil(_: Tensor) -> None:  # the gradient of the first layer's bias comes last, when the bucket of the third has gone out
        assert module.third.weight.grad is not None
        CHANGES[change](module.third.weight.grad)

    handle = module.first.bias.register_hook(spoil)
    trial.zero_grad()
    batches = whole_numbers(1, 2, 3)
    if rank.rank == late:
        time.sleep(0.2)
    with_spare(trial.ddp, batches[rank.rank]).backward()
    handle.remove()
    trial.oracle.step(with_spare, batches)
    trial.check()
    trial.step(with_spare, whole_numbers(2, 2, 3))


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_a_gradient_changed_under_way(two_ranks: RankPool, view: bool, change: str, late: int) -> None:
    changed(two_ranks, view=view, change=change, late=late)


class Half(nn.Module):
    def __init__(self, common: nn.Module) -> None:
        super().__init__()
        self.common = common
        self.first = nn.Linear(3, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.common(self.first(x))
        return hidden


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.last = nn.Linear(WIDE, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.last(self.inner(x))
        return hidden


@on_two_ranks
def in_company(rank: RankContext, nested: bool, views: tuple[bool, bool], transport: str) -> None:
    """Parameters that two wrapped models average in one backward: one writes them back, or reduces them in place, while the other may not
    have read them."""
    torch.manual_seed(0)
    common = nn.Sequential(*[nn.Linear(WIDE, WIDE) for _ in range(3)])
    halves = [Half(common)] if nested else [Half(common), Half(common)]
    models: list[nn.Module] = []
    for half, view in zip(halves, views, strict=False):
        models.append(DistributedDataParallel(half, transport=transport, bucket_cap_mb=0.1, gradient_as_bucket_view=view))
    plain: list[nn.Module] = [*halves]
    if nested:
        plain = [Outer(models[0])]
        models = [DistributedDataParallel(plain[0], transport=transport, bucket_cap_mb=0.1, gradient_as_bucket_view=views[1])]
    parameters = list(dict.fromkeys(p for model in models for p in model.parameters()))

    def loss(which: list[nn.Module], x: Tensor) -> Tensor:
        return sum(model(x * (i + 1)).sum() for i, model in enumerate(which))  # type: ignore[return-value]

    for step in range(6):
        for parameter in parameters:
            if parameter.grad is None or step % 2:
                parameter.grad = None
            else:
                parameter.grad.zero_()
        batches = whole_numbers(step, 2, 3)
        loss(models, batches[rank.rank]).backward()
        found = [p.grad.clone() for p in parameters if p.grad is not None]
        own = [torch.autograd.grad(loss(plain, batch), parameters) for batch in batches]
        for value, *both in zip(found, *own, strict=True):
            torch.testing.assert_close(value, (both[0] + both[1]) / 2)


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@pytest.mark.parametrize("views", [(False, False), (False, True), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize("nested", [False, True], ids=["side by side", "nested"])
def test_parameters_in_two_models(two_ranks: RankPool, nested: bool, views: tuple[bool, bool], transport: str) -> None:
    in_company(two_ranks, nested=nested, views=views, transport=transport)


@on_two_ranks
def test_uneven_inputs_divide_by_those_that_are_left(rank: RankContext) -> None:
    trial = Trial(rank, Wide, transport="shared_memory")
    with trial.ddp.join(divide_by_initial_world_size=False):
        for step in range(3 if rank.rank == 0 else 2):
            trial.zero_grad()
            batches = whole_numbers(step, 2, 3)
            with_spare(trial.ddp, batches[rank.rank]).backward()
            taking_part = batches if step < 2 else batches[:1]
            for parameter, *own in zip(
                trial.module.parameters(),
                *(torch.autograd.grad(with_spare(trial.module, b), list(trial.module.parameters())) for b in taking_part),
                strict=True,
            ):
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, sum(own) / len(own))  # type: ignore[arg-type]


def test_small_gradients_are_copied() -> None:
    assert ddpcomm.buckets.LEAST_LEFT_BYTES <= WIDE * WIDE * 4
