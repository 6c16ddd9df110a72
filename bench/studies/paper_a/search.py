"""The method that paper_a measures: k-means maps whose settings ckptz searches for under a budget.

Only weights are compressed, as in the paper. Optimizer state stays exact: it is not in the files and not
counted. The language model's sensitivity comes from Adam's second moments, the image model's from the
averaged gradients of `ckptz.hooks.SensitivityTracker`.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from safetensors.torch import save_file
from torch import Tensor

import ckptz
from bench.core.measure import cpu_seconds
from bench.studies.paper_a.chain import Chain, Snapshot, exact_probe
from bench.studies.paper_a.tasks import HELD_OUT, SEARCH, Task
from bench.studies.paper_a.training import (
    Run,
    State,
    Trainer,
    folder_of,
    probe_on,
    publish,
    remembered,
    weights_of,
)
from ckptz import Budget, KMeans
from ckptz.commands.compress import CompressReport
from ckptz.search_run.run import SearchOptions, SearchReport
from ckptz.torch import load_file

BUDGETS: Final = {"language": (0.05, 0.01, 0.005), "image": (0.05, 0.01)}  # of the runs, relative
SEARCH_BUDGETS: Final = (0.05, 0.01)  # of the searches that are compared with the whole cube
SNAPSHOT_BUDGETS: Final = (0.005, 0.01, 0.02, 0.05, 0.1)
SNAPSHOT_INDEX: Final = 6
TIMED_INDEX: Final = 7
LAST_TIMING: Final = f"timings/result-{TIMED_INDEX:02d}.json"  # in the folder of a run
REDUCED: Final = 1  # batches of the evaluation set that the whole cube is measured on


class WeightQuality:
    """Quality of named weights on the search's slice, as a budget wants it."""

    def __init__(self, task: Task, n_batches: int | None = None) -> None:
        self.task, self.n_batches = task, n_batches
        self.model = task.model()
        self.metric = task.budgeted
        self.data_digest = f"{task.name}, {SEARCH}"

    def __call__(self, state: Mapping[str, Tensor]) -> float:
        """The budgeted measure."""
        self.model.load_state_dict(state)
        return getattr(self.task.evaluate(self.model, SEARCH, self.n_batches), self.metric)


def budget_of(task: Task, max_drop: float, n_batches: int | None = None) -> Budget:
    """A relative budget for the task's measure."""
    is_loss = task.budgeted == "loss"
    return Budget(WeightQuality(task, n_batches), max_drop, lower_is_better=is_loss)


def drop_of(task: Task, exact: Mapping[str, Any], found: Mapping[str, Any]) -> float:
    """Relative loss of the budgeted measure; negative if it became better."""
    change = found[task.budgeted] / exact[task.budgeted] - 1
    return change if task.budgeted == "loss" else -change


def compress(
    task: Task, snapshot: Snapshot, output: Path, base: Path | None, search: SearchOptions
) -> CompressReport:
    """Search and write the weights of one checkpoint."""
    plain = output.with_suffix(".safetensors")
    publish(plain, lambda p: save_file(weights_of(snapshot.state), p))
    has_second_moments = "exp_avg_sq" in task.moments
    (report,) = ckptz.compress(
        [plain],
        output,
        base=base,
        step=int(snapshot.state["step"]),
        force=True,
        read_optimizer=snapshot.path if has_second_moments else None,
        sensitivity=None if has_second_moments else snapshot.gradients_path,
        search=search,
    )
    plain.unlink()
    return report


def sizes_of(report: CompressReport) -> dict[str, Any]:
    """Bytes of the file, headers included, and of the weights as they were."""
    return {"n_bytes": report.stored_bytes, "raw_bytes": report.tensor_bytes, "n_deltas": report.n_deltas}


def search_facts(found: SearchReport) -> dict[str, Any]:
    """What the tables need of a search."""
    return {
        "strategy": found.strategy,
        "is_met": found.is_met,
        "config": found.config,
        "n_evaluations": len(found.trials),
        "by_strategy": Counter(trial.strategy for trial in found.trials),
        "seconds": found.seconds,
        "evaluation_seconds": found.evaluation_seconds,
    }


@dataclass(frozen=True, slots=True)
class KMeansSearch:
    """The paper's method: searched under a relative budget, guided first, then around the last settings."""

    budget: float

    @property
    def name(self) -> str:
        """Name of the folder."""
        return f"kmeans-{self.budget:g}"

    def path(self, folder: Path, index: int) -> Path:
        """The file of a checkpoint."""
        return folder / f"weights-{index:02d}.ckptz"

    def store(self, task: Task, snapshot: Snapshot, folder: Path) -> dict[str, Any]:
        """Search and write; the base is the file before."""
        output = self.path(folder, snapshot.index)
        base = self.path(folder, snapshot.index - 1) if snapshot.index else None
        search = SearchOptions(budgets=(budget_of(task, self.budget),), template=KMeans.reference())
        report = compress(task, snapshot, output, base, search)
        return sizes_of(report) | {"search": search_facts(report.search)}

    def restore(self, snapshot: Snapshot, folder: Path) -> State:
        """Compressed weights beside the exact optimizer state."""
        return with_weights(snapshot.state, self.path(folder, snapshot.index))


def with_weights(state: State, path: Path) -> State:
    """The state with the weights of a file."""
    return {**state, **{f"model.{name}": tensor for name, tensor in load_file(path).items()}}


# --- single snapshots ---------------------------------------------------------------------------


def snapshots(task: Task) -> list[dict[str, Any]]:
    """One checkpoint, compressed alone under each of SNAPSHOT_BUDGETS."""
    folder = folder_of(task) / "snapshots"
    folder.mkdir(exist_ok=True)
    return [
        remembered(folder / f"result-{budget:g}.json", lambda b=budget: _snapshot(task, b, folder))
        for budget in SNAPSHOT_BUDGETS
    ]


def _snapshot(task: Task, budget: float, folder: Path) -> dict[str, Any]:
    run = Run(task)
    snapshot = Snapshot.of(run, SNAPSHOT_INDEX)
    output = folder / f"weights-{budget:g}.ckptz"
    search = SearchOptions(budgets=(budget_of(task, budget),), template=KMeans.reference())
    report = compress(task, snapshot, output, None, search)
    trainer = Trainer(task, with_weights(snapshot.state, output))
    result: dict[str, Any] = {"budget": budget, **sizes_of(report)}
    result |= {"search": search_facts(report.search), "exact": run.facts(SNAPSHOT_INDEX)}
    result["restored"] = {part: asdict(trainer.evaluate(part)) for part in (SEARCH, HELD_OUT)}
    result["resumed"] = {"restored": probe_on(trainer), "exact": exact_probe(task, SNAPSHOT_INDEX)}
    print(f"{task.name}, snapshot at {budget:g}: {result['n_bytes']} bytes", flush=True)
    return result


# --- seconds ------------------------------------------------------------------------------------


def timings(chain: Chain) -> list[dict[str, Any]]:
    """CPU seconds of two checkpoints of a run, the anchor and a delta, and of the training between two."""
    folder = chain.folder / "timings"
    folder.mkdir(exist_ok=True)
    return [
        remembered(folder / f"result-{index:02d}.json", lambda i=index: _timing(chain, i, folder))
        for index in (0, TIMED_INDEX)
    ]


def _timing(chain: Chain, index: int, folder: Path) -> dict[str, Any]:
    task, snapshot = chain.task, chain.snapshot(index)
    for earlier in chain.folder.glob("weights-*.ckptz"):
        shutil.copyfile(earlier, folder / earlier.name)
    trainer = Trainer(task, snapshot.state)
    trainer.evaluate(SEARCH)
    # The search evaluates the exact weights too.
    _, evaluation = cpu_seconds(lambda: trainer.evaluate(SEARCH))
    facts, store = cpu_seconds(lambda: chain.method.store(task, snapshot, folder))
    n_evaluations = facts["search"]["n_evaluations"]
    return {
        "step": trainer.step,
        "n_evaluations": n_evaluations,
        "evaluation_seconds": evaluation * (n_evaluations + 1),
        "store_seconds": store,
        "restore_seconds": cpu_seconds(lambda: chain.method.restore(snapshot, folder))[1],
        "training_seconds": cpu_seconds(lambda: trainer.train(task.interval))[1],
    }


# --- the cost of searching ----------------------------------------------------------------------


def search_cost(task: Task) -> dict[str, Any]:
    """All 216 settings that prune by magnitude, and the guided search among them, on the reduced set."""
    folder = folder_of(task) / "search"
    folder.mkdir(exist_ok=True)
    every = remembered(
        folder / "exhaustive.json", lambda: _trials(task, folder, "exhaustive", SEARCH_BUDGETS[0])
    )
    return {
        "exhaustive": every,
        "guided": {
            budget: remembered(
                folder / f"guided-{budget:g}.json", lambda b=budget: _trials(task, folder, "guided", b)
            )
            for budget in SEARCH_BUDGETS
        },
    }


def _trials(task: Task, folder: Path, strategy: str, budget: float) -> dict[str, Any]:
    snapshot = Snapshot.of(Run(task), 0)
    search = SearchOptions(
        template=KMeans.reference(),
        budgets=(budget_of(task, budget, REDUCED),),
        strategy=strategy,
        cubes=("magnitude",),
        is_dry_run=True,
    )
    report = compress(task, snapshot, folder / "unused.ckptz", None, search)
    trials = [
        {"config": trial.config, "n_bytes": trial.n_bytes, "share_used": trial.drop}
        for trial in report.search.trials
    ]
    print(f"{task.name}, {strategy} search at {budget:g}: {len(trials)} evaluations", flush=True)
    return {**search_facts(report.search), "budget": budget, "trials": trials}


def winner(searched: Mapping[str, Any], budget: float) -> dict[str, Any]:
    """The smallest of a search's trials within a budget, which may be another than it was made for."""
    most = budget / searched["budget"]
    kept = [t for t in searched["trials"] if t["share_used"] is not None and t["share_used"] <= most]
    return min(kept, key=lambda trial: trial["n_bytes"])
