"""`stats()`, and torch's names for the same."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import nn

import ddpcomm
from ddpcomm.comm.torch_ddp import TorchDDP
from ddpcomm.statistics import StepStatistics
from tests.rank_process import RankContext
from tests.ranks import RankPool

STEPS = 3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 4))


def train(context: RankContext) -> tuple[StepStatistics, StepStatistics, dict[str, Any], dict[str, Any]]:
    ddp = ddpcomm.DistributedDataParallel(model(), bucket_cap_mb=0.003)
    torch_ddp = TorchDDP(model(), bucket_cap_mb=0.003)
    before = ddp.stats()
    for wrapped in (ddp, torch_ddp):
        for _ in range(STEPS):
            wrapped(torch.ones(2, 8)).sum().backward()
    return before, ddp.stats(), ddp._get_ddp_logging_data(), torch_ddp._get_ddp_logging_data()


def test_stats_and_torchs_names(two_ranks: RankPool) -> None:
    for before, stats, own, torchs in two_ranks.run(train):
        assert (before.steps, before.rebuilt, before.last.exposed) == (0, False, timedelta(0))
        assert (stats.steps, stats.rebuilt, stats.buckets_reduced) == (STEPS, True, 3)
        assert sum(stats.bucket_bytes) == sum(stats.initial_bucket_bytes) == 4 * sum(p.numel() for p in model().parameters())
        for times in (stats.last, stats.average):
            assert min(times.forward, times.backward_compute, times.backward_communication) > timedelta(0)
            assert timedelta(0) <= times.overlap <= times.backward_compute
            assert times.exposed == times.backward_communication - times.overlap > timedelta(0)
        assert set(torchs) <= set(own)
        for name in ("has_rebuilt_buckets", "world_size", "iteration", "total_parameter_size_bytes", "num_parameter_tensors"):
            assert own[name] == torchs[name], name
        for name in ("bucket_sizes", "rebuilt_bucket_sizes"):
            assert sum(map(int, own[name].split(", "))) == sum(map(int, torchs[name].split(", ")))
        assert own["has_sync_bn"] == own["is_multi_device_module"] == 0
        microseconds = stats.average.backward_communication / timedelta(microseconds=1)
        assert abs(own["avg_backward_comm_time"] / 1e3 - microseconds) <= 1
