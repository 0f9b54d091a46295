"""`ddpcomm.install()`: torch's name means ddpcomm's class, wherever in torch it is looked up, until it is undone."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn.parallel
import torch.nn.parallel.distributed
from torch import nn

import ddpcomm
from ddpcomm.comm.torch_ddp import TorchDDP
from ddpcomm.install import Installation
from tests.ddp.on_ranks import on_two_ranks
from tests.ranks import RankContext


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    yield
    ddpcomm.uninstall()


def holders() -> dict[str, type]:
    """What every module of torch holds under a name that is torch's class when nothing is installed."""
    return {
        f"{module.__name__}.{name}": value
        for module in list(sys.modules.values())
        if isinstance(module, types.ModuleType) and module.__name__.split(".")[0] == "torch"
        for name, value in vars(module).copy().items()
        if value is TorchDDP or value is ddpcomm.DistributedDataParallel
    }


def install() -> Installation:
    """Without the warning about this package's own references."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ddpcomm.install()


def installed() -> bool:
    """Whether all places hold ddpcomm's class; True or False for all of them alike."""
    kinds = set(holders().values())
    assert len(kinds) == 1, f"some places differ: {holders()}"
    return kinds == {ddpcomm.DistributedDataParallel}


def test_call_lasts_until_uninstall() -> None:
    before = holders()
    assert {"torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel"} <= before.keys()
    install()
    assert installed()
    assert torch.nn.parallel.DistributedDataParallel is ddpcomm.DistributedDataParallel
    install()
    ddpcomm.uninstall()
    assert holders() == before, "a second call changes nothing, and one uninstall undoes both"
    ddpcomm.uninstall()
    assert holders() == before


def test_block_ends_it() -> None:
    before = holders()
    with install():
        assert installed()
        with install():
            assert installed()
        assert installed(), "the inner block ends nothing that it did not begin"
    assert holders() == before
    with pytest.raises(ZeroDivisionError), install():
        raise ZeroDivisionError
    assert holders() == before


def test_block_within_a_call() -> None:
    install()
    with install():
        pass
    assert installed()


def test_uninstall_within_a_block() -> None:
    with install():
        ddpcomm.uninstall()
        assert not installed()
    assert not installed()


def test_module_of_torch_that_is_imported_in_between() -> None:
    late = types.ModuleType("torch.imported_late")
    sys.modules[late.__name__] = late
    try:
        with install():
            exec("from torch.nn.parallel import DistributedDataParallel as DDP", vars(late))
            assert late.DDP is ddpcomm.DistributedDataParallel
        assert late.DDP is TorchDDP
    finally:
        del sys.modules[late.__name__]


def test_says_which_modules_it_can_not_reach() -> None:
    early = types.ModuleType("some_framework.strategy")
    sys.modules[early.__name__] = early
    try:
        exec("from torch.nn.parallel import DistributedDataParallel", vars(early))
        with pytest.warns(UserWarning, match=r"some_framework\.strategy"):
            ddpcomm.install()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ddpcomm.install()  # installed already: nothing new to say
        assert early.DistributedDataParallel is TorchDDP
    finally:
        del sys.modules[early.__name__]


@on_two_ranks
def test_script_that_builds_torchs_class(rank: RankContext) -> None:
    with install():
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 1), gradient_as_bucket_view=True)
        assert type(ddp) is ddpcomm.DistributedDataParallel
        assert isinstance(ddp, nn.parallel.DistributedDataParallel)
    assert isinstance(ddp, nn.parallel.DistributedDataParallel), "also where torch's own class is asked for"
    ddp(torch.full((1, 2), float(rank.rank))).sum().backward()
    assert ddp.module.weight.grad.tolist() == [[0.5, 0.5]]


@on_two_ranks
def test_checkpoints_of_torch(rank: RankContext) -> None:
    """torch.distributed.checkpoint leaves out the wrapper's prefix; it asks for the class by name."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict

    for context in (install(), None):
        ddp = torch.nn.parallel.DistributedDataParallel(nn.Linear(2, 1)) if context else ddpcomm.DistributedDataParallel(nn.Linear(2, 1))
        assert type(ddp) is ddpcomm.DistributedDataParallel
        state, optimizer_state = get_state_dict(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.5))
        assert set(state) == {"weight", "bias"}
        assert optimizer_state["param_groups"][0]["params"] == ["weight", "bias"]
        set_model_state_dict(ddp, {name: torch.ones_like(value) for name, value in state.items()})
        assert ddp.module.weight.tolist() == [[1.0, 1.0]]
        ddpcomm.uninstall()


@on_two_ranks
def test_replicate(rank: RankContext) -> None:
    """torch's composable `replicate` builds the class inside itself and calls its forward in two halves."""
    from torch.distributed._composable.replicate import replicate

    with install():
        module = replicate(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)))
        for _ in range(3):
            module.zero_grad()
            module(torch.full((1, 2), float(rank.rank + 1))).sum().backward()
    averaged = [p.grad.clone() for p in module.parameters()]
    alone = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    alone.load_state_dict({name: value.clone() for name, value in module.state_dict().items()})
    expected = []
    for number in range(2):
        alone.zero_grad()
        alone(torch.full((1, 2), float(number + 1))).sum().backward()
        expected.append([p.grad.clone() for p in alone.parameters()])
    for found, first, second in zip(averaged, *expected, strict=True):
        assert torch.equal(found, first / 2 + second / 2)
