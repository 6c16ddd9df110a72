"""Figures of README and docs have measured sources, and the pages show the committed tables."""

from pathlib import Path

import pytest

from bench.core import figures, report, summary
from bench.core.measure import read_rows


def test_every_figure_of_the_pages_has_a_source_of_its_value() -> None:
    assert list(figures.faults()) == []


def test_the_tables_of_the_pages_are_those_of_the_results() -> None:
    for page in report.PAGES:
        assert report.rendered(page.read_text("utf-8")) == page.read_text("utf-8")
    rows = [{name: str(cell) for name, cell in row.items()} for row in summary.readme_rows(read_rows("demo"))]
    assert rows == read_rows("readme")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("12.2x smaller, +0.24 % and 1,601 MB/s", ["12.2", "+0.24", "1,601"]),
        ("ended 0.7 and 1.2 % higher, -0.1 to +2.4 % at 3.6 times", ["0.7", "1.2", "-0.1", "+2.4", "3.6"]),
        ("0.254 of fp32, 512 KiB of step-0200, 4 tables, 24 ms", ["0.254", "512", "24"]),
        ("`--budget 1%`, Python 3.11, [2 %](a.md#1%)", ["2"]),
        ("```python\nx = 0.25\n```\n```console\n$ ckptz --budget 1%\n1.22x\n```", ["1.22"]),
    ],
)
def test_figures_are_numbers_with_a_unit_outside_of_code(text: str, numbers: list[str]) -> None:
    assert figures.figures_in(text) == numbers


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("README.md,0.25,demo,method=ckptz grid,loss resumed,one run", "is -0.191 in bench/results/demo.csv"),
        ("README.md,0.19,demo,method=ckptz grid,loss resumed,one run", ""),
        ("README.md,-0.19,demo,method=ckptz grid,loss resumed,one run", ""),
        ("README.md,+0.19,demo,method=ckptz grid,loss resumed,one run", "is -0.191 in"),
        ("README.md,0.25,demo,method=none,loss resumed,one run", "has no source"),
        ("README.md,0.25,setting,,,", "what it was measured on"),
        ("docs/wire.md,0.25,setting,,,a limit", "and not on the page"),
    ],
)
def test_a_figure_of_another_value_or_without_a_source_is_named(
    row: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"It is {row.split(',')[1]} % larger, and 7 % faster.\n")
    table = tmp_path / "figures.csv"
    table.write_text(f"page,figure,table,rows,value,measured on\n{row}\nREADME.md,7,setting,,,a limit\n")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "FIGURES", table)
    monkeypatch.setattr(figures, "pages", lambda: [page])
    measured = [{"method": "ckptz grid", "loss resumed": "-0.191 %"}]
    monkeypatch.setattr(figures, "read_rows", lambda table: measured)
    assert fault in "\n".join(figures.faults())
    assert bool(fault) == bool(list(figures.faults()))
    page.write_text("It is 99 % larger.\n")
    assert any("README.md: 99 has no row in bench/figures.csv" in line for line in figures.faults())
