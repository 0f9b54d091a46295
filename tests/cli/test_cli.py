"""The command line."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ddpcomm
from ddpcomm.cli import app, bench, checks, doctor, main
from ddpcomm.cli.checks import Check
from ddpcomm.comm import probe
from ddpcomm.errors import ConfigurationError
from ddpcomm.trace import write
from tests.unit.test_trace import trace

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """A trace file for each of two ranks, the second 2 ms late."""
    paths = [tmp_path / f"trace.rank{rank}.json" for rank in range(2)]
    for rank, path in enumerate(paths):
        write([trace(rank, late_ms=2 * rank)], path)
    return paths


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_timeline_prints_the_findings_and_draws(files: list[Path], tmp_path: Path) -> None:
    merged = tmp_path / "all.json"
    code, output = run("timeline", *files, "--merged", merged)
    assert code == 0
    lines = output.splitlines()
    assert "overlap share: 64% of the communication lay within backward" in lines
    assert "exposed: 14.00 ms a step, on the rank where it is the most" in lines
    assert "slowest bucket: 0 (7.629 MiB), 23.000 ms" in lines
    assert "straggling rank: 1, the last in 100% of the all-reduces, 2.00 ms behind the first on average" in lines
    assert (tmp_path / "trace.rank0.png").read_bytes().startswith(PNG)
    assert [line for line in run("timeline", merged, "--no-picture")[1].splitlines() if line in lines[-8:]]


def test_timeline_draws_where_it_is_told_to(files: list[Path], tmp_path: Path) -> None:
    assert run("timeline", *files, "--png", tmp_path / "new" / "step.png")[0] == 0
    assert (tmp_path / "new" / "step.png").read_bytes().startswith(PNG)
    assert not (tmp_path / "trace.rank0.png").exists()
    code, _ = run("timeline", *files, "--no-picture")
    assert code == 0
    assert not (tmp_path / "trace.rank0.png").exists()


def test_what_can_not_be_read_is_told_in_a_line(
    files: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ddpcomm", "timeline", str(files[0]), str(files[0])])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "rank 0 is in several of the files" in error
    assert "Traceback" not in error


def test_bench_passes_its_arguments_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called: list[tuple[list[str], Path]] = []

    def note(command: list[str], *, cwd: Path, check: bool) -> subprocess.CompletedProcess[str]:
        called.append((command[1:], cwd))
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", note)
    assert run("bench", "--only", "allreduce", "--output", "x")[0] == 3
    assert called == [(["-m", "bench", "--only", "allreduce", "--output", "x"], bench.source_tree())]


def test_bench_needs_a_source_tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ddpcomm, "__file__", str(tmp_path / "site-packages" / "ddpcomm" / "__init__.py"))
    with pytest.raises(ConfigurationError, match="checkout"):
        bench.source_tree()


GOOD = Check("transport", "process_group", "ok", "", required=True)


def test_verdict() -> None:
    assert doctor.judge([GOOD])[1]
    words, works = doctor.judge([GOOD, Check("transport", "shared_memory", "failed", "full")])
    assert works
    assert "Impaired: transport: shared_memory" in words
    words, works = doctor.judge([GOOD, replace(GOOD, area="kernel", what="native, avx2", state="failed")])
    assert not works
    assert "NOT fit for training. Failed: kernel: native, avx2" in words


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    flatten = ddpcomm.ops.flatten

    def wrong(tensors: object, out: object, *arguments: object, **keywords: object) -> None:
        flatten(tensors, out, *arguments, **keywords)  # type: ignore[arg-type]
        if keywords.get("implementation") == "native":
            out[-1] += 1  # type: ignore[index]

    monkeypatch.setattr(ddpcomm.ops, "flatten", wrong)
    states = {check.what: check.state for check in checks.kernels()}
    assert states["native on cpu"] == "failed"
    assert states["torch on cpu"] == "ok"
    monkeypatch.setattr(checks, "transports", list)
    code, output = run("doctor")
    assert code == 1
    assert "NOT fit" in output


def test_a_transport_that_fails_is_found() -> None:
    found = probe.try_transports(("process_group", "nonsense", "shared_memory"), "cpu")
    assert found["process_group"] == found["shared_memory"] == ""
    assert "transport must be one of" in found["nonsense"]


def test_doctor_as_a_command() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "ddpcomm", "doctor", "--no-ranks"], capture_output=True, text=True, timeout=120, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "verdict: fit for training on" in answer.stdout


def test_commands() -> None:
    code, output = run("--help")
    assert code == 0
    for name in ("doctor", "timeline", "bench"):
        assert name in output
