"""Gradients of another dtype than their parameter's, that share memory, lie in a bucket at another's place, or have no memory at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpcomm import DistributedDataParallel
from ddpcomm.errors import ConfigurationError, LostGradientError
from tests.ddp.on_ranks import on_two_ranks, same_on_all_ranks
from tests.ranks import RankContext

TRANSPORTS_AND_VIEWS = pytest.mark.parametrize(
    ("transport", "view"), [(transport, view) for transport in ("shared_memory", "process_group") for view in (False, True)]
)
needs_grad_dtype = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no Tensor.grad_dtype")


def short_linear(dtype: torch.dtype) -> nn.Linear:
    """bfloat16 weights, of which the gradient has `dtype`."""
    model = nn.Linear(3, 1, bias=False).to(torch.bfloat16)
    model.weight.grad_dtype = dtype
    return model


@needs_grad_dtype
@TRANSPORTS_AND_VIEWS
@on_two_ranks
def test_gradients_wider_than_their_parameters(rank: RankContext, transport: str, view: bool) -> None:
    ddp = DistributedDataParallel(short_linear(torch.float32), transport=transport, gradient_as_bucket_view=view)
    for step in range(3):
        ddp.zero_grad(set_to_none=step != 1)
        ddp(torch.full((1, 3), rank.rank + 1.0, dtype=torch.bfloat16)).sum().backward()
        gradient = ddp.module.weight.grad
        assert gradient.dtype == torch.float32
        assert gradient.tolist() == [[1.5] * 3]
    ddp.module.weight.grad = None
    ddp.module.weight.grad_dtype = torch.bfloat16
    ddp(torch.full((1, 3), rank.rank + 1.0, dtype=torch.bfloat16)).sum().backward()
    assert ddp.module.weight.grad.dtype == torch.bfloat16
    assert ddp.module.weight.grad.tolist() == [[1.5] * 3]
    ddp.close()


class Weigh(torch.autograd.Function):
    """The sum of a weight times a factor. Its gradient has the dtype that is asked for."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
        ctx.gradient = torch.full_like(weight, factor, dtype=dtype)
        return (weight * factor).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient, None, None


class Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.weight.grad_dtype = None

    def forward(self, factor: float, dtype: torch.dtype) -> Tensor:
        return Weigh.apply(self.weight, factor, dtype)


@needs_grad_dtype
@TRANSPORTS_AND_VIEWS
@on_two_ranks
def test_a_dtype_that_no_one_announced_is_an_error_everywhere(rank: RankContext, transport: str, view: bool) -> None:
    model = Cast()
    ddp = DistributedDataParallel(model, transport=transport, gradient_as_bucket_view=view)
    for step in range(3):
        ddp.zero_grad()
        loss = ddp(rank.rank + 1.0, torch.float32 if rank.rank == 0 and step == 1 else torch.bfloat16)
        if step == 1:
            with pytest.raises(LostGradientError, match=r"weight is \[3\] torch.bfloat16 on cpu, its gradient \[3\] torch.float32"):
                loss.backward()
        else:
            loss.backward()
            assert model.weight.grad.tolist() == [1.5] * 3
    ddp.close()


@needs_grad_dtype
@on_two_ranks
def test_ranks_must_agree_on_the_gradients_dtype(rank: RankContext) -> None:
    with pytest.raises(RuntimeError, match=r"gradients of torch\.float32"):
        DistributedDataParallel(short_linear(torch.float32 if rank.rank else torch.bfloat16))


class Joined(nn.Module):
    """Autograd gives `first` and `second` one memory for their gradients, where both are used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(2, 2))
        self.second = nn.Parameter(torch.zeros(2, 2))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        flat = self.first.view(-1) + self.second.view(-1) if both else self.first.view(-1)
        return (flat * x).sum()


@pytest.mark.parametrize("cap_mb", [25, 1e-6])
@TRANSPORTS_AND_VIEWS
@on_two_ranks
def test_gradients_that_share_memory(rank: RankContext, transport: str, view: bool, cap_mb: float) -> None:
    ddp = DistributedDataParallel(
        Joined(), find_unused_parameters=True, transport=transport, gradient_as_bucket_view=view, bucket_cap_mb=cap_mb
    )
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.arange(1.0, 5.0) * (rank.rank + 1), both=rank.rank == 0).backward()
        assert ddp.module.first.grad.flatten().tolist() == [1.5, 3.0, 4.5, 6.0]
        assert ddp.module.second.grad.flatten().tolist() == [0.5, 1.0, 1.5, 2.0]
    ddp.close()


@on_two_ranks
def test_one_gradient_for_two_parameters(rank: RankContext) -> None:
    """Set by hand, as a tensor of which both are views that overlap."""
    ddp = DistributedDataParallel(Joined())
    ddp(torch.ones(4), both=True).backward()
    memory = torch.arange(1.0, 7.0) * (rank.rank + 1)

    def exchange() -> None:
        ddp.module.first.grad, ddp.module.second.grad = memory[:4].view(2, 2), memory[2:].view(2, 2)

    with ddp.no_sync():
        ddp(torch.ones(4), both=True).backward()
    exchange()
    (ddp(torch.ones(4), both=True) * 0).backward()
    assert ddp.module.first.grad.flatten().tolist() == [1.5, 3.0, 4.5, 6.0]
    assert ddp.module.second.grad.flatten().tolist() == [4.5, 6.0, 7.5, 9.0]
    ddp.close()


@pytest.mark.parametrize("cap_mb", [25, 1e-6])
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@on_two_ranks
def test_views_that_change_places(rank: RankContext, transport: str, cap_mb: float) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, transport=transport, bucket_cap_mb=cap_mb)
    first, second = model[0].weight, model[1].weight
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.ones(1, 2)).sum().backward()
    if rank.rank == 0:
        first.grad, second.grad = second.grad, first.grad
    with pytest.raises(LostGradientError, match="at another parameter's place"):
        ddp(torch.ones(1, 2)).sum().backward()
    ddp.zero_grad()
    ddp(torch.ones(1, 2)).sum().backward()
    same_on_all_ranks((first.grad.tolist(), second.grad.tolist()))
    ddp.close()


@on_two_ranks
def test_parameters_without_memory_are_refused(rank: RankContext) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (rank.world_size, 1), mesh_dim_names=("data", "tensor"))
    distributed = nn.Linear(3, 2)
    distributed.weight = nn.Parameter(distribute_tensor(torch.ones(2, 3), mesh["tensor"], [Replicate()]))
    with_buffer = nn.BatchNorm1d(2)
    with_buffer.running_mean = torch.zeros(2, device="meta")
    for model, name in ((distributed, r"weight \(DTensor on cpu\)"), (with_buffer, r"running_mean \(Tensor on meta\)")):
        with pytest.raises(ConfigurationError, match=f"{name} has no memory of its own"):
            DistributedDataParallel(model)


@on_two_ranks
def test_uninitialised_on_one_rank_alone(rank: RankContext) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3), nn.LazyBatchNorm1d())
    if rank.rank == 0:
        model(torch.ones(2, 2))
    with pytest.raises(ConfigurationError, match=r"rank 1: 1.weight is not initialised"):
        DistributedDataParallel(model)
    with pytest.raises(ConfigurationError, match="running_mean is not initialised"):
        DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False)))


class Pair(nn.Module):
    """Autograd gives both parameters one memory for their gradients, where both are used."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2, 2))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return ((self.p.view(-1) + self.q.view(-1) if both else self.p.view(-1)) * x).sum()


@pytest.mark.parametrize("replaced", ["p", "q"])
@pytest.mark.parametrize("how", ["unfrozen", "exchanged"])
@TRANSPORTS_AND_VIEWS
@on_two_ranks
def test_a_newcomer_that_shares_memory(rank: RankContext, replaced: str, how: str, transport: str, view: bool) -> None:
    """Its gradient goes out in another round than the one that it shares memory with, on one rank only."""
    module = Pair()
    if how == "unfrozen":
        getattr(module, replaced).requires_grad_(False)
    ddp = DistributedDataParallel(module, transport=transport, gradient_as_bucket_view=view, find_unused_parameters=True)
    x = torch.arange(1.0, 5.0) * (rank.rank + 1)
    for _ in range(2):
        ddp.zero_grad()
        ddp(x, True).backward()
    getattr(module, replaced).requires_grad_(True)
    if how == "exchanged":
        setattr(module, replaced, nn.Parameter(torch.zeros(2, 2)))
    ddp.zero_grad()
    ddp(x, rank.rank == 0).backward()
    assert same_on_all_ranks(module.p.grad.flatten().tolist()) == [1.5, 3, 4.5, 6]
    assert same_on_all_ranks(module.q.grad.flatten().tolist()) == [0.5, 1, 1.5, 2]
    ddp.close()


@TRANSPORTS_AND_VIEWS
@on_two_ranks
def test_gradients_that_interleave_are_averaged_where_they_are(rank: RankContext, transport: str, view: bool) -> None:
    """Columns of one matrix share no element, though each lies within the other's stretch of memory."""
    module = Pair()
    ddp = DistributedDataParallel(module, transport=transport, gradient_as_bucket_view=view)
    matrix = torch.zeros(2, 4)
    module.p.grad, module.q.grad = matrix[:, :2], matrix[:, 2:]
    ddp(torch.arange(1.0, 5.0) * (rank.rank + 1), True).backward()
    assert same_on_all_ranks(module.p.grad.flatten().tolist()) == [1.5, 3, 4.5, 6]
    assert same_on_all_ranks(module.q.grad.flatten().tolist()) == [1.5, 3, 4.5, 6]
    if not view:
        assert matrix.tolist() == [[1.5, 3, 1.5, 3], [4.5, 6, 4.5, 6]]
        module.p.grad, module.q.grad = matrix[:, :3:2], matrix[:, 1:3]  # the third column is both's
        matrix.zero_()
        ddp(torch.arange(1.0, 5.0) * (rank.rank + 1), False).backward()
        assert same_on_all_ranks(module.p.grad.flatten().tolist()) == [1.5, 3, 4.5, 6]
    ddp.close()


class Exchanged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.zeros(2))
        self.exchange()

    def exchange(self) -> None:
        self.weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.weight.grad_dtype = None

    def forward(self, factor: float, dtype: torch.dtype) -> Tensor:
        return Weigh.apply(self.weight, factor, dtype) + self.other.sum()


@needs_grad_dtype
@pytest.mark.parametrize("culprits", [(1,), (0, 1)])
@on_two_ranks
def test_a_newcomer_whose_gradient_does_not_fit_is_an_error_everywhere(rank: RankContext, culprits: tuple[int, ...]) -> None:
    module = Exchanged()
    ddp = DistributedDataParallel(module)
    for _ in range(2):
        ddp.zero_grad()
        ddp(rank.rank + 1.0, torch.bfloat16).backward()
    ddp.zero_grad()
    module.exchange()
    with pytest.raises(LostGradientError, match="rank 1: these gradients don't fit their parameters: weight"):
        ddp(rank.rank + 1.0, torch.float32 if rank.rank in culprits else torch.bfloat16).backward()
    ddp.zero_grad()
    ddp(rank.rank + 1.0, torch.bfloat16).backward()
    assert module.weight.grad.tolist() == [1.5] * 3
    ddp.close()


class Table(nn.Module):
    """Its rows are exchanged for others, of which nobody knows that their gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.zeros(2))
        self.rows = nn.Parameter(torch.ones(3, 2))

    def forward(self, row: int, sparse: bool) -> Tensor:
        return nn.functional.embedding(torch.tensor([row]), self.rows, sparse=sparse).sum() + self.other.sum()


@on_two_ranks
def test_a_newcomer_whose_gradient_is_sparse(rank: RankContext) -> None:
    module = Table()
    ddp = DistributedDataParallel(module)
    for _ in range(2):
        ddp.zero_grad()
        ddp(rank.rank, False).backward()
    ddp.zero_grad()
    module.rows = nn.Parameter(torch.ones(3, 2))
    for _ in range(2):
        ddp(rank.rank, True).backward()
        gradient = module.rows.grad
        assert gradient.is_sparse
        assert same_on_all_ranks(gradient.to_dense().tolist()) == [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0]]
        ddp.zero_grad()
    ddp.close()
