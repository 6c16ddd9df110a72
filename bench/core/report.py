"""Copies the tables of results/ into README.md and bench/README.md, between the markers that name them.

    python -m bench.core.report            rewrite the tables
    python -m bench.core.report --check    exit 1 if one of them is out of date

A table stands between `<!-- results/NAME.csv -->` and `<!-- end -->`, a machine line between
`<!-- results/NAME.json -->` and `<!-- end -->`. Every bench runs this when it has finished.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys

from bench.core.measure import BENCH, RESULTS, machine_line, table

PAGES = (BENCH / "README.md", BENCH.parent / "README.md")
MARKED = re.compile(r"<!-- results/([\w.]+) -->\n.*?<!-- end -->", re.DOTALL)


def _render(name: str) -> str:
    path = RESULTS / name
    if not path.exists():
        return "*(not measured yet)*"
    if path.suffix == ".json":
        content = json.loads(path.read_text())
        return f"`{content['command']}` on {machine_line(content['machine'])}."
    with path.open(newline="") as file:
        return table(list(csv.DictReader(file)))


def rendered(text: str) -> str:
    """`text` with every marked part taken from results/."""
    return MARKED.sub(lambda m: f"<!-- results/{m[1]} -->\n{_render(m[1])}\n<!-- end -->", text)


def update_readme() -> None:
    """Rewrite the tables of both pages."""
    for page in PAGES:
        page.write_text(rendered(page.read_text()))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Copy the tables of bench/results into bench/README.md.")
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if out of date")
    if not parser.parse_args().check:
        update_readme()
        return 0
    stale = [page for page in PAGES if rendered(page.read_text()) != page.read_text()]
    for page in stale:
        print(f"{page}: its tables differ from bench/results; run python -m bench.core.report")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
