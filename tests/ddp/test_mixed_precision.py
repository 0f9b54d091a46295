"""`mixed_precision=`: forward and backward in a short dtype over parameters and gradients in full precision."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel.distributed import _MixedPrecision as MixedPrecision
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

from ddpcomm import DistributedDataParallel, hooks
from ddpcomm.errors import ConfigurationError, ConfigurationTypeError, RankMismatchError
from tests.ddp.on_ranks import on_two_ranks
from tests.ddp.oracle import check_equal, differences, gradients, raises_everywhere
from tests.ranks import RankContext

BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)


class Net(nn.Module):
    """Tied, frozen and direct parameters, buffers of two kinds; keeps which dtypes its forward meets.

    A re-entrant checkpoint casts what it recomputes once more, so that a tied parameter's two gradients are added after the cast, not
    before: nothing is tied there.
    """

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.last = nn.Linear(8, 8)
        if not reentrant:
            self.last.weight = self.block[2].weight
        self.frozen = nn.Linear(8, 3).requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(3) + 0.5)
        self.register_buffer("shift", torch.rand(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.reentrant = reentrant
        self.met: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.met |= {x.dtype, *(p.dtype for p in self.parameters())}
        hidden = self.first(x).relu()
        hidden = self.block(hidden) if self.reentrant is None else checkpoint(self.block, hidden, use_reentrant=self.reentrant)
        return self.frozen(self.last(hidden)) * self.scale + self.shift  # type: ignore[no-any-return]


def batches(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 6, generator=generator) for _ in range(2)]


def expected_gradients(module: Net, inputs: list[Tensor], dtype: torch.dtype, wire: torch.dtype) -> dict[str, Tensor | None]:
    """Each rank runs on casts of the parameters; halves of the gradients are added in the wire's dtype."""
    by_rank = []
    for x in inputs:
        replica = copy.deepcopy(module)
        replica.reentrant = None
        parameters = dict(replica.named_parameters())
        functional_call(replica, {name: p.to(dtype) for name, p in parameters.items()}, (x.to(dtype),)).sum().backward()
        by_rank.append({name: p.grad for name, p in parameters.items()})
    halves = {name: [None if g[name] is None else (g[name] / 2).to(wire) for g in by_rank] for name in by_rank[0]}
    return {name: None if pair[0] is None else (pair[0] + pair[1]).float() for name, pair in halves.items()}


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])
@on_two_ranks
def test_steps_equal_the_oracle(rank: RankContext, reentrant: bool | None) -> None:
    """Dtypes met and gradients, bit for bit, over a few steps, without and with checkpoints."""
    for wire in (None, torch.float32, torch.bfloat16):
        for view in (False, True):
            config = MixedPrecision(torch.bfloat16, wire, torch.bfloat16)
            ddp = DistributedDataParallel(Net(reentrant), mixed_precision=config, gradient_as_bucket_view=view)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            assert (ddp.module.shift.dtype, ddp.module.count.dtype) == (torch.bfloat16, torch.int64)
            for turn in range(3):
                inputs = batches(turn)
                expected = expected_gradients(ddp.module, inputs, torch.bfloat16, wire or torch.bfloat16)
                optimizer.zero_grad(set_to_none=turn == 1)
                ddp.module.met.clear()
                output = ddp(inputs[rank.rank])
                assert (output.dtype, ddp.module.met) == (torch.bfloat16, {torch.bfloat16})
                assert {p.dtype for p in ddp.parameters()} == {torch.float32}
                output.sum().backward()
                check_equal(gradients(ddp.module), expected, f"gradient, wire {wire}, view {view}, turn {turn}")
                optimizer.step()


@on_two_ranks
def test_accumulates_in_full_precision(rank: RankContext) -> None:
    """Many small gradients under no_sync add up, which they would not in bfloat16."""
    config = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False), mixed_precision=config)
    with ddp.no_sync():
        ddp(torch.full((1, 1), 256.0)).sum().backward()
        for _ in range(9):
            ddp(torch.ones(1, 1)).sum().backward()
    ddp(torch.ones(1, 1)).sum().backward()
    assert ddp.module.weight.grad.item() == 266.0


@on_two_ranks
def test_ignored_stay_as_they_are(rank: RankContext) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mine = nn.Linear(4, 4)
            self.theirs = nn.Linear(4, 4)
            self.register_buffer("plain", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            assert (self.mine.weight.dtype, self.theirs.weight.dtype) == (torch.bfloat16, torch.float32)
            return self.mine(x).float() + self.theirs(x.float()) + self.plain  # type: ignore[no-any-return]

    module = Two()
    names = ["theirs.weight", "theirs.bias", "plain"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    ddp = DistributedDataParallel(module, mixed_precision=BF16)
    ddp(torch.ones(2, 4)).sum().backward()
    assert module.plain.dtype == torch.float32
    assert {p.dtype for p in module.parameters()} == {torch.float32}


@on_two_ranks
def test_parameters_are_back_after_every_forward(rank: RankContext) -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Tensor, fail: bool = False) -> Tensor:
            if fail:
                raise ZeroDivisionError
            return self.lin(x)  # type: ignore[no-any-return]

    ddp = DistributedDataParallel(Fails(), mixed_precision=BF16)
    own = list(ddp.parameters())
    with pytest.raises(ZeroDivisionError):
        ddp(torch.ones(1, 4), fail=True)
    with torch.no_grad():
        assert ddp(torch.ones(1, 4)).dtype == torch.bfloat16
    ddp.eval()(torch.ones(1, 4))
    assert [id(p) for p in ddp.parameters()] == [id(p) for p in own]
    assert {p.dtype for p in own} == {torch.float32}
    assert ddp.module(torch.ones(1, 4)).dtype == torch.float32, "the inner module by itself runs in full precision"


@dataclasses.dataclass
class Batch:
    x: Tensor
    index: Tensor


@on_two_ranks
def test_inputs_are_cast_wherever_they_are(rank: RankContext) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(2, 3)

        def forward(self, batch: Batch, *, more: dict[str, Any]) -> Tensor:
            assert batch.x.dtype == more["list"][0].dtype == more["packed"].data.dtype == torch.bfloat16
            assert batch.index.dtype == torch.int64
            assert more["name"] == "text"
            return self.lstm(more["packed"])[0].data.sum() + batch.x.sum()  # type: ignore[no-any-return]

    ddp = DistributedDataParallel(Reads(), mixed_precision=BF16)
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    for _ in range(2):
        loss = ddp(Batch(torch.ones(2), torch.arange(2)), more={"list": [torch.ones(1)], "packed": packed, "name": "text"})
        loss.backward()
    assert {p.grad.dtype for p in ddp.parameters() if p.grad is not None} == {torch.float32}


@on_two_ranks
def test_with_a_communication_hook(rank: RankContext) -> None:
    """A wire format of its own counts before `reduce_dtype`."""
    inputs = batches(0)
    ddp = DistributedDataParallel(Net(), mixed_precision=BF16)
    ddp.register_comm_hook(None, hooks.fp16)
    expected = expected_gradients(ddp.module, inputs, torch.bfloat16, torch.float16)
    ddp(inputs[rank.rank]).sum().backward()
    check_equal(gradients(ddp.module), expected, "gradient")


@on_two_ranks
def test_deepcopy_and_close(rank: RankContext) -> None:
    inputs = batches(0)
    ddp = DistributedDataParallel(Net(), mixed_precision=BF16)
    twin = copy.deepcopy(ddp)
    for model in (ddp, twin):
        model(inputs[rank.rank]).sum().backward()
    check_equal(gradients(twin.module), gradients(ddp.module), "gradient of the copy")
    ddp.close()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in ddp.module.modules())
    with pytest.raises(RuntimeError, match="dtype"):
        ddp.module.first(inputs[0].bfloat16())


@on_two_ranks
def test_config_is_checked(rank: RankContext) -> None:
    with pytest.raises(ConfigurationTypeError, match="param_dtype"):
        DistributedDataParallel(nn.Linear(1, 1), mixed_precision=torch.bfloat16)
    with pytest.raises(ConfigurationError, match=r"reduce_dtype.*torch\.int32"):
        DistributedDataParallel(nn.Linear(1, 1), mixed_precision=MixedPrecision(reduce_dtype=torch.int32))
    with raises_everywhere(RankMismatchError, "mixed_precision"):
        DistributedDataParallel(nn.Linear(1, 1), mixed_precision=BF16 if rank.rank else None)


@on_two_ranks
def test_reduce_alone(rank: RankContext) -> None:
    """Without `param_dtype` nothing but the wire is short."""
    ddp = DistributedDataParallel(Net(), mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16))
    inputs = batches(0)
    expected = expected_gradients(ddp.module, inputs, torch.float32, torch.bfloat16)
    output = ddp(inputs[rank.rank])
    assert output.dtype == torch.float32
    output.sum().backward()
    assert not list(differences(ddp.module.first.weight.grad, expected["first.weight"]))


class Recurrent(nn.Module):
    """Keeps parameters in lists and dictionaries of its own, as RNNs do, and another model's, which are not its."""

    def __init__(self, foreign: nn.Parameter) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = nn.LSTM(3, 4, batch_first=True)
        self.last = nn.Linear(4, 2)
        self.kept = {"weight": self.last.weight, "bias": [self.last.bias][0]}
        self.foreign = [foreign]
        self.met: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.met += [self.foreign[0].dtype, *(w.dtype for w in self.rnn._flat_weights)]
        return nn.functional.linear(self.rnn(x)[0], self.kept["weight"], self.kept["bias"])


@on_two_ranks
def test_parameters_in_lists_and_dictionaries_are_cast(rank: RankContext) -> None:
    foreign = nn.Parameter(torch.zeros(2))
    module = Recurrent(foreign)
    kept = [*module.rnn._flat_weights, *module.kept.values()]
    ddp = DistributedDataParallel(module, mixed_precision=BF16)
    inputs = [torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    output = ddp(inputs[rank.rank])
    assert output.dtype == torch.bfloat16
    assert module.met == [torch.float32, *[torch.bfloat16] * 4]
    assert [id(p) for p in (*module.rnn._flat_weights, *module.kept.values())] == [id(p) for p in kept]
    output.float().sum().backward()
    by_rank = []
    for x in inputs:
        short = copy.deepcopy(module).bfloat16()
        short.kept = {"weight": short.last.weight, "bias": short.last.bias}
        short(x.bfloat16()).float().sum().backward()
        by_rank.append(gradients(short))
    expected = {name: sum(g[name] / 2 for g in by_rank).float() for name in by_rank[0]}
    check_equal(gradients(module), expected, "gradients")
    ddp.close()
