"""bench.kernels: that it works, checks what it times, and writes rows. No speed is asserted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import kernels
from bench.kernel_subjects import OPERATIONS, Problem, implementation_call
from bench.rows import read_rows
from bench.shapes import SHAPES, numels


def test_writes_rows_and_a_picture(tmp_path: Path) -> None:
    arguments = [*OPERATIONS, "--shapes", "small400", "--repeats", "2", "--device", "cpu", "--dtype", "bf16", "--output", str(tmp_path)]
    kernels.main(arguments)
    rows = read_rows(tmp_path / "kernels.jsonl")
    assert {row.case.split()[0] for row in rows} == set(OPERATIONS)
    assert {"ddpcomm native", "ddpcomm torch", "torch.cat", "copy"} <= {row.subject for row in rows}
    assert all(row.p50 > 0 and row.count == 2 for row in rows)
    assert (tmp_path / "kernels.png").stat().st_size > 0


def test_another_dtype_in_the_buffer_and_one_implementation(tmp_path: Path) -> None:
    arguments = ["flatten", "--impl", "native", "--shapes", "small400", "--repeats", "1", "--device", "cpu"]
    arguments += ["--dtype", "fp32", "--buffer-dtype", "bf16"]
    kernels.main([*arguments, "--output", str(tmp_path)])
    subjects = {row.subject for row in read_rows(tmp_path / "kernels.jsonl")}
    assert "ddpcomm native" in subjects
    assert "ddpcomm torch" not in subjects
    assert "torch.cat" not in subjects, "it can't cast"


@pytest.mark.parametrize("operation", ["flatten", "unflatten"])
def test_what_is_wrong_is_not_timed(operation: str) -> None:
    problem = Problem([5, 7], torch.float32, torch.float32, 0.5, torch.device("cpu"))
    right = implementation_call(operation, "native", problem)
    kernels.check(operation, "native", right, problem)

    def wrong() -> None:
        right()
        (problem.buffer if operation == "flatten" else problem.tensors[1])[3] += 1

    with pytest.raises(ValueError, match="differs from the reference"):
        kernels.check(operation, "wrong", wrong, problem)


def test_unknown_names_are_refused() -> None:
    for arguments in (["fold"], ["flatten", "--shapes", "alexnet"]):
        with pytest.raises(SystemExit):
            kernels.main(arguments)


@pytest.mark.parametrize(
    ("name", "tensors", "millions"),
    [("resnet50", 161, 25.557), ("bert_large", 391, 335.142), ("gpt2_xl", 580, 1557.611), ("llama7b_block", 9, 202.383)],
)
def test_shapes_are_those_of_the_models(name: str, tensors: int, millions: float) -> None:
    sizes = numels(name)
    assert len(sizes) == tensors
    assert round(sum(sizes) / 1e6, 3) == millions


def test_a_limit_takes_the_first_tensors() -> None:
    assert numels("resnet50", 1) == numels("resnet50")[:1]
    assert sum(numels("resnet50", 1_000_000)) <= 1_000_000
    assert set(SHAPES) >= {"small400", "tiny10000"}
