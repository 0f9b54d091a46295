"""Tables, pictures and the page of results: what is simulated says so."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from bench import report, results, scaling, steps
from bench.rows import Row, percentiles, write_rows

ROW = Row("scaling", "convnet", "torch", "step", "s", 2, "float32", {"bytes": 8}, **percentiles([1.0, 2.0, 3.0]))
SIMULATED = replace(ROW, case="resnet50 on dgx-a100", ranks=64, measured=False, device="dgx-a100", count=0)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Those that would be saved."""
    drawn: list[Figure] = []
    monkeypatch.setattr(report, "save", lambda figure, path: drawn.append(figure))
    return drawn


def test_a_short_line_leaves_its_last_columns_empty() -> None:
    table = report.Table("title", ["a", "b", "c"], [["1", "2", "3"], ["4"]])
    assert table.markdown() == "title\n\n| a | b | c |\n| --- | ---: | ---: |\n| 1 | 2 | 3 |\n| 4 |  |  |\n"


def test_simulated_lines_are_dashed_and_named_so(figures: list[Figure]) -> None:
    scaling.plot([ROW, replace(ROW, ranks=4), SIMULATED, replace(SIMULATED, ranks=128)], Path("scaling.png"))
    measured, simulated = (axes.lines[0] for axes in figures[0].axes)
    assert measured.get_linestyle() == "-"
    assert measured.get_label() == "torch"
    assert simulated.get_linestyle() == "--"
    assert simulated.get_label() == "torch (simulated)"
    assert "simulated" in figures[0].get_suptitle()
    assert "CPU" in figures[0].get_suptitle()


def test_simulated_rows_are_marked_in_tables() -> None:
    assert steps.spread(ROW) == ["2000.00", "1400.00", "2600.00"]
    assert steps.spread(SIMULATED) == ["2000.00 (simulated)", "", ""]
    measured, simulated = scaling.tables([ROW, SIMULATED])
    assert "CPU, 2 ranks" in measured.title
    assert "simulated for dgx-a100, not measured" in simulated.title


def test_the_page_says_what_is_simulated_and_where_rows_come_from(tmp_path: Path) -> None:
    write_rows([ROW, replace(SIMULATED, commit="abc")], tmp_path / "scaling.jsonl")
    page = results.write_page(tmp_path, "make bench").read_text()
    assert "Measured on: CPU ranks. 1 rows were computed from a model instead" in page
    assert "2000.00 (simulated)" in page
    assert ROW.commit in page
    assert "abc" in page
    assert str(ROW.machine["cpu"]) in page
    write_rows([ROW], tmp_path / "scaling.jsonl")
    assert "computed from a model" not in results.write_page(tmp_path, "make bench").read_text()


def test_pictures_are_small(tmp_path: Path) -> None:
    lines = [report.Line(f"subject {index}", range(30), range(30), range(30), range(1, 31)) for index in range(8)]
    report.line_chart(dict.fromkeys("abc", lines), tmp_path / "new" / "lines.png", title="t", x_label="x", y_label="y")
    assert (tmp_path / "new" / "lines.png").stat().st_size < 100_000


@pytest.mark.parametrize("name", results.SCRIPTS)
def test_every_script_of_make_bench_can_be_run_and_shown_again(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(f"bench.{name}")
    assert "?" in module.__doc__.splitlines()[0], "a script answers a question"
    assert callable(module.tables)
    assert callable(module.plot)
    with pytest.raises(SystemExit, match="0"):
        module.main(["--help"])
    assert {"--short", "--output"} <= set(capsys.readouterr().out.replace("]", " ").split())
