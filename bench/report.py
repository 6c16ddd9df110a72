"""Copies the tables of results/ into README.md, between the markers that name them.

    python bench/report.py            rewrite the tables
    python bench/report.py --check    exit 1 if one of them is out of date

A table stands between `<!-- results/NAME.csv -->` and `<!-- end -->`, a machine line between
`<!-- results/NAME.json -->` and `<!-- end -->`. Every bench runs this when it has finished.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys

from measure import BENCH, RESULTS, machine_line, table

README = BENCH / "README.md"
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
    """Rewrite the tables of README.md."""
    README.write_text(rendered(README.read_text()))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Copy the tables of bench/results into bench/README.md.")
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if out of date")
    if not parser.parse_args().check:
        update_readme()
        return 0
    text = README.read_text()
    if rendered(text) != text:
        print("bench/README.md: its tables differ from bench/results; run python bench/report.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
