"""Measurement for all benchmarks: description of the machine, interleaved timing, tables and result files."""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

BENCH = Path(__file__).resolve().parents[1]
RESULTS = BENCH / "results"
CACHE = BENCH / ".cache"
PACKAGES = ("numpy", "numba", "zstandard", "xxhash", "safetensors", "torch")

Row = Mapping[str, object]
T = TypeVar("T")


# --- the machine --------------------------------------------------------------------------------


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "?")


def version(package: str) -> str:
    """Return the installed version of a package, or "-" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def machine(**more: str) -> dict[str, object]:
    """Describe this machine and its packages; `more` adds versions of packages in other environments."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES} | more,
    }


def machine_line(facts: Mapping[str, object]) -> str:
    """Format the description that `machine` returns as one line of text."""
    packages = facts["packages"]
    assert isinstance(packages, Mapping)
    versions = ", ".join(f"{name} {version}" for name, version in packages.items())
    where = f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB"
    return f"{where}, Python {facts['python']}, {versions}"


# --- command lines ------------------------------------------------------------------------------


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Create an argument parser that prints the docstring of a module, unwrapped, as its help."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


# --- time ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds that each round of one case took."""

    seconds: tuple[float, ...]

    @property
    def best(self) -> float:
        """The fastest round, which other programs disturbed least."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """The median of all rounds."""
        return statistics.median(self.seconds)


def timed(function: Callable[[], object]) -> float:
    """Return the wall-clock seconds of one call."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def cpu_seconds(function: Callable[[], T]) -> tuple[T, float]:
    """Call a function; return its result and the CPU seconds that all threads of this process used."""
    begin = time.process_time()
    result = function()
    return result, time.process_time() - begin


def interleave(cases: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Timing]:
    """Time all cases in turn, so that a slow phase of the machine affects all of them.

    Args:
        cases: by name; each call runs once and returns the seconds that it took.
        rounds: number of timed rounds, after one round for warm-up.
    """
    names = list(cases)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds + 1):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            duration = cases[name]()
            if i:
                seconds[name].append(duration)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


# --- results ------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """Format rows as a Markdown table with aligned columns."""
    if not rows:
        return ""
    names = list(rows[0])
    cells = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    lines = [
        " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in cells
    ]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


def _cell(value: object) -> str:
    return "" if value is None else str(value)


def verdict(passed: bool) -> str:
    """Return the text of a verdict column."""
    return "met" if passed else "MISSED"


def save_rows(name: str, rows: Sequence[Row]) -> None:
    """Print a table and write it to results/NAME.csv."""
    print(f"\n{name}\n{table(rows)}", flush=True)
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def append_row(name: str, row: Row) -> None:
    """Append a row to results/NAME.csv; a new file starts with the column names."""
    path = RESULTS / f"{name}.csv"
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def read_rows(name: str) -> list[dict[str, str]]:
    """Read the table in results/NAME.csv."""
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def save_facts(name: str, facts: Mapping[str, object], **more: object) -> None:
    """Write the command line of this process, the machine and `more` to results/NAME.json."""
    module = sys.modules["__main__"].__spec__
    assert module is not None, "run it as python -m"
    command = shlex.join(["python", "-m", module.name.removesuffix(".__main__"), *sys.argv[1:]])
    content = {"command": command, "machine": dict(facts), **more}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    print(f"\n{machine_line(facts)}", flush=True)


def misses(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that missed a target."""
    return [row for row in rows if "MISSED" in row.values()]
