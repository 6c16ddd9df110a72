"""The tables of paper_a: from what was measured to results/paper_a_*.csv."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.core.measure import Row, save_rows, verdict
from bench.studies.paper_a.chain import resumed_gap
from bench.studies.paper_a.coders import WAYS
from bench.studies.paper_a.search import drop_of, winner
from bench.studies.paper_a.tasks import HELD_OUT, SEARCH, Task

MIN_RATIO, MAX_END_CHANGE = 18.0, 0.01  # of the language run
MIN_CODER_GAIN: Final = 1.3  # regrouped rANS against Huffman without regrouping
MAX_SIZE_EXCESS, MAX_SHARE_OF_CUBE, MAX_NEIGHBOURHOOD = 0.02, 0.25, 10  # of the guided search, of each search

Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResults:
    """Everything that was measured of one task.

    Attributes:
        task: which.
        exact: of each checkpoint of the uninterrupted run: step, quality, seconds of training before it.
        chains: of each run: budget, n_restores, checkpoints, end, elsewhere, coders.
        noise_floor: resumed gap of states that were disturbed a little, if it was measured.
        snapshots: of each budget, if they were measured.
        search: trials of the whole cube and of the guided search, if it was measured.
        timings: CPU seconds of an anchor and of a delta, if they were measured.
        missing: what was not measured, in words.
    """

    task: Task
    exact: Sequence[Result]
    chains: Sequence[Result]
    noise_floor: float | None
    snapshots: Sequence[Result]
    search: Mapping[str, Any] | None
    timings: Sequence[Result]
    missing: Sequence[str]


def percent(value: float, digits: int = 2) -> str:
    """A signed share in percent."""
    return f"{100 * value:+.{digits}f} %"


def ratio(results: Iterable[Result]) -> float:
    """Bytes of fp32 weights over bytes stored, over all of some files."""
    results = list(results)
    return sum(r["raw_bytes"] for r in results) / sum(r["n_bytes"] for r in results)


def run_name(found: TaskResults, chain: Result) -> dict[str, object]:
    """The first columns of a run's rows."""
    return {
        "run": found.task.name,
        "budget": f"{100 * chain['budget']:g} %",
        "restores": chain["n_restores"],
    }


def drops(found: TaskResults, chain: Result, part: str) -> list[float]:
    """Relative loss of the budgeted measure at once, of each checkpoint, as a new process measured it."""
    pairs = zip(chain["checkpoints"], chain["elsewhere"], strict=True)
    return [drop_of(found.task, one["exact"][part], restored[part]) for one, restored in pairs]


def loss_change(pair: Sequence[Result]) -> float:
    """Relative change of the loss from the second to the first of a pair."""
    return pair[0]["loss"] / pair[1]["loss"] - 1


# --- rows ---------------------------------------------------------------------------------------


def run_rows(found: TaskResults) -> list[Row]:
    """Sizes, and what the restores did to the end of the run."""
    rows: list[Row] = []
    for chain in found.chains:
        files = chain["checkpoints"]
        whole, end = ratio(files), loss_change(chain["end"][HELD_OUT])
        after = [one for one in files if one["after_restart"]]
        row = run_name(found, chain) | {
            "ratio": f"{whole:.1f}x",
            "anchor": f"{ratio(files[:1]):.1f}x",
            "right after a restart": f"{ratio(after):.1f}x" if after else "",
            "others with the anchor": f"{ratio(one for one in files if not one['after_restart']):.1f}x",
            "end loss": "",
            "end loss, search's data": "",
            "end accuracy, points": "",
            "target": "",
            "verdict": "",
        }
        if chain["n_restores"]:
            quality, exact = chain["end"][HELD_OUT]
            row["end loss"] = percent(end)
            row["end loss, search's data"] = percent(loss_change(chain["end"][SEARCH]))
            row["end accuracy, points"] = f"{100 * (quality['accuracy'] - exact['accuracy']):+.2f}"
            if found.task.name == "language":
                row["target"] = f">= {MIN_RATIO:.0f}x, end <= 1 %"
                row["verdict"] = verdict(whole >= MIN_RATIO and end <= MAX_END_CHANGE)
        rows.append(row)
    return rows


def quality_rows(found: TaskResults) -> list[Row]:
    """The budget, checked in a new process, and the resumed loss."""
    rows: list[Row] = []
    for chain in found.chains:
        own, other = drops(found, chain, SEARCH), drops(found, chain, HELD_OUT)
        n, budget = len(own), chain["budget"]
        kept, kept_elsewhere = (sum(d <= budget for d in values) for values in (own, other))
        gaps = [resumed_gap(one["resumed"]) for one in chain["checkpoints"] if "resumed" in one]
        rows.append(
            run_name(found, chain)
            | {
                "measure": found.task.budgeted,
                "kept": f"{kept} of {n}",
                "lost at once, mean": percent(statistics.mean(own)),
                "worst": percent(max(own)),
                "kept, held out": f"{kept_elsewhere} of {n}",
                "held out, mean": percent(statistics.mean(other)),
                "held out, worst": percent(max(other)),
                "loss resumed, mean": percent(statistics.mean(gaps)) if gaps else "",
                "resumed, worst": percent(max(gaps)) if gaps else "",
                "noise floor": _floor(found) if gaps else "",
                "target": f"{n} of {n} kept",
                "verdict": verdict(kept == n),
            }
        )
    return rows


def _floor(found: TaskResults) -> str:
    return "" if found.noise_floor is None else f"{100 * found.noise_floor:.3f} %"


def second_rows(found: TaskResults) -> list[Row]:
    """CPU seconds of an anchor and of a delta, beside those of the training between two checkpoints."""
    return [
        {
            "task": found.task.name,
            "CPU seconds": f"step {one['step']}, {kind}",
            "evaluations": one["n_evaluations"],
            "evaluating": f"{one['evaluation_seconds']:.2f}",
            "all else of search and writing": f"{one['store_seconds'] - one['evaluation_seconds']:.2f}",
            "restoring": f"{one['restore_seconds']:.2f}",
            "training between two": f"{one['training_seconds']:.1f}",
        }
        for kind, one in zip(("anchor", "delta"), found.timings, strict=bool(found.timings))
    ]


def coder_rows(found: TaskResults) -> list[Row]:
    """Bytes of each run by each way of coding the same codes."""
    rows: list[Row] = []
    for chain in found.chains:
        totals = {way: sum(sizes[way] for sizes in chain["coders"]) for way in WAYS}
        raw = sum(one["raw_bytes"] for one in chain["checkpoints"])
        n_larger = sum(sizes["rANS regrouped"] > sizes["rANS"] for sizes in chain["coders"])
        gain = totals["Huffman"] / totals["rANS regrouped"]
        row = run_name(found, chain) | {way: f"{raw / size:.1f}x" for way, size in totals.items()}
        rows.append(
            row
            | {
                "Huffman over regrouped": f"{gain:.2f}",
                "files larger regrouped": n_larger,
                "target": f">= {MIN_CODER_GAIN}, none larger",
                "verdict": verdict(gain >= MIN_CODER_GAIN and not n_larger),
            }
        )
    return rows


def search_rows(found: TaskResults) -> list[Row]:
    """Guided search against the whole cube on the reduced set, and the neighbourhood within the runs."""
    rows: list[Row] = []
    if found.search is not None:
        every = found.search["exhaustive"]
        rows += [_guided_row(found, budget, every, one) for budget, one in found.search["guided"].items()]
    for chain in found.chains:
        counts = [one["search"]["by_strategy"].get("neighbourhood", 0) for one in chain["checkpoints"]]
        label = f"{100 * chain['budget']:g} %, {chain['n_restores']} restores"
        row = _search_row(found, label, "neighbourhood, most", max(counts))
        row |= {"target": f"<= {MAX_NEIGHBOURHOOD}", "verdict": verdict(max(counts) <= MAX_NEIGHBOURHOOD)}
        rows.append(row)
    return rows


def _guided_row(found: TaskResults, budget: float, every: Result, guided: Result) -> Row:
    excess = winner(guided, budget)["n_bytes"] / winner(every, budget)["n_bytes"] - 1
    n_guided, n_every = guided["n_evaluations"], every["n_evaluations"]
    passed = excess <= MAX_SIZE_EXCESS and n_guided <= MAX_SHARE_OF_CUBE * n_every
    return _search_row(found, f"{100 * budget:g} %", "guided", n_guided) | {
        "whole cube": n_every,
        "size over the cube's best": percent(excess),
        "target": f"<= {MAX_SIZE_EXCESS:.0%}, <= {MAX_SHARE_OF_CUBE * n_every:.0f}",
        "verdict": verdict(passed),
    }


def _search_row(found: TaskResults, budget: str, strategy: str, n_evaluations: int) -> dict[str, object]:
    row: dict[str, object] = {"task": found.task.name, "budget": budget, "search": strategy}
    row["evaluations"] = n_evaluations
    names = ("whole cube", "size over the cube's best", "target", "verdict")
    return row | dict.fromkeys(names, "")


def snapshot_rows(found: TaskResults) -> list[Row]:
    """One checkpoint alone, by budget."""
    rows: list[Row] = []
    for one in found.snapshots:
        at_once = [drop_of(found.task, one["exact"][p], one["restored"][p]) for p in (SEARCH, HELD_OUT)]
        rows.append(
            {
                "task": found.task.name,
                "budget": f"{100 * one['budget']:g} %",
                "ratio": f"{ratio([one]):.1f}x",
                **settings(one["search"]["config"]),
                "evaluations": one["search"]["n_evaluations"],
                "measure": found.task.budgeted,
                "lost": percent(at_once[0]),
                "held out": percent(at_once[1]),
                "loss resumed": percent(resumed_gap(one["resumed"])),
                "noise floor": _floor(found),
            }
        )
    return rows


def settings(config: Mapping[str, Any] | None) -> dict[str, object]:
    """Chosen settings as columns; empty where nothing met the budget and the file is lossless."""
    names = ("levels", "embedding_levels", "prune", "prune_by", "protect")
    return {name.replace("_", " "): "" if config is None else config[name] for name in names}


def checkpoint_rows(found: TaskResults) -> list[Row]:
    """Every file of every run."""
    rows: list[Row] = []
    for chain in found.chains:
        own, other = drops(found, chain, SEARCH), drops(found, chain, HELD_OUT)
        for one, lost, lost_elsewhere in zip(chain["checkpoints"], own, other, strict=True):
            rows.append(
                run_name(found, chain)
                | {
                    "step": one["step"],
                    "after a restart": "yes" if one["after_restart"] else "",
                    "ratio": f"{ratio([one]):.1f}x",
                    **settings(one["search"]["config"]),
                    "evaluations": one["search"]["n_evaluations"],
                    "lost": percent(lost),
                    "held out": percent(lost_elsewhere),
                    "loss resumed": percent(resumed_gap(one["resumed"])) if "resumed" in one else "",
                }
            )
    return rows


TABLES: Final[Mapping[str, Callable[[TaskResults], list[Row]]]] = {
    "runs": run_rows,
    "quality": quality_rows,
    "seconds": second_rows,
    "coders": coder_rows,
    "search": search_rows,
    "snapshots": snapshot_rows,
    "checkpoints": checkpoint_rows,
}


def write_tables(results: Sequence[TaskResults]) -> None:
    """results/paper_a_NAME.csv for each of TABLES."""
    for name, rows_of in TABLES.items():
        rows = [row for found in results for row in rows_of(found)]
        if rows:
            save_rows(f"paper_a_{name}", rows)
