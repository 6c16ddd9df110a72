"""Compares every figure in README.md and docs/ with the measurement that it was taken from.

    python -m bench.core.figures     exit 1 if a figure has no source, or its source has another value

A figure is a ratio (`12.2x`, `3.6 times`), a share (`+0.24 %`), a speed (`103 MB/s`), a number of points, of
milliseconds or of bytes by powers of two (`64 MiB`), or
a number with two decimals or more such as `0.254`; lists and ranges before a unit count (`0.7 and 1.2 %`).
Code is left out, but for what `console` blocks show, and so are tables that `bench.core.report` copies and
versions behind a name (`Python 3.11`).

`bench/figures.csv` has a row for each figure of each page:

    page, figure   as they stand there
    table          a table in bench/results, or `setting` for what was chosen or defined and not measured
    rows           the rows of the table: `column=value; column=value`
    value          a column; before it `mean`, `least` or `most` of several rows, and before that, of a figure
                   that is computed, `inverse` (1 / n), `excess` (100 (n - 1)) or `saved` (100 (1 - 1 / n))
    measured on    sizes, cores, and whether it is a chain; for a setting, what it is

A figure without a sign is compared without signs, and to as many digits as it has.
"""

from __future__ import annotations

import csv
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from bench.core.measure import BENCH, read_rows

ROOT: Final = BENCH.parent
FIGURES: Final = BENCH / "figures.csv"
NUMBER: Final = r"[-+]?\d[\d,]*(?:\.\d+)?"
UNIT: Final = r"(?:x(?!\w)|%|ms|[KMG]iB|[kMGT]B/s|times(?! table)|points)"
FIGURE: Final = re.compile(
    rf"(?<![\w.,/-])(?<![\w.,/]-)({NUMBER})(?=(?:,?\s(?:to|and|or)\s{NUMBER})*\s?{UNIT})"
    r"|(?<![\w.,/])([-+]?\d+\.\d{2,})(?![\w.])"
)
LEFT_OUT: Final = (
    r"```(?!console).*?```|^\$ [^\n]*|<!-- results/.*?<!-- end -->|`[^`\n]+`|\]\([^)]*\)"
    r"|(?:Python|torch|transformers|accelerate|Lightning|version|arXiv|safetensors) [\d.]+"
)
REDUCED: Final[Mapping[str, Callable[[list[float]], float]]] = {
    "mean": statistics.fmean,
    "least": min,
    "most": max,
}
COMPUTED: Final[Mapping[str, Callable[[float], float]]] = {
    "inverse": lambda n: 1 / n,
    "excess": lambda n: 100 * (n - 1),
    "saved": lambda n: 100 * (1 - 1 / n),
}


def pages() -> list[Path]:
    """Return the pages that are checked."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def figures_in(text: str) -> list[str]:
    """Return the figures of a page, in order."""
    text = re.sub(LEFT_OUT, " ", text, flags=re.DOTALL | re.MULTILINE)
    return [match[1] or match[2] for match in FIGURE.finditer(text)]


def values_of(row: Mapping[str, str]) -> Iterator[float]:
    """Yield the values that the source of a figure has: one, or each number of its cell.

    Raises:
        LookupError: no such row or column.
    """
    wanted = [part.partition("=")[::2] for part in row["rows"].split("; ") if part]
    rows = [r for r in read_rows(row["table"]) if all(r[column] == value for column, value in wanted)]
    words = row["value"].split(" ")
    compute = COMPUTED[words.pop(0)] if words[0] in COMPUTED else float
    reduce = REDUCED[words.pop(0)] if words[0] in REDUCED else None
    cells = [[float(n) for n in re.findall(NUMBER, r[" ".join(words)])] for r in rows]
    if not cells or not (reduce or len(cells) == 1):
        raise LookupError(f"{len(cells)} rows of {row['table']}.csv have {row['rows']}")
    yield from map(compute, [reduce([cell[0] for cell in cells])] if reduce else cells[0])


def agrees(figure: str, value: float) -> bool:
    """Return whether a value has these digits when it is rounded to them."""
    digits = len(figure.partition(".")[2])
    number = float(figure.replace(",", ""))
    found = value if figure[0] in "+-" else abs(value)
    return abs(found - number) <= 0.5 * 10**-digits + 1e-9


def faults() -> Iterator[str]:
    """Yield what is wrong: figures without a row, rows without a figure, and figures of another value."""
    with FIGURES.open(newline="") as file:
        rows = list(csv.DictReader(file))
    stand = {page.relative_to(ROOT).as_posix(): figures_in(page.read_text("utf-8")) for page in pages()}
    known = {(row["page"], row["figure"]) for row in rows}
    for name, figures in stand.items():
        for figure in dict.fromkeys(figures):
            if (name, figure) not in known:
                yield f"{name}: {figure} has no row in bench/figures.csv; add one, or leave the figure out"
    for row in rows:
        if row["figure"] not in stand.get(row["page"], ()):
            yield f"{row['page']}: {row['figure']} stands in bench/figures.csv, and not on the page"
        yield from (f"{row['page']}: {row['figure']} {fault}" for fault in faults_of(row))


def faults_of(row: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with the source of one figure."""
    if not row["measured on"]:
        yield "has no word in bench/figures.csv on what it was measured on"
    if row["table"] == "setting":
        return
    try:
        values = list(values_of(row))
    except (LookupError, OSError) as error:
        yield f"has no source: {error!r}"
        return
    if not any(agrees(row["figure"], value) for value in values):
        shown = ", ".join(f"{value:.5g}" for value in values)
        yield f"is {shown} in bench/results/{row['table']}.csv"


def main() -> int:
    """Print what is wrong, a line each."""
    found = list(faults())
    print("\n".join(found) or "all figures have a source")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
