"""Pages of `ckptz report` in Chromium: charts, tables, tooltips, screen sizes, and an empty console."""

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
from tests.support.cli_support import ckptz as cli
from tests.support.report_support import a_run

pytestmark = pytest.mark.apps

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1400, "height": 900}
CLIPPED = """() => [...document.querySelectorAll('svg text')].filter((text) => {
    const [box, card] = [text.getBoundingClientRect(), text.closest('figure').getBoundingClientRect()];
    const scrolls = text.closest('figure').className === 'whole';
    return box.left < card.left || (box.right > card.right && !scrolls) || box.bottom > card.bottom;
  }).map((text) => text.textContent)"""


class Tab:
    """An open page and its log: console messages, errors and requested URLs."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.log: list[str] = []
        page.on("console", lambda message: self.log.append(message.text))
        page.on("pageerror", lambda error: self.log.append(str(error)))
        page.on("request", lambda request: self.log.append(request.url))

    def load(self, path: Path) -> None:
        """Open a file; the file must be its only request, and the console empty."""
        self.page.goto(path.as_uri())
        assert self.log == [path.as_uri()]

    def table(self, name: str) -> Any:
        """Return the locator of a table by its accessible name."""
        return self.page.get_by_role("table", name=name)

    def column(self, name: str, heading: str) -> list[str]:
        """Return the unrounded values of a table's column, of its visible rows."""
        table = self.table(name)
        at = table.locator("thead th").all_text_contents().index(heading) + 1
        cells = table.locator(f"tbody tr:not([hidden]) td:nth-child({at})")
        return cells.evaluate_all("cells => cells.map(cell => cell.dataset.v ?? cell.textContent)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        # Chromium refuses to run as root (in containers) with its sandbox.
        arguments = ["--no-sandbox"] if hasattr(os, "getuid") and os.getuid() == 0 else []
        started = play.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield started
        started.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Tab]:
    page = browser.new_page(viewport=DESKTOP)
    tab = Tab(page)
    yield tab
    assert len(tab.log) <= 1, tab.log
    page.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_run(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture(scope="module")
def page_of_run(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "run.html"
    ckptz.report(run, path, histograms=["layers.0.*"])
    return path


EVERY = "step-00000200.ckptz: every tensor"


@pytest.mark.parametrize(
    ("heading", "key"),
    [
        *(("stored", "stored_bytes"), ("raw", "tensor_bytes"), ("times smaller", "ratio")),
        ("bits per element", "bits_per_element"),
    ],
)
def test_the_numbers_of_every_tensor_are_those_of_inspect(
    tab: Tab, run: Path, page_of_run: Path, heading: str, key: str
) -> None:
    tab.load(page_of_run)
    report = cli("inspect", run / "step-00000200.ckptz", "--json").json
    largest = sorted(report["tensors"], key=lambda tensor: -tensor["stored_bytes"])
    assert [float(value) for value in tab.column(EVERY, heading)] == [tensor[key] for tensor in largest]
    saved = json.loads(tab.page.locator("#numbers").inner_text())
    assert saved["files"] == [report]


def test_tables_sort_and_filter(tab: Tab, page_of_run: Path) -> None:
    tab.load(page_of_run)
    tab.table(EVERY).get_by_role("button", name="raw").click()
    raw = [int(value) for value in tab.column(EVERY, "raw")]
    assert raw == sorted(raw, reverse=True)
    tab.table(EVERY).get_by_role("button", name="raw").click()
    assert [int(value) for value in tab.column(EVERY, "raw")] == sorted(raw)
    assert tab.table(EVERY).locator("th[aria-sort=ascending]").count() == 1
    tab.page.get_by_role("searchbox").first.fill("LAYERS.1")
    assert {name.split(".")[2] for name in tab.column(EVERY, "name")} == {"1"}
    assert tab.page.locator("main > section").last.get_attribute("id") == "words"
    assert tab.page.locator("#tables table").count() == tab.page.locator("table").count() == 3


def test_marks_show_their_numbers_in_a_tooltip(tab: Tab, page_of_run: Path) -> None:
    tab.load(page_of_run)
    tab.page.locator("figure", has_text="Size of each step").locator(
        "[aria-roledescription=bar]"
    ).last.hover()
    assert "step: 200; bytes: " in tab.page.locator("#tip").inner_text()
    tab.page.get_by_role("heading", level=1).hover()
    assert not tab.page.locator("#tip").is_visible()


def test_axes_of_counts_have_whole_numbers(tab: Tab, page_of_run: Path) -> None:
    tab.load(page_of_run)
    spread = tab.page.locator("figure", has_text="model.layers.0.norm.weight").last
    counts = spread.locator("[aria-roledescription=axis]").last.locator("text").all_text_contents()
    counts.remove("values")
    assert len(counts) > 1
    assert all(count.replace(",", "").isdigit() for count in counts)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [PHONE, DESKTOP])
def test_a_page_fits_phones_and_desktops_in_dark_and_light(
    browser: Any, page_of_run: Path, viewport: Any, scheme: Any
) -> None:
    page = browser.new_page(viewport=viewport, color_scheme=scheme)
    Tab(page).load(page_of_run)
    assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
    assert page.evaluate(CLIPPED) == []
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) > 384) == (scheme == "light")
    assert page.get_by_role("heading", level=1).count() == 1
    assert page.locator("[role=group][aria-label] > svg").count() == page.locator("svg").count() > 5
    page.close()


def test_a_page_can_be_printed(tab: Tab, page_of_run: Path) -> None:
    tab.load(page_of_run)
    tab.page.emulate_media(media="print")
    assert not tab.page.locator("nav").is_visible()
    assert len(tab.page.pdf()) > 20_000


def test_damaged_files_are_listed_as_problems(tab: Tab, run: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(run, tmp_path / "run")
    (broken / "step-00000000.ckptz").write_bytes(b"nothing")
    cli("report", broken, "-o", tmp_path / "page.html", fails=True)
    tab.load(tmp_path / "page.html")
    assert tab.page.locator("#problems li").count() == 2


def test_a_table_of_ten_thousand_tensors_is_cut_and_drawn_quickly(tab: Tab, tmp_path: Path) -> None:
    tensors = {f"layers.{n % 60}.experts.{n // 60}.w": np.full(4, n, np.float32) for n in range(10_000)}
    save_file(tensors, tmp_path / "many.ckptz")
    ckptz.report(tmp_path / "many.ckptz", tmp_path / "page.html")
    tab.load(tmp_path / "page.html")
    assert tab.page.locator("table").last.locator("tbody tr").count() == 5000
    assert "the first 5000 of 10000" in tab.page.locator("#tables h3").last.inner_text()
    assert tab.page.evaluate("performance.getEntriesByName('first-paint')[0].startTime") < 10_000
