"""Random programs on two ranks, against the oracle, bit for bit: layers shared, left out, frozen and unfrozen; checkpoints of both kinds;
several forwards and backwards; synchronised or not; gradients cleared or not.

300 programs in CI. `DDPCOMM_EXAMPLES=5000 pytest tests/ddp/test_property.py` runs more. Programs that failed once stand here as examples.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ddpcomm.buckets
from ddpcomm import DistributedDataParallel
from ddpcomm.errors import LateGradientError
from tests.ddp.on_ranks import exchange
from tests.ddp.oracle import TINY_BUCKETS_MB, Oracle, build, gradients, no_sync, whole_numbers
from tests.ranks import RankContext, RankPool

WIDTH = 3
LAYERS = 4
EXAMPLES = int(os.environ.get("DDPCOMM_EXAMPLES", "300"))

Path = tuple[tuple[int, str], ...]
"""The layers that a forward goes through, each with how: "plain", "reentrant" or "recomputed" (checkpoints)."""


@dataclass(frozen=True)
class Step:
    """What happens between two looks at the gradients.

    Args:
        paths: by rank, the forwards that it runs.
        one_backward: add up the losses and run backward once, else once for each.
        synchronizes: outside of no_sync.
        clears: gradients are cleared before: "none", "zeros", or "" for not at all.
        toggled: layers that are frozen before, or unfrozen if they were.
    """

    paths: tuple[tuple[Path, ...], tuple[Path, ...]]
    one_backward: bool
    synchronizes: bool
    clears: str
    toggled: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    double_layers: frozenset[int]
    tied: bool
    options: tuple[tuple[str, Any], ...]
    steps: tuple[Step, ...]


class Pool(nn.Module):
    """Layers from which each forward takes some, in any order, any number of times. Values stay small whole numbers."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        types = [torch.float64 if i in program.double_layers else torch.float32 for i in range(LAYERS)]
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in types)
        if program.tied and types[0] == types[1]:
            self.layers[1].weight = self.layers[0].weight

    def forward(self, x: Tensor, path: Path) -> Tensor:
        for index, how in path:
            layer = self.layers[index]
            x = x.to(layer.weight.dtype)
            x = layer(x) if how == "plain" else checkpoint(layer, x, use_reentrant=how == "reentrant")
        return x.double().sum()


def toggle(model: Pool, layers: tuple[int, ...]) -> None:
    for index in layers:
        for parameter in model.layers[index].parameters():
            parameter.requires_grad_(not parameter.requires_grad)


def take(model: Any, step: Step, paths: tuple[Path, ...], batches: list[Tensor]) -> None:
    """The forwards and backwards of one rank."""
    losses = [model(x.clone().requires_grad_(), path) for x, path in zip(batches, paths, strict=True)]
    if step.one_backward:
        torch.stack(losses).sum().backward()
    else:
        for loss in losses:
            loss.backward()


def run_program(rank: RankContext, program: Program) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if dict(program.options)["transport_options"]:
            patch.setattr(ddpcomm.buckets, "LEAST_LEFT_BYTES", 0)
        run_on_oracle(rank, program)


def run_on_oracle(rank: RankContext, program: Program) -> None:
    ddp = DistributedDataParallel(build(lambda: Pool(program)), **dict(program.options))
    oracle = Oracle(lambda: Pool(program))
    models = [ddp.module, *oracle.replicas]
    for number, step in enumerate(program.steps):
        for model in models:
            toggle(model, step.toggled)
            if step.clears:
                model.zero_grad(set_to_none=step.clears == "none")
        batches = [whole_numbers(10 * number + i, 2, WIDTH, largest=2) for i in range(2)]
        for r, replica in enumerate(oracle.replicas):
            take(replica, step, step.paths[r], [b[r] for b in batches[: len(step.paths[r])]])
        late = ""
        try:
            mine = [b[rank.rank] for b in batches[: len(step.paths[rank.rank])]]
            if step.synchronizes:
                take(ddp, step, step.paths[rank.rank], mine)
            else:
                with no_sync(ddp):
                    take(ddp, step, step.paths[rank.rank], mine)
        except LateGradientError as error:
            late = str(error)
        told = exchange(late)
        assert len(set(map(bool, told))) == 1, f"step {number}: an error on one rank alone: {told}"
        if late:
            assert ddp.gradient_as_bucket_view, late
            return  # nothing is promised of a view that came late, but that both ranks hear of it
        if step.synchronizes:
            oracle.average()
        expected = gradients(oracle.replicas[rank.rank])
        for name, found in gradients(ddp.module).items():
            want = expected[name]
            assert (found is None) == (want is None), f"step {number}: {name} is {found}, expected {want}"
            assert want is None or torch.equal(found, want), f"step {number}: {name} is {found}, expected {want}"


hows = st.sampled_from(["plain", "plain", "reentrant", "recomputed"])
paths = st.lists(st.tuples(st.integers(0, LAYERS - 1), hows), min_size=1, max_size=3).map(tuple)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    forwards = draw(st.integers(1, 2))
    one_backward = draw(st.booleans())
    some = st.lists(paths, min_size=forwards, max_size=forwards).map(tuple)
    first = draw(some)
    return Step(
        paths=(first, draw(st.one_of(st.just(first), some))),
        one_backward=one_backward,
        synchronizes=draw(st.sampled_from([True, True, True, False])),
        clears=draw(st.sampled_from(["none", "none", "zeros", ""])),
        toggled=tuple(draw(st.sets(st.integers(0, LAYERS - 1), max_size=1))) if draw(st.integers(0, 4)) == 0 else (),
    )


READS_GRADIENTS = {"small_bytes": 64}
"""With this, and no lower limit for gradients, what a rank reduces of its own bucket is read where the gradients are."""

programs = st.builds(
    Program,
    double_layers=st.frozensets(st.integers(0, LAYERS - 1), max_size=2),
    tied=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "gradient_as_bucket_view": st.booleans(),
            "bucket_cap_mb": st.sampled_from([None, TINY_BUCKETS_MB]),
            "find_unused_parameters": st.just(True),
            **{"transport": st.just("shared_memory"), "transport_options": st.sampled_from([None, READS_GRADIENTS])},
        }
    ).map(lambda options: tuple(options.items())),
    steps=st.lists(steps(), min_size=1, max_size=4).map(tuple),
)


@pytest.mark.timeout(max(2400, EXAMPLES * 5))
@settings(  # a failure ends the two processes, so that shrinking it takes long: Phase.shrink is for the desk
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(program=programs)
def test_gradients_are_the_oracles(two_ranks: RankPool, program: Program) -> None:
    two_ranks.run(run_program, program)
