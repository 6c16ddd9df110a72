"""Compare every figure in README.md and docs/ with the measurement that it was taken from.

    python -m bench.core.figures     exit 1 if a figure has no source, or its source has another value

A figure is a ratio (`12.2x`, `3.6 times`), a share (`+0.24 %`), a speed (`103 MB/s`), a number of points, of
milliseconds or of bytes in binary units (`64 MiB`), or any number with two or more decimals such as `0.254`.
In lists and ranges before a unit, each number is a figure (`0.7 and 1.2 %`). Not checked: code, except for
`console` blocks; tables that `bench.core.report` copies; versions after a name (`Python 3.11`).

`bench/figures.csv` has one row for each figure of each page:

    page, figure   the file name of the page, and the figure exactly as printed on it
    table          a table in bench/results, or `setting` for a number that was chosen or defined
    rows           the rows of the table: `column=value; column=value`
    value          a column; before it, to combine several rows, `mean`, `least` or `most`; before that, for a
                   computed figure, `inverse` (1 / n), `excess` (100 (n - 1)) or `saved` (100 (1 - 1 / n))
    measured on    sizes, cores, and whether the files form a chain; for a setting, its meaning

A figure without a sign is compared by absolute value, rounded to the digits that it is printed with.
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
    """Return the paths of the checked pages: README.md and all pages below docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def figures_in(text: str) -> list[str]:
    """Return the figures of a page, in order."""
    text = re.sub(LEFT_OUT, " ", text, flags=re.DOTALL | re.MULTILINE)
    return [match[1] or match[2] for match in FIGURE.finditer(text)]


def values_of(row: Mapping[str, str]) -> Iterator[float]:
    """Yield the measured values of a figure: one computed value, or every number in its cell.

    Args:
        row: a row of bench/figures.csv.

    Raises:
        LookupError: the table has no such row or column, or several rows and no way to combine them.
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
    """Return whether a measured value, rounded to the digits of a figure, is that figure."""
    digits = len(figure.partition(".")[2])
    number = float(figure.replace(",", ""))
    compared = value if figure[0] in "+-" else abs(value)
    return abs(compared - number) <= 0.5 * 10**-digits + 1e-9


def faults() -> Iterator[str]:
    """Yield a message for each figure without a row, row without a figure, and figure of another value."""
    with FIGURES.open(newline="") as file:
        rows = list(csv.DictReader(file))
    printed = {page.relative_to(ROOT).as_posix(): figures_in(page.read_text("utf-8")) for page in pages()}
    known = {(row["page"], row["figure"]) for row in rows}
    for name, figures in printed.items():
        for figure in dict.fromkeys(figures):
            if (name, figure) not in known:
                yield f"{name}: {figure} has no row in bench/figures.csv; add one, or leave the figure out"
    for row in rows:
        if row["figure"] not in printed.get(row["page"], ()):
            yield f"{row['page']}: {row['figure']} is in bench/figures.csv and not on the page"
        yield from (f"{row['page']}: {row['figure']} {fault}" for fault in faults_of(row))


def faults_of(row: Mapping[str, str]) -> Iterator[str]:
    """Yield a message for each error in the source of one figure: no such table or cell, or another value."""
    if not row["measured on"]:
        yield "has no entry in bench/figures.csv of what it was measured on"
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
    """Print one line for each fault."""
    messages = list(faults())
    print("\n".join(messages) or "all figures have a source")
    return bool(messages)


if __name__ == "__main__":
    sys.exit(main())
