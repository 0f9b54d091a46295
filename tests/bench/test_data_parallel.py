"""bench/data_parallel.py: rank 0 works for all. On CPU ranks the module itself stands in for its replicas on GPUs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bench import devices, rivals, steps
from bench.data_parallel import DataParallel
from bench.models import Case
from bench.subjects import NONE, TORCH, plain, torch_ddp
from tests.ranks import RankContext, RankPool

pytestmark = pytest.mark.timeout(120)
CASE = Case("tiny", "nothing", lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), lambda: torch.randn(5, 3))


class OwnBatchOnly(DataParallel):
    """It forgets the other ranks."""

    def forward(self, batch: Tensor) -> Tensor:
        self._batches = batch
        return super().forward(batch)


def prepare(context: RankContext, wrap: type[DataParallel]) -> tuple[str, tuple[int, ...], bool]:
    wraps = {NONE: plain, TORCH: torch_ddp(), rivals.DATA_PARALLEL: wrap}
    try:
        replicas = steps.prepare(context, CASE, wraps, warm_up_steps=1)
    except ValueError as error:
        return str(error), (), False
    model = replicas.models[rivals.DATA_PARALLEL]
    steps.backward(model, CASE.loss(model, replicas.batch))
    return "", tuple(model._batches.shape), all(p.grad is not None for p in model.parameters())


def test_it_has_the_average_over_all_batches_on_rank_0(two_ranks: RankPool) -> None:
    assert two_ranks.run(prepare, DataParallel) == [("", (10, 3), True), ("", (10, 3), False)]


def test_a_wrong_average_is_not_timed(two_ranks: RankPool) -> None:
    text = "backward 1: nn.DataParallel differs from torch in gradient 0 of tiny"
    assert two_ranks.run(prepare, OwnBatchOnly) == [(text, (), False)] * 2


def test_it_is_a_rival_where_there_are_gpus() -> None:
    assert rivals.DATA_PARALLEL not in rivals.rivals()
    assert rivals.rivals(devices.CUDA)[rivals.DATA_PARALLEL] is DataParallel
    assert "nn.DataParallel (needs GPUs: --device cuda)" in rivals.absent()
    assert "nn.DataParallel" not in rivals.absent(devices.CUDA)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_a_rank_without_a_gpu_is_told() -> None:
    with pytest.raises(ValueError, match="rank 0 needs a GPU of its own, and there are 0"):
        devices.take(devices.CUDA, 0)
    assert devices.take(devices.CPU, 3) == torch.device("cpu")
