"""Copies the tables of results/ into the pages that show them, between the markers that name them.

    python -m bench.core.report            rewrite the tables
    python -m bench.core.report --check    exit 1 if one of them is out of date

A table stands between `<!-- results/NAME.csv -->` and `<!-- end -->`, a machine line between
`<!-- results/NAME.json -->` and `<!-- end -->`. Every bench runs this when it has finished.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence

from bench.core.measure import (
    BENCH,
    RESULTS,
    Row,
    machine_line,
    misses,
    read_rows,
    save_facts,
    table,
)

PAGES = (BENCH / "README.md", BENCH.parent / "README.md", *sorted((BENCH.parent / "docs").glob("*.md")))
MARKED = re.compile(r"<!-- results/([\w.]+) -->\n.*?<!-- end -->", re.DOTALL)


def _render(name: str) -> str:
    path = RESULTS / name
    if not path.exists():
        return "*(not measured yet)*"
    if path.suffix == ".json":
        content = json.loads(path.read_text())
        return f"`{content['command']}` on {machine_line(content['machine'])}."
    return table(read_rows(path.stem))


def rendered(text: str) -> str:
    """`text` with every marked part taken from results/."""
    return MARKED.sub(lambda m: f"<!-- results/{m[1]} -->\n{_render(m[1])}\n<!-- end -->", text)


def update_readme() -> None:
    """Rewrite the tables of all pages."""
    for page in PAGES:
        page.write_text(rendered(page.read_text()))


def finish(name: str, facts: Mapping[str, object], rows: Sequence[Row] = (), **more: object) -> None:
    """End a bench whose tables are written: keep its facts, copy the tables, count the targets missed."""
    save_facts(name, facts, **more)
    update_readme()
    if rows:
        print(f"{len(misses(rows))} targets missed")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Copy the tables of bench/results into the pages.")
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
