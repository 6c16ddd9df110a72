"""Collects the figures of the first page from the other results; measures nothing itself.

    python -m bench.core.summary [--demo demo-output]

Copies the demo's numbers and picture into results/, writes results/readme.csv from them and from the tables
of lossless and training_state, and rewrites the marked tables of README.md and bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.core.measure import BENCH, RESULTS, read_rows, save_rows
from bench.core.report import update_readme


def demo_rows(demo: Mapping[str, Any]) -> list[Mapping[str, object]]:
    """The demo's table: sizes, ratios, speeds and what the restored states do to the loss."""
    rows = []
    for row in demo["rows"]:
        kept, changes = row["storage"], demo["changes_percent"][row["name"]]
        rows.append(
            {
                "method": row["name"],
                "run, MB": round(sum(kept["n_bytes"] if kept else demo["plain_bytes"]) / 1e6, 1),
                "ratio, weights and both moments": f"{kept['ratio']:.3f}x" if kept else "",
                "ratio, weights": f"{kept['weights_ratio']:.2f}x" if kept else "",
                "compress MB/s": round(kept["compress_rate"]) if kept else "",
                "restore MB/s": round(kept["restore_rate"]) if kept else "",
                "loss at once": f"{changes['at_once']:+.3f} %",
                "loss resumed": f"{changes['resumed']:+.3f} %",
            }
        )
    return rows


def readme_rows(demo: list[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """What the first page shows: stored size, its denominator, the quality change, the rival."""
    sizes, deltas = read_rows("lossless_sizes"), read_rows("lossless_delta_sizes")
    rows: list[Mapping[str, object]] = []
    for weights in ("fp32", "bf16"):
        ours = next(r for r in sizes if r["weights"] == weights and r["tool"].startswith("ckptz"))
        rival = next(r for r in sizes if r["weights"] == weights and r["tool"].startswith("ZipNN"))
        rows.append(
            _row(f"22.7 M {weights} weights of a sentence encoder", "lossless", float(ours["of raw"]), "none")
            | {"beside it": f"ZipNN 0.5.4: {_smaller(float(rival['of raw']))}"}
        )
    for kind in ("training", "fine-tune"):
        chosen = [r for r in deltas if r["pair"].startswith(kind)]
        rows.append(
            _row(f"bf16 weights, {len(chosen)} steps of a {kind} run", "lossless deltas", *_mean(chosen))
            | {"beside it": _rivals(chosen)}
        )
    shown = (
        (
            "ckptz kmeans",
            "ratio, weights",
            "fp32 weights of",
            "k-means, 16 levels",
        ),
        (
            "ckptz grid",
            "ratio, weights and both moments",
            "fp32 weights and both moments of",
            "calibrated grid",
        ),
    )
    for prefix, column, what, method in shown:
        for row in demo:
            if str(row["method"]).startswith(prefix):
                stored = 1 / float(str(row[column]).rstrip("x"))
                quality = f"{row['loss at once']} at once, {row['loss resumed']} resumed"
                name = f"{what} the demo's run, with its anchor"
                rows.append(_row(name, method, stored, quality) | {"beside it": ""})
    return [*rows, _run_row()]


RUN = "grid 0.5, octaves 6, roots 1"


def _run_row() -> dict[str, object]:
    """Whole states of the run of training_state."""
    row = next(row for row in read_rows("training_state_whole") if row["method"] == RUN)
    quality = f"{row['loss at once, %']} % at once, worst of five resumed {row['worst gap, %']} %"
    name = "fp32 weights and both moments of 14 checkpoints, with their anchor"
    return _row(name, "calibrated grid", 1 / float(row["ratio"]), quality) | {"beside it": ""}


def _row(what: str, method: str, share: float, loss: str) -> dict[str, object]:
    return {
        "checkpoint": what,
        "method": method,
        "smaller (share of raw)": _smaller(share),
        "change of the loss": loss,
    }


def _smaller(share: float) -> str:
    """Stored bytes over raw bytes, and how many times smaller that is."""
    return f"{1 / share:.4g}x ({share:.4g})"


def _mean(rows: list[dict[str, str]]) -> tuple[float, str]:
    shares = [1 / float(row["ckptz ratio"]) for row in rows]
    return sum(shares) / len(shares), "none"


def _rivals(rows: list[dict[str, str]]) -> str:
    parts = []
    for name, column in (("z4ai 0.2.0", "z4ai ratio"), ("XOR + planes + zstd -3", "xor ratio")):
        shares = [1 / float(row[column]) for row in rows]
        parts.append(f"{name}: {_smaller(sum(shares) / len(shares))}")
    return ", ".join(parts)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Collect the figures of the first page.")
    parser.add_argument("--demo", type=Path, default=BENCH.parent / "demo-output", help="the demo's folder")
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
