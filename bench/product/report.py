"""Pages of `ckptz report`: seconds to make one, its bytes, and seconds until Chromium has painted it.

    python -m bench.product.report [--run FOLDER] [--rounds N]

Of a folder that `make demo` wrote, and of 200 files of 10,000 tensors each, which are links to one anchor. A
round is one process, start-up included. Draws docs/report.png from the first page; needs Chromium.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
from playwright.sync_api import sync_playwright

from bench.core.measure import BENCH, Row, machine, parser_of, save_rows, timed, verdict, version
from bench.core.report import finish
from ckptz.numpy import save_file

N_STEPS: Final = 200
N_TENSORS: Final = 10_000
N_LAYERS: Final = 50
DEMO: Final = Path("demo-output/ckptz-grid")
PICTURE: Final = BENCH.parent / "docs" / "report.png"
VIEW: Final = {"width": 1160, "height": 760}
CODE: Final = "from ckptz_cli.main import main; main()"


def many_tensors(folder: Path) -> Path:
    """Write a file of many small tensors, and name it as many steps."""
    values = np.random.default_rng(0).normal(0, 0.02, (N_TENSORS, 128)).astype(np.float32)
    names = (f"layers.{n % N_LAYERS}.experts.{n // N_LAYERS}.weight" for n in range(N_TENSORS))
    first = folder / "step-00000000.ckptz"
    save_file(dict(zip(names, values, strict=True)), first)
    for step in range(1, N_STEPS):
        os.link(first, folder / f"step-{step:08d}.ckptz")
    return folder


def make(run: Path, page: Path) -> None:
    """Make a page in a process of its own."""
    arguments = ["report", str(run), "-o", str(page)]
    subprocess.run([sys.executable, "-c", CODE, *arguments], check=True, stdout=subprocess.DEVNULL)


def painted(browser: Any, page: Path, picture: Path | None = None) -> float:
    """Load a page, and give the seconds until it showed something."""
    tab = browser.new_page(viewport=VIEW)
    tab.goto(page.resolve().as_uri())
    tab.wait_for_selector("body[data-ready]")
    seconds = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000
    if picture is not None:
        tab.screenshot(path=picture)
    tab.close()
    return float(seconds)


def row_of(what: str, run: Path, rounds: int, limits: tuple[float, float, float], browser: Any) -> Row:
    """Measure one page; limits are of seconds, megabytes, and seconds to the first paint."""
    with tempfile.TemporaryDirectory(prefix="ckptz-report-") as folder:
        page = Path(folder) / "report.html"
        begin = os.times()
        seconds = statistics.median(timed(lambda: make(run, page)) for _ in range(rounds))
        cpu = (os.times().children_user - begin.children_user) / rounds
        megabytes = page.stat().st_size / 1e6
        picture = PICTURE if "demo" in what else None
        paint = statistics.median(painted(browser, page, picture) for _ in range(rounds))
    found = (seconds, megabytes, paint)
    return {
        "page of": what,
        "seconds": f"{seconds:.2f}",
        "CPU seconds": f"{cpu:.2f}",
        "MB": f"{megabytes:.3f}",
        "first paint s": f"{paint:.2f}",
        "target": f"< {limits[0]:g} s, < {limits[1]:g} MB, painted < {limits[2]:g} s",
        "verdict": verdict(all(a < b for a, b in zip(found, limits, strict=True))),
    }


def main() -> None:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--run", type=Path, default=DEMO, help=f"what make demo wrote (default {DEMO})")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each case (default 3)")
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    arguments = ["--no-sandbox"] if os.getuid() == 0 else []  # as root Chromium has none
    with sync_playwright() as play, tempfile.TemporaryDirectory(prefix="ckptz-many-") as folder:
        browser = play.chromium.launch(executable_path=chromium, args=arguments)
        many = many_tensors(Path(folder))
        rows = [
            row_of("the demo's run", options.run, options.rounds, (5, 2, 1), browser),
            row_of(f"{N_STEPS} files of {N_TENSORS:,} tensors", many, 1, (30, 4, 1), browser),
        ]
        drawn_by = {"vl-convert-python": version("vl-convert-python"), "chromium": browser.version}
        browser.close()
    save_rows("report", rows)
    finish("report", machine(**drawn_by), rows)


if __name__ == "__main__":
    main()
