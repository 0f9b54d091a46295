"""Options of the nccl transport that are "auto": real ranks, real gradients, all-reduces that take longer with some options."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddpcomm
import ddpcomm.transport_tuning
from ddpcomm.comm.nccl import NcclCommunicator
from ddpcomm.errors import ConfigurationError, ConfigurationTypeError
from tests.comm.nccl_over_gloo import nccl_over_gloo
from tests.rank_process import RankContext
from tests.ranks import RankPool

SLOW_SECONDS = 0.01
SETTLING, RACE = 4, 24
BEST = {"communicators": 2, "max_ctas": 8}


class Transports:
    """Takes the place of `create_communicator`. All-reduces with other options than the best ones are slow; 16 CTAs can't be had."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self.made: list[NcclCommunicator] = []

    def __call__(self, process_group: Any, device: Any, transport: str = "auto", timeout: Any = None, **options: Any) -> NcclCommunicator:
        if options.get("max_ctas") == 16:
            raise ConfigurationError("this library has no 16 CTAs")
        communicator, _ = nccl_over_gloo(self._context, **options)
        all_reduce, misses = communicator.all_reduce, sum(options.get(name) != value for name, value in BEST.items())

        def slow(*arguments: Any, **keywords: Any) -> Any:
            time.sleep(misses * SLOW_SECONDS)
            return all_reduce(*arguments, **keywords)

        communicator.all_reduce = slow  # type: ignore[method-assign]
        self.made.append(communicator)
        return communicator


def wrap(transports: Transports, **arguments: Any) -> ddpcomm.DistributedDataParallel:
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddpcomm.ddp.create_communicator", transports)
        return ddpcomm.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)), transport="nccl", **arguments)


def step(ddp: ddpcomm.DistributedDataParallel, transports: Transports, rank: int, number: int) -> bool:
    """Whether the gradients are the averages."""
    inputs = [(torch.arange(8.0).view(2, 4) + number + other).remainder(5) for other in range(2)]
    ddp.zero_grad()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddpcomm.transport_choice.create_communicator", transports)
        ddp(inputs[rank]).sum().backward()
    found = [p.grad for p in ddp.module.parameters() if p.grad is not None]
    wanted: list[Tensor] = []
    for data in inputs:
        own = torch.autograd.grad(ddp.module(data).sum() / 2, list(ddp.module.parameters()))
        wanted = [a + b for a, b in zip(wanted, own, strict=True)] if wanted else list(own)
    return all(map(torch.equal, found, wanted))


def tune(context: RankContext, directory: str, view: bool) -> dict[str, Any]:
    transports, lines = Transports(context), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("ddpcomm.auto_tuning")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    ddp = wrap(transports, transport_options={"communicators": "auto", "max_ctas": "auto"}, gradient_as_bucket_view=view)
    backwards, right = 0, True
    while ddp._reducer.tuner is not None and backwards < 300:
        right = step(ddp, transports, context.rank, backwards) and right
        backwards += 1
    right = step(ddp, transports, context.rank, backwards) and right
    log.removeHandler(handler)
    open_ones = [communicator for communicator in transports.made if not communicator.closed]
    path = Path(directory) / f"plan{context.rank}.json"
    ddp.save_plan(path)
    again = wrap(Transports(context), plan=path, transport_options={"communicators": "auto", "max_ctas": "auto"})
    assert again._reducer.tuner is None
    options = again._communicator.options  # type: ignore[attr-defined]
    result = {
        "right": right,
        "backwards": backwards,
        "made": [(each.options.communicators, each.options.max_ctas) for each in transports.made],
        "kept": [(each.options.communicators, each.options.max_ctas) for each in open_ones],
        "in_use": open_ones == [ddp._communicator] and ddp._reducer.communicator is ddp._communicator,
        "restarted": (options.communicators, options.max_ctas),
        "lines": lines,
    }
    again.close()
    ddp.close()
    return result


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_the_best_of_what_can_be_had_is_kept(two_ranks: RankPool, tmp_path: Path, view: bool) -> None:
    for rank, result in enumerate(two_ranks.run(tune, str(tmp_path), view)):
        assert result["right"]
        assert result["backwards"] == SETTLING + 4 * RACE
        assert result["made"] == [(1, None), (2, None), (4, None), (2, 8), (2, 4)]
        assert result["kept"] == [(2, 8)]
        assert result["in_use"]
        assert result["restarted"] == (2, 8)
        assert result["lines"] == (["nccl with communicators 2, max_ctas 8"] if rank == 0 else [])


def tune_both(context: RankContext) -> tuple[bool, tuple[int, int | None]]:
    transports, number, right = Transports(context), 0, True
    ddp = wrap(transports, bucket_cap_mb="auto", transport_options={"communicators": "auto"})
    while ddp._reducer.tuner is not None and number < 300:
        right = step(ddp, transports, context.rank, number) and right
        number += 1
    assert ddp.plan is not None
    found = ddp.plan.communicators, ddp._communicator.options.communicators  # type: ignore[attr-defined]
    ddp.close()
    return right, found


def test_buckets_and_options_together(two_ranks: RankPool) -> None:
    assert two_ranks.run(tune_both) == [(True, (2, 2))] * 2


def closed_in_between(context: RankContext) -> list[bool]:
    transports = Transports(context)
    ddp = wrap(transports, transport_options={"communicators": "auto"})
    for number in range(SETTLING + RACE // 2):
        assert step(ddp, transports, context.rank, number)
    assert len(transports.made) == 2
    ddp.close()
    return [communicator.closed for communicator in transports.made]


def test_closing_while_tuning_closes_both_communicators(two_ranks: RankPool) -> None:
    assert two_ranks.run(closed_in_between) == [[True, True]] * 2


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"transport_options": {"communicators": 2}}, ConfigurationError, "a transport that is named"),
        ({"transport": "process_group", "transport_options": {"communicators": "auto"}}, ConfigurationError, 'transport="nccl" alone'),
        ({"transport": "nccl", "transport_options": 3}, ConfigurationTypeError, "must map names of options"),
        ({"transport": "nccl", "transport_options": {3: 3}}, ConfigurationTypeError, "must map names of options"),
        ({"transport": "shared_memory", "transport_options": {"communicators": 2}}, ConfigurationError, "communicators"),
    ],
)
def test_options_that_cannot_be(two_ranks: RankPool, arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    two_ranks.run(refuse, arguments, kind, text)


def refuse(_: RankContext, arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        ddpcomm.DistributedDataParallel(nn.Linear(2, 2), **arguments)
