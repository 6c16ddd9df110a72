"""Collect the figures of README.md from the results of the other benchmarks, without new measurements.

    python -m bench.core.summary [--demo demo-output]

Copies demo.json and demo.png into bench/results, writes results/demo.csv and results/readme.csv from them and
from the tables of bench.product.lossless and bench.studies.user_runs, and updates the tables of all pages.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.core.measure import BENCH, RESULTS, read_rows, save_rows
from bench.core.report import update_readme

DEFAULTS = ("grid, default", "grid, again")  # arms of bench.studies.user_runs


def demo_rows(demo: Mapping[str, Any]) -> list[Mapping[str, object]]:
    """Build the demo's table: sizes, ratios, speeds and loss changes of each method."""
    rows = []
    for row in demo["rows"]:
        storage, changes = row["storage"], demo["changes_percent"][row["name"]]
        rows.append(
            {
                "method": row["name"],
                "run, MB": round(sum(storage["n_bytes"] if storage else demo["plain_bytes"]) / 1e6, 1),
                "ratio, weights and both moments": f"{storage['ratio']:.3f}x" if storage else "",
                "ratio, weights": f"{storage['weights_ratio']:.2f}x" if storage else "",
                "compress MB/s": round(storage["compress_rate"]) if storage else "",
                "restore MB/s": round(storage["restore_rate"]) if storage else "",
                "loss at once": f"{changes['at_once']:+.3f} %",
                "loss resumed": f"{changes['resumed']:+.3f} %",
            }
        )
    return rows


def readme_rows(demo: list[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Build the table of README.md: a lossless run, weights, deltas, a lossy run, and runs with restarts."""
    encoder = next(r for r in read_rows("lossless_sizes") if r["tool"].startswith("ckptz"))
    deltas = [r for r in read_rows("lossless_delta_sizes") if r["pair"].startswith("fine-tune")]
    raw, stored = (sum(int(r[column]) for r in deltas) for column in ("raw bytes", "ckptz file"))
    lossless, grid = (
        next(r for r in demo if r["method"] == f"ckptz {name}") for name in ("lossless", "grid")
    )
    content, ratio, later = _restarted()
    return [
        _row("the demo: training states, 6 steps", "without loss", _ratio(lossless)),
        _row("22.7 M weights of a sentence encoder, fp32", "without loss", 1 / float(encoder["of raw"])),
        _row("weights of a fine-tune, bf16, each step against the last", "without loss", raw / stored),
        _row(
            "the demo: training states, 6 steps",
            "lossy: the grid method",
            _ratio(grid),
            str(grid["loss at once"]),
            f"{grid['loss resumed']}, one restart",
        ),
        _row(content, "lossy: the grid method", ratio, "", later),
    ]


def _ratio(row: Mapping[str, object]) -> float:
    return float(str(row["ratio, weights and both moments"]).rstrip("x"))


def _restarted() -> tuple[str, float, str]:
    """Summarize the restarted runs that no default was chosen on: (description, median ratio, end loss)."""
    rows = [r for r in read_rows("user_runs") if r["used"] == "to report" and r["arm"] in DEFAULTS]
    ends, ratios, restarts = (
        [float(r[column].rstrip("x")) for r in rows] for column in ("end, %", "smaller", "restarts")
    )
    return (
        f"training states of {len(rows)} runs, each restarted {min(restarts):.0f} to "
        f"{max(restarts):.0f} times from the lossy files only",
        statistics.median(ratios),
        f"median {statistics.median(ends):+.2f} %, worst {max(ends):+.2f} %",
    )


def _row(
    content: str, method: str, ratio: float, at_once: str = "the same", later: str = "the same"
) -> dict[str, object]:
    return {
        "what is stored": content,
        "how": method,
        "smaller": f"{ratio:.3g}x",
        "loss right after": at_once,
        "loss later": later,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Collect the figures of README.md.")
    parser.add_argument(
        "--demo", type=Path, default=BENCH.parent / "demo-output", help="output folder of the demo"
    )
    folder = parser.parse_args().demo
    if (folder / "demo.json").exists():
        shutil.copyfile(folder / "demo.json", RESULTS / "demo.json")
        shutil.copyfile(folder / "demo.png", RESULTS / "demo.png")
    demo = demo_rows(json.loads((RESULTS / "demo.json").read_text()))
    save_rows("demo", demo)
    save_rows("readme", readme_rows(demo))
    update_readme()


if __name__ == "__main__":
    main()
