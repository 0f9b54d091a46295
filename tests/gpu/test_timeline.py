"""A timeline's times on a real device."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn

import ddpcomm
from ddpcomm.trace import read
from tests.rank_process import RankContext
from tests.ranks import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]
STEPS = 4


def train(context: RankContext, path: Path) -> list[torch.Tensor]:
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 512)).cuda()
    ddp = ddpcomm.DistributedDataParallel(model, device_ids=[0], bucket_cap_mb=1, transport="nccl")
    found = []
    for recorded in (False, True):
        with ddp.timeline(path) if recorded else ddp.no_sync(enabled=False):
            for _ in range(STEPS):
                ddp.zero_grad()
                ddp(torch.ones(64, 512, device="cuda")).square().sum().backward()
        found += [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    ddp.close()
    return found


def test_spans_are_in_order(tmp_path: Path) -> None:
    pytest.importorskip("nccl.bindings.nccl", reason="nccl4py is not installed")
    path = tmp_path / "trace.json"
    with RankPool(1, timeout=timedelta(seconds=240)) as pool:
        (gradients,) = pool.run(train, path)
    assert all(map(torch.equal, gradients[:4], gradients[4:]))
    (trace,) = read(path)
    assert (trace.steps, trace.transport, trace.device) == (STEPS, "nccl", "cuda:0")
    for number in range(STEPS):
        own = {event["name"]: event for event in trace.events if event["args"]["step"] == number}
        buckets = [event["args"]["bucket"] for event in own.values() if event["cat"] == "all_reduce"]
        assert len(buckets) >= 2
        for bucket in buckets:
            flatten, reduce, wait = (own[f"{what} {bucket}"] for what in ("flatten", "all-reduce", "wait"))
            assert reduce["tid"].startswith("stream ")
            assert flatten["dur"] > 0
            assert reduce["dur"] >= 0  # alone, a rank has nothing to reduce
            assert flatten["ts"] + flatten["dur"] <= reduce["ts"] + 1000  # an event tells no more than half a microsecond
            assert reduce["ts"] + reduce["dur"] <= wait["ts"] + wait["dur"] + 1000
        assert own["backward"]["dur"] > 0
