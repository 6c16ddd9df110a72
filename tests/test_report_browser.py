"""Pages of `ckptz report` in a browser: what is drawn, numbers, keys, phones, and a silent console."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptz
from ckptz.numpy import save_file
from ckptz.pages import words
from tests.support.cli_support import ckptz as cli
from tests.support.report_support import BUDGET, a_run, state

pytestmark = pytest.mark.apps

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PHONE, DESK = {"width": 375, "height": 700}, {"width": 1200, "height": 900}


class Tab:
    """A page that is open, and everything that it said or asked for."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.said: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: self.said.append(request.url))

    def load(self, path: Path) -> None:
        """Open a file; it may ask for nothing else."""
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("body[data-ready]")
        assert self.said == [path.as_uri()]

    def column(self, table: str, heading: str) -> list[str]:
        """The exact values of a column of a table of tensors, over all of its pages."""
        place = self.page.locator(table).first
        headings = place.locator("thead th").all_text_contents()
        at, found = headings.index(heading) + 1, []
        while True:
            cells = place.locator(f"tbody td:nth-child({at})")
            found += cells.evaluate_all("cells => cells.map(cell => cell.dataset.v)")
            more = place.get_by_role("button", name="More")
            if more.is_disabled():
                return found
            more.click()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        # As root, as in containers, Chromium has no sandbox.
        arguments = ["--no-sandbox"] if hasattr(os, "getuid") and os.getuid() == 0 else []
        started = play.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield started
        started.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Tab]:
    page = browser.new_page(viewport=DESK)
    tab = Tab(page)
    yield tab
    assert len(tab.said) <= 1, tab.said
    page.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_run(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture(scope="module")
def page_of_run(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "run.html"
    ckptz.report(run, path, histograms=["model.layers.0.*"])
    return path


@pytest.mark.parametrize(
    ("heading", "key"),
    [
        ("stored", "stored_bytes"),
        ("raw", "tensor_bytes"),
        ("smaller", "ratio"),
        ("bits per parameter", "bits_per_element"),
    ],
)
def test_the_numbers_of_every_tensor_are_those_of_inspect(
    tab: Tab, run: Path, page_of_run: Path, heading: str, key: str
) -> None:
    tab.load(page_of_run)
    report = cli("inspect", run / "step-00000200.ckptz", "--json").json
    largest = sorted(report["tensors"], key=lambda tensor: -tensor["stored_bytes"])
    shown = tab.column("[data-table]", heading)
    assert [float(value) for value in shown] == [tensor[key] for tensor in largest]


def test_tiles_say_what_the_reports_say(tab: Tab, run: Path, page_of_run: Path) -> None:
    tab.load(page_of_run)
    log = cli("log", run, "--json").json
    tiles = tab.page.locator("#run-0 .tile b")
    shown = tiles.evaluate_all("tiles => tiles.map(tile => [tile.dataset.v, tile.textContent])")
    assert [float(value) for value, _ in shown[:4]] == [
        *(log["ratio"], log["stored_bytes"], log["tensor_bytes"], log["n_files"])
    ]
    assert shown[1][1] == words.size(log["stored_bytes"])
    saved = tab.page.evaluate("numbers()")
    assert json.loads(saved)["runs"] == [log]


def test_sizes_are_written_alike_on_both_sides(tab: Tab, page_of_run: Path) -> None:
    tab.load(page_of_run)
    sizes = [0, 1, 999, 1000, 1234, 12345, 999499, 999500, 123456789, 5 * 10**12]
    assert tab.page.evaluate("sizes => sizes.map(size)", sizes) == [words.size(n) for n in sizes]


def test_tables_sort_filter_and_turn_pages(tab: Tab, page_of_run: Path) -> None:
    tab.load(page_of_run)
    table = tab.page.locator("[data-table]")
    table.get_by_role("button", name="tensor", exact=True).click()
    names = tab.column("[data-table]", "tensor")
    assert names == sorted(names)
    table.get_by_role("searchbox").fill("LAYERS.1")
    assert {name.split(".")[2] for name in tab.column("[data-table]", "tensor")} == {"1"}
    files = tab.page.locator("#run-0 table.files")
    files.get_by_role("button", name="stored", exact=True).click()
    column = files.locator("tbody td:nth-child(4)").evaluate_all(
        "cells => cells.map(cell => +cell.dataset.v)"
    )
    assert column == sorted(column, reverse=True)
    assert files.locator("th[aria-sort=descending]").count() == 1


def test_a_histogram_opens_where_it_was_asked_for(tab: Tab, page_of_run: Path) -> None:
    tab.load(page_of_run)
    found = json.loads(tab.page.evaluate("numbers()"))["histograms"]
    chosen = next(h for h in found if h["tensor"] == "model.layers.0.mlp.up.weight")
    tab.page.get_by_role("button", name="model.layers.0.mlp.up.weight", exact=True).click()
    bars = tab.page.locator("#spread [role=img] i")
    assert bars.evaluate_all("bars => bars.map(bar => +bar.dataset.n)") == chosen["counts"]
    assert str(sum(chosen["counts"])) in tab.page.locator("#spread").inner_text()


def test_keys_walk_the_marks_of_a_chart(tab: Tab, page_of_run: Path) -> None:
    tab.load(page_of_run)
    tab.page.locator("#run-0 svg").first.focus()
    said = []
    for _ in range(3):
        tab.page.keyboard.press("ArrowRight")
        said.append(tab.page.evaluate("document.activeElement.getAttribute('aria-label')"))
        assert tab.page.locator("#tip").inner_text() == said[-1]
    assert ["step-00000000" in said[0], "step-00000100" in said[1], "step-00000200" in said[2]] == [True] * 3
    tab.page.keyboard.press("Escape")
    assert not tab.page.locator("#tip").is_visible()


def test_cells_and_marks_tell_their_numbers_where_one_points(tab: Tab, page_of_run: Path) -> None:
    tab.load(page_of_run)
    tab.page.locator(".heat tr", has_text="attn.qkv").first.locator("td").nth(2).hover()
    assert "model.layers.#.attn.qkv.weight, layer 2: " in tab.page.locator("#tip").inner_text()


def test_it_fits_a_phone_and_is_read_by_screen_readers(browser: Any, page_of_run: Path) -> None:
    page = browser.new_page(viewport=PHONE)
    tab = Tab(page)
    tab.load(page_of_run)
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    assert page.get_by_role("heading", level=1).count() == 1
    assert page.get_by_role("table").count() >= 4
    assert page.locator("svg[role=group][aria-label]").count() == page.locator("svg").count() > 5
    assert page.locator("button:not([type=button])").count() == 0
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_dark_or_light_as_the_system_is_or_as_one_asks(
    browser: Any, page_of_run: Path, scheme: Any
) -> None:
    page = browser.new_page(viewport=DESK, color_scheme=scheme)
    Tab(page).load(page_of_run)
    paper = "getComputedStyle(document.body).backgroundColor"
    bar = "getComputedStyle(document.querySelector('svg [aria-roledescription=bar]')).fill"
    before = page.evaluate(paper), page.evaluate(bar)
    assert (sum(map(int, before[0][4:-1].split(","))) > 384) == (scheme == "light")
    page.get_by_role("button", name="Dark or light").click()
    after = page.evaluate(paper), page.evaluate(bar)
    assert before[0] != after[0]
    assert before[1] != after[1]
    page.close()


def test_a_printed_page_is_whole(tab: Tab, page_of_run: Path) -> None:
    tab.load(page_of_run)
    tab.page.emulate_media(media="print")
    assert not tab.page.locator("nav").is_visible()
    assert len(tab.page.pdf()) > 20_000


def test_a_search_is_drawn(tab: Tab, tmp_path: Path) -> None:
    save_file(state(200), tmp_path / "s.ckptz")
    options = ckptz.SearchOptions(budgets=(BUDGET,), template=ckptz.KMeans(), max_evaluations=5)
    reports = ckptz.compress(tmp_path / "s.ckptz", tmp_path / "small.ckptz", search=options)
    ckptz.report(tmp_path / "small.ckptz", tmp_path / "page.html", searches=reports)
    tab.load(tmp_path / "page.html")
    points = tab.page.locator("#search-0 svg [aria-roledescription=point]")
    assert points.count() == 5
    assert tab.page.locator("#search-0 table tbody tr").count() == 5
    assert "the budget" in str(tab.page.locator("#search-0 svg").text_content())


def test_damage_is_drawn(tab: Tab, run: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(run, tmp_path / "run")
    (broken / "step-00000000.ckptz").write_bytes(b"nothing")
    cli("report", broken, "-o", tmp_path / "page.html", fails=True)
    tab.load(tmp_path / "page.html")
    assert tab.page.locator("#problems li").count() == 2
    assert tab.page.locator("#run-0 .tile.bad").count() == 1


def test_ten_thousand_tensors_scroll(tab: Tab, tmp_path: Path) -> None:
    tensors = {f"layers.{n % 60}.experts.{n // 60}.w": np.full(4, n, np.float32) for n in range(10_000)}
    save_file(tensors, tmp_path / "many.ckptz")
    ckptz.report(tmp_path / "many.ckptz", tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 4e6
    tab.load(tmp_path / "page.html")
    assert tab.page.locator("[data-table] tbody tr").count() == 100
    assert len(set(tab.column("[data-table]", "tensor"))) == 10_000
    assert tab.page.locator(".heat td[style]").count() == 60
    assert tab.page.evaluate("performance.getEntriesByName('first-paint')[0].startTime") < 10_000
