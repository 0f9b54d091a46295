"""Which parameters and buffers are looked after: tied ones of which a name is ignored, and those that TorchScript holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

from ddpcomm import DistributedDataParallel
from ddpcomm.errors import ConfigurationError
from ddpcomm.named_tensors import named_parameters
from tests.ddp.on_ranks import on_two_ranks
from tests.ddp.oracle import Oracle, build, check_equal, gradients, whole_numbers
from tests.ranks import RankContext


class Tied(nn.Module):
    """`second` has the weight of `first`; `twin` is `last`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 2)
        self.second.weight = self.first.weight
        self.twin = self.last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("ignored", "names"),
    [
        ([], ["first.weight", "last.weight", "last.bias"]),
        (["first.weight"], ["second.weight", "last.weight", "last.bias"]),
        (["second.weight"], ["first.weight", "last.weight", "last.bias"]),
        (["first.weight", "second.weight"], ["last.weight", "last.bias"]),
        (["last.weight"], ["first.weight", "last.bias"]),
        (["twin.weight"], ["first.weight", "last.weight", "last.bias"]),
    ],
)
def test_a_tied_parameter_counts_under_the_first_name_that_is_not_ignored(ignored: list[str], names: list[str]) -> None:
    assert [name for name, _ in named_parameters(Tied(), ignored)] == names


@on_two_ranks
def test_a_tied_parameter_of_which_one_name_is_ignored_is_averaged(rank: RankContext) -> None:
    for ignored in (["first.weight"], ["second.weight"]):
        module, oracle = build(Tied), Oracle(Tied)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
        ddp = DistributedDataParallel(module)
        batches = whole_numbers(0, 5, 4)
        ddp(batches[rank.rank]).sum().backward()
        oracle.step(lambda each, x: each(x).sum(), batches)
        check_equal(gradients(module), oracle.gradients(), str(ignored))
        assert ddp.unsynchronized_parameters() == {}
        ddp.close()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.outer = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.outer(self.inner(x))  # type: ignore[no-any-return]


def traced(module: nn.Module) -> nn.Module:
    return torch.jit.trace(module, (torch.zeros(5, 4),), check_trace=False)  # type: ignore[no-any-return, no-untyped-call]


def scripted_inside(module: nn.Module) -> nn.Module:
    module.inner = torch.jit.script(module.inner)
    return module


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("convert", [torch.jit.script, traced, scripted_inside])
@on_two_ranks
def test_torchscript(rank: RankContext, convert: Callable[[nn.Module], nn.Module]) -> None:
    """Steps are right, and parameters that are exchanged afterwards are averaged, too."""
    module, oracle = convert(build(Counting)), Oracle(Counting)
    ddp = DistributedDataParallel(module)
    for step in range(4):
        if step == 2:
            for each in (module, *oracle.replicas):
                each.outer.weight = nn.Parameter(torch.ones(2, 4))
                dict(each.named_parameters())["inner.0.bias"].requires_grad_(False)
        batches = whole_numbers(step, 5, 4)
        module.zero_grad()
        oracle.zero_grad()
        ddp(batches[rank.rank]).sum().backward()
        oracle.step(lambda each, x: each(x).sum(), batches)
        check_equal(gradients(module), oracle.gradients(), f"step {step}")
    ddp.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@on_two_ranks
def test_torchscript_in_mixed_precision_is_refused(rank: RankContext) -> None:
    del rank
    with pytest.raises(ConfigurationError, match="TorchScript module: inner"):
        DistributedDataParallel(scripted_inside(Counting()), mixed_precision=_MixedPrecision(torch.bfloat16))


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
@pytest.mark.parametrize(("what", "text"), [("sparse", r"odd is torch\.sparse_coo"), ("expanded", "odd is expanded")])
@on_two_ranks
def test_what_can_not_be_sent_is_refused_by_name(rank: RankContext, kind: str, what: str, text: str) -> None:
    del rank
    module = nn.Linear(2, 2)
    odd = torch.eye(2).to_sparse() if what == "sparse" else torch.ones(2).expand(3, 2)
    module.register_parameter("odd", nn.Parameter(odd)) if kind == "parameter" else module.register_buffer("odd", odd)
    with pytest.raises(ConfigurationError, match=text):
        DistributedDataParallel(module)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["odd"])
    DistributedDataParallel(module).close()
