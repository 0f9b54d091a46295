"""Where an outermost backward begins and ends, in one process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddpcomm.backward import BackwardWatch


class Log:
    """Watches a module, and writes down what happens. A gradient counts as a sign of a backward, as in a reducer."""

    def __init__(self, module: nn.Module) -> None:
        self.events: list[str] = []
        self.module = module
        self.watch = BackwardWatch(self.begin, self.end, self.interrupted, self.parameters)
        self.under_way = False
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.gradient)

    def begin(self, synchronize: bool) -> None:
        self.events.append(f"begin {synchronize}")
        self.under_way = True

    def end(self) -> None:
        self.events.append("end")
        self.under_way = False

    def interrupted(self) -> None:
        self.events.append("interrupted")
        self.under_way = False

    def parameters(self) -> Sequence[Tensor]:
        return list(self.module.parameters())

    def gradient(self, _: Tensor) -> None:
        if not self.under_way:
            self.watch.started_by_parameter()
            self.begin(True)
        self.events.append("gradient")

    def forward(self, x: Tensor, synchronize: bool = True) -> Tensor:
        out: Tensor = self.module(x)
        self.watch.watch([out], synchronize)
        return out

    def take(self) -> list[str]:
        """What happened since the last call."""
        events, self.events = self.events, []
        return events


ONE_LAYER = ["begin True", "gradient", "gradient", "end"]


@pytest.fixture
def log() -> Log:
    return Log(nn.Linear(3, 2))


def x() -> Tensor:
    return torch.ones(4, 3, requires_grad=True)


def test_backward(log: Log) -> None:
    for _ in range(3):
        log.forward(x()).sum().backward()
        assert log.take() == ONE_LAYER


def test_without_synchronisation(log: Log) -> None:
    log.forward(x(), synchronize=False).sum().backward()
    assert log.take() == ["begin False", "gradient", "gradient", "end"]


def test_several_outputs_in_one_backward(log: Log) -> None:
    (log.forward(x(), synchronize=False) + log.forward(x())).sum().backward()
    events = log.take()
    assert sorted(events[:2]) == ["begin False", "begin True"]
    assert events.count("end") == 1
    assert events[-1] == "end"


def test_second_backward_over_a_kept_graph(log: Log) -> None:
    loss = log.forward(x()).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert log.take() == ONE_LAYER * 2


def test_unwatched(log: Log) -> None:
    log.module(x()).sum().backward()
    assert log.take() == ONE_LAYER


def test_autograd_grad_is_none(log: Log) -> None:
    inputs = x()
    torch.autograd.grad(log.forward(inputs).sum(), inputs)
    torch.autograd.grad(log.forward(x()).sum(), log.parameters())
    torch.autograd.grad(log.forward(inputs).sum(), [inputs, log.parameters()[0]])
    assert log.take() == []
    log.forward(x()).sum().backward()
    assert log.take() == ONE_LAYER


def test_backward_with_inputs(log: Log) -> None:
    log.forward(x()).sum().backward(inputs=[log.parameters()[1]])
    assert log.take() == ["begin True", "gradient", "end"]
    inputs = x()
    log.forward(inputs).sum().backward(inputs=[inputs])
    assert "gradient" not in log.take()


def test_backward_that_passes_by(log: Log) -> None:
    log.forward(x())
    x().sum().backward()
    assert log.take() == []


def test_leaf_as_output(log: Log) -> None:
    constant = torch.zeros((), requires_grad=True)
    log.watch.watch([constant], True)
    for _ in range(2):
        constant.backward()
    assert log.take() == ["begin True", "end"]
    log.watch.watch([torch.zeros(1)], True)  # nothing to watch


def test_gradient_of_a_gradient(log: Log) -> None:
    inputs = x()
    (slope,) = torch.autograd.grad(log.forward(inputs).pow(2).sum(), inputs, create_graph=True)
    slope.pow(2).sum().backward()
    assert log.take() == ["begin True", "gradient", "gradient", "end"] or log.events == []


class Checkpointed(nn.Module):
    """`depth` re-entrant checkpoints inside one another, around a layer; another layer around them."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner, self.outer, self.depth = nn.Linear(3, 3), nn.Linear(3, 3), depth

    def forward(self, x: Tensor) -> Tensor:
        function: Callable[[Tensor], Tensor] = self.inner
        for _ in range(self.depth):
            function = nested(function)
        return self.outer(function(self.outer(x)))


def nested(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(function, x, use_reentrant=True)


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_reentrant_checkpoints(depth: int, watched: bool) -> None:
    """One begin and one end, whether the first sign of the backward was an output or a gradient deep inside."""
    log = Log(Checkpointed(depth))
    for _ in range(2):
        out = log.forward(x()) if watched else log.module(x())
        out.sum().backward()
        events = log.take()
        assert (events[0], events[-1]) == ("begin True", "end")
        assert events.count("begin True") == events.count("end") == 1
        assert events.count("gradient") == 4


class OnlyInside(nn.Module):
    """All parameters are inside a re-entrant checkpoint."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner, self.depth = nn.Linear(3, 3), depth

    def forward(self, x: Tensor) -> Tensor:
        function: Callable[[Tensor], Tensor] = self.inner
        for _ in range(self.depth):
            function = nested(function)
        return function(function(x) * 2)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_first_sign_deep_inside(depth: int) -> None:
    """Its graph task ends long before the outermost one, twice over."""
    log = Log(OnlyInside(depth))
    for _ in range(2):
        log.module(x() * 3).sum().backward()
        events = log.take()
        assert events[0] == "begin True"
        assert events[-1] == "end"
        assert events.count("end") == 1
        assert events.count("gradient") == 4


# ---- exceptions -----------------------------------------------------------------------------------------------------


class Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ValueError("fuse blown")


def test_interrupted_before_and_after_gradients(log: Log) -> None:
    with pytest.raises(ValueError, match="fuse blown"):
        log.forward(Fuse.apply(x())).sum().backward()
    events = log.take()
    assert events[0] == "begin True"
    assert events[-1] == "interrupted"
    with pytest.raises(ValueError, match="fuse blown"):
        Fuse.apply(log.forward(x())).sum().backward()
    assert log.take() == []  # it never got here
    log.forward(x()).sum().backward()
    assert log.take() == ONE_LAYER


@pytest.mark.parametrize("watched", [True, False])
def test_interrupted_inside_a_checkpoint(watched: bool) -> None:
    log = Log(nn.Linear(3, 3))

    def run(blows: bool) -> None:
        step = nested(lambda y: (Fuse.apply(log.module(y)) if blows else log.module(y)) * 2)
        out = step(x() * 2)
        if watched:
            log.watch.watch([out], True)
        out.sum().backward()

    with pytest.raises(ValueError, match="fuse blown"):
        run(True)
    assert log.take() == (["begin True", "interrupted"] if watched else [])
    run(False)
    assert log.take() == ONE_LAYER


def test_end_that_raises(log: Log) -> None:
    def fail() -> None:
        raise KeyError("end")

    class Failing(Log):
        def end(self) -> None:
            super().end()
            raise KeyError("end")

    failing = Failing(nn.Linear(3, 2))
    for _ in range(2):
        with pytest.raises(KeyError, match="end"):
            failing.forward(x()).sum().backward()
        assert failing.take() == ONE_LAYER


def test_nobody_is_kept_alive() -> None:
    """Neither by outputs that live on nor by hooks on their nodes."""
    module = nn.Linear(3, 2)
    watched = Log(module)
    for parameter in module.parameters():
        parameter._post_accumulate_grad_hooks.clear()
    out = watched.forward(x())
    gone = weakref.ref(watched)
    del watched
    gc.collect()
    assert gone() is None
    out.sum().backward()
