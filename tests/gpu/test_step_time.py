"""bench/step_time.py on GPUs: a rank each, gradients checked against torch's, nn.DataParallel among the rivals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import rivals, step_time
from bench.rows import read_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


def test_a_short_run_on_gpus(tmp_path: Path) -> None:
    ranks = min(2, torch.cuda.device_count())
    options = ["--device", "cuda", "--ranks", str(ranks), "--models", "tensors400", "--transport", "nccl", "--steps", "3"]
    step_time.main([*options, "--output", str(tmp_path)])
    rows = read_rows(tmp_path / "step_time.jsonl")
    assert {row.device for row in rows} == {"cuda"}
    assert {"ddpcomm nccl", "ddpcomm nccl view", *rivals.rivals("cuda")} <= {row.subject for row in rows}
