"""What gradients must be: one process plays every rank, with plain autograd, and takes the mean.

With two ranks the mean of two gradients is rounded once, whoever computes it. So results are compared bit for bit wherever each rank's own
gradient has one value: models are filled with small whole numbers, whose sums and products are exact in any order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddpcomm import DistributedDataParallel
from tests.ranks import RankContext

MakeModule = Callable[[], nn.Module]
Step = Callable[[nn.Module, Any], "Tensor | None"]
"""Takes a model, wrapped or not, and a batch; returns the loss, or None if it ran backward itself."""

WORLD_SIZE = 2
TINY_BUCKETS_MB = 1e-6  # one parameter in each
BUCKETS_AND_VIEWS = [
    {"bucket_cap_mb": bucket_cap_mb, "gradient_as_bucket_view": view} for bucket_cap_mb in (TINY_BUCKETS_MB, None) for view in (False, True)
]
"""The options that change most of what a reducer does."""


def build(make: MakeModule) -> nn.Module:
    """The module, with the same small whole numbers in its parameters at every call and on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(1234)
        module = make()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.is_floating_point() or parameter.is_complex():
                    parameter.copy_(torch.randint(-2, 3, parameter.shape))
    return module


def whole_numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32, largest: int = 3) -> list[Tensor]:
    """A batch for each rank, all of it on every rank; a rank's own is `[rank.rank]`."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return [torch.randint(-largest, largest + 1, shape, generator=generator).to(dtype) for _ in range(WORLD_SIZE)]


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """`ddp.no_sync()`, and nothing for a model that isn't wrapped."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext()


def inner(model: nn.Module) -> Any:
    """The module inside the wrapper, or the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


class Oracle:
    """Replicas of one model, one for each rank. After `step`, every replica holds the averaged gradients."""

    def __init__(self, make: MakeModule, world_size: int = WORLD_SIZE) -> None:
        self.replicas = [build(make) for _ in range(world_size)]

    def step(self, step: Step, batches: Sequence[Any]) -> None:
        """One step of each rank on its own batch, and the average."""
        self.run(step, batches)
        self.average()

    def run(self, step: Step, batches: Sequence[Any]) -> None:
        """One step of each rank on its own batch: gradients stay each rank's own."""
        for replica, batch in zip(self.replicas, batches, strict=True):
            run(step, replica, batch)

    def average(self) -> None:
        """Every parameter's gradient becomes the mean over the replicas; a missing one counts as zeros, unless all of them miss."""
        for group in zip(*(replica.parameters() for replica in self.replicas), strict=True):
            present = [p.grad for p in group if p.grad is not None]
            if not present:
                continue
            mean = torch.stack([p.grad.to_dense() if p.grad is not None else torch.zeros_like(p) for p in group]).div(len(group)).sum(0)
            for p in group:
                p.grad = mean.to_sparse(1) if present[0].is_sparse else mean.clone()

    def zero_grad(self) -> None:
        for replica in self.replicas:
            replica.zero_grad()

    def gradients(self) -> dict[str, Tensor | None]:
        return gradients(self.replicas[0])


class Trial:
    """A wrapped model of this rank, and its oracle, taken through the same steps."""

    def __init__(
        self, rank: RankContext, make: MakeModule, optimizer: Callable[[Any], torch.optim.Optimizer] | None = None, **options: Any
    ):
        self.rank = rank.rank
        self.ddp = DistributedDataParallel(build(make), **options)
        self.oracle = Oracle(make, rank.world_size)
        self._optimizers = [optimizer(m.parameters()) for m in (self.ddp, *self.oracle.replicas)] if optimizer else []
        self.steps = 0
        self._label = ", ".join(f"{name}={value}" for name, value in options.items())

    @property
    def module(self) -> Any:
        return self.ddp.module

    def step(self, step: Step, batches: Sequence[Any], *, zero_grad: bool = True) -> None:
        """One step, on cleared gradients unless told otherwise: the gradients must be right, then the optimizer's weights."""
        self.steps += 1
        if zero_grad:
            self.zero_grad()
        run(step, self.ddp, batches[self.rank])
        self.oracle.step(step, batches)
        self.check()
        if self._optimizers:
            for optimizer in self._optimizers:
                optimizer.step()
            self.check_weights()

    def zero_grad(self) -> None:
        self.module.zero_grad()
        self.oracle.zero_grad()

    def check(self) -> None:
        """The gradients are the oracle's, bit for bit."""
        check_equal(gradients(self.module), self.oracle.gradients(), f"gradient in step {self.steps} [{self._label}]")

    def check_weights(self) -> None:
        """The weights are the oracle's, bit for bit."""
        expected = dict(self.oracle.replicas[0].named_parameters())
        check_equal(dict(self.module.named_parameters()), expected, f"weight in step {self.steps} [{self._label}]")

    def change(self, change: Callable[[nn.Module], Any]) -> None:
        """Does the same to the wrapped model and to every replica."""
        for model in (self.module, *self.oracle.replicas):
            change(model)


def run(step: Step, model: nn.Module, batch: Any) -> None:
    """A forward and a backward."""
    loss = step(model, batch)
    if loss is not None:
        loss.backward()  # type: ignore[no-untyped-call]


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Every parameter's gradient, by name."""
    return {name: p.grad for name, p in model.named_parameters()}


def check_equal(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    """Named tensors are equal bit for bit, with dtype, layout and shape."""
    assert found.keys() == expected.keys(), f"{what}: there are {sorted(found)}, expected {sorted(expected)}"
    wrong = [f"{name} {problem}" for name in expected for problem in differences(found[name], expected[name])]
    assert not wrong, f"{what}: " + "; ".join(wrong)


def differences(found: Tensor | None, expected: Tensor | None) -> Iterator[str]:
    """How one tensor differs from another, in words; nothing if it doesn't."""
    if found is None or expected is None:
        if found is not expected:
            yield f"is {found}, expected {expected}"
        return
    facts = [(t.dtype, t.layout, tuple(t.shape)) for t in (found, expected)]
    if facts[0] != facts[1]:
        yield f"is {facts[0]}, expected {facts[1]}"
    elif not torch.equal(found.detach().to_dense(), expected.detach().to_dense()):
        yield f"is {found.detach().to_dense().tolist()}, expected {expected.detach().to_dense().tolist()}"


@contextlib.contextmanager
def raises_everywhere(kind: type[Exception], *words: str) -> Iterator[None]:
    """The body raises `kind` with these words, and every rank raises the same message."""
    from tests.ddp.on_ranks import exchange

    raised: Exception | None = None
    try:
        yield
    except Exception as error:
        raised = error
    told = exchange(None if raised is None else f"{type(raised).__name__}: {raised}")
    assert raised is not None, f"nothing was raised here; by rank: {told}"
    if not isinstance(raised, kind):
        raise raised
    assert all(word in str(raised) for word in words), f"{words} are not all in {told}"
    assert len(set(told)) == 1, f"the ranks' messages differ: {told}"
