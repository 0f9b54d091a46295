"""What a benchmark or the example can't do is told in a line, with exit status 2, before anything runs."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from examples import train_gpt

BAD = {
    "__main__": ["--only nope", "--only ,"],
    "accumulation": ["--every 0", "--every 1,x", "--training-steps -1", "--models nope", "--steps 0", "--ranks 0", "--transport nope"],
    "allreduce": ["--ranks 1", "--ranks x", "--sizes 0", "--dtypes float31", "--rounds 0"],
    "breakdown": ["--models ,", "--ranks x"],
    "bucket_size": ["--mib 0", "--mib nan"],
    "chaos": ["--kills -1", "--kills 0", "--seconds 0", "--transport mpi", "--steps 3"],
    "communicators": ["--counts 0", "--mib -1"],
    "kernels": ["fold", "--shapes alexnet", "--impl native,nope", "--device nope", "--repeats 0", "--elements 0", "--threads 0"],
    "progress": ["--buckets 0", "--bucket-mib 0", "--rounds 0", "--ranks 0"],
    "scaling": ["--ranks 2,0"],
    "soak": ["--ways nope", "--wraps 0", "--looks 0"],
    "step_time": ["--models nope", "--steps 0", "--ranks 0", "--device tpu"],
    "timeline": ["--models nope", "--transport ,", "--steps 0", "--ranks 0"],
    "validate": ["--ranks 0", "--transport nope", "--rounds 0"],
}


@pytest.mark.parametrize(("name", "arguments"), [(name, text) for name, texts in BAD.items() for text in texts])
def test_a_benchmark_refuses(name: str, arguments: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(f"bench.{name}").main(arguments.split())
    assert caught.value.code == 2


def test_where_results_can_not_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as caught:
        importlib.import_module("bench.step_time").main(["--output", str(tmp_path / "file")])
    assert caught.value.code == 2
    assert "file can't be made a directory" in capsys.readouterr().err


def test_a_page_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        importlib.import_module("bench.results").main([str(tmp_path)])
    assert caught.value.code == 2
    assert "no rows of a benchmark" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        *("--steps 0", "--batch-size 0", "--context 0", "--validations 0", "--width 0", "--layers 0", "--heads 0", "--heads 3"),
        *("--learning-rate 0", "--learning-rate nan", "--bucket-cap-mb 0", "--ddp horovod", "--seed x"),
    ],
)
def test_the_example_refuses(arguments: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        train_gpt.main(arguments.split())
    assert caught.value.code == 2


def test_the_example_names_its_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match="torchrun"):
        train_gpt.main([])
