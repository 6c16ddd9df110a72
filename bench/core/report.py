"""Copy the tables of bench/results into the pages that show them.

    python -m bench.core.report            rewrite the tables
    python -m bench.core.report --check    exit 1 if a table is out of date

In a page, a table is between the markers `<!-- results/NAME.csv -->` and `<!-- end -->`, and the description
of a machine between `<!-- results/NAME.json -->` and `<!-- end -->`. Every benchmark updates the pages.
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
    """Return `text` with the content of every marked section replaced by the table in bench/results."""
    return MARKED.sub(lambda m: f"<!-- results/{m[1]} -->\n{_render(m[1])}\n<!-- end -->", text)


def update_readme() -> None:
    """Rewrite the tables of README.md, bench/README.md and the pages in docs/."""
    for page in PAGES:
        page.write_text(rendered(page.read_text()))


def finish(name: str, facts: Mapping[str, object], rows: Sequence[Row] = (), **more: object) -> None:
    """Finish a benchmark whose tables are written: save `facts`, update the pages, count missed targets."""
    save_facts(name, facts, **more)
    update_readme()
    if rows:
        print(f"{len(misses(rows))} targets missed")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Copy the tables of bench/results into the pages.")
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if out of date")
    if not parser.parse_args().check:
        update_readme()
        return 0
    stale = [page for page in PAGES if rendered(page.read_text()) != page.read_text()]
    for page in stale:
        print(f"{page}: tables differ from bench/results; run python -m bench.core.report")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
