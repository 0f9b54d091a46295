"""DistributedDataParallel itself over the nccl transport: real ranks and real gradients over Gloo, every kernel written down.

Each bucket has a communicator of its own, so that no wait for one can stand in for another's.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ddpcomm
from tests.comm.hazards import find_hazards, without_each_order
from tests.comm.kernels_on_streams import kernels_written_down
from tests.comm.nccl_over_gloo import nccl_over_gloo
from tests.rank_process import RankContext
from tests.ranks import RankPool

KIB = 1 / 1024  # MiB


class Net(nn.Module):
    """Whole-numbered weights; `spare` is used only if asked for, and `wide` is larger than any bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.wide = nn.Linear(16, 64)
        self.last = nn.Linear(64, 1)
        self.spare = nn.Linear(64, 1)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_((torch.arange(parameter.numel()) + number).remainder(3).view_as(parameter) - 1)

    def forward(self, data: Tensor, spare: bool) -> Tensor:
        hidden = self.wide(self.first(data))
        return self.last(hidden) + (self.spare(hidden) if spare else 0)


def inputs(rank: int, step: int) -> Tensor:
    return (torch.arange(16.0) + 3 * rank + step).remainder(5).view(2, 8)


def gradients(net: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


def expected(scenario: str, steps: int) -> list[Tensor]:
    """One process that sees both ranks' inputs."""
    net = Net()
    for step in range(steps):
        if scenario != "no_sync" or step == 0:
            net.zero_grad()
        for rank in range(2):
            (net(inputs(rank, step), spare=scenario != "unused" or rank == step % 2).sum() / 2).backward()
    return gradients(net)


def train(context: RankContext, scenario: str, view: bool) -> tuple[bool, list[str], list[str], int]:
    """Whether the gradients are right; the hazards; records and waits that can be left out unnoticed; how many there are."""
    steps = 3
    communicator, recorder = nccl_over_gloo(context, communicators=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddpcomm.ddp.create_communicator", lambda *arguments, **options: communicator)
        net = ddpcomm.DistributedDataParallel(
            Net(), gradient_as_bucket_view=view, bucket_cap_mb=KIB, find_unused_parameters=scenario == "unused", init_sync=False
        )
    recorder.runtime.idle = False
    with kernels_written_down(recorder):
        for step in range(steps):
            if scenario != "no_sync" or step == 0:
                net.zero_grad()
            local = scenario == "no_sync" and step < steps - 1
            with net.no_sync(enabled=local):
                net(inputs(context.rank, step), spare=scenario != "unused" or context.rank == step % 2).sum().backward()
            recorder.kernel("optimizer", reads=[parameter.grad for parameter in net.parameters()])
    right = all(map(torch.equal, gradients(net.module), expected(scenario, steps)))
    trace = [entry for entry in recorder.trace if entry.stream != "host"]
    mutants = without_each_order(trace)
    unnoticed = [f"{trace.index(removed)}: {removed}" for removed, mutant in mutants if not find_hazards(mutant)]
    recorder.runtime.idle = True
    net.close()
    return right, find_hazards(trace), unnoticed, len(mutants)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("scenario", ["plain", "no_sync", "unused"])
def test_ddp_waits_for_all_that_it_must(two_ranks: RankPool, scenario: str, view: bool) -> None:
    for right, hazards, unnoticed, orders in two_ranks.run(train, scenario, view):
        assert right
        assert hazards == []
        assert unnoticed == []
        assert orders > 10
