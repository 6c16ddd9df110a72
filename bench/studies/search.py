"""The guided search against an exhaustive search: number of evaluations, and size of the best file.

    python -m bench.studies.search

Both search the k-means settings for the weights of the first checkpoint of the cached runs, within a relative
budget on a reduced slice of the evaluation data. The sensitivity of the language model comes from Adam's
second moments, that of the image model from averaged gradients (`ckptz.hooks.SensitivityTracker`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

import ckptz
from bench.core.measure import Row, machine, parser_of, save_rows, verdict
from bench.core.report import finish
from bench.studies.tasks import SEARCH, TASKS, Task
from bench.studies.training import N_THREADS, Run, folder_of, remembered, weights_of
from ckptz import Budget, KMeans
from ckptz.search.budget import Limit, SearchOptions, judge, share_used
from ckptz.search.spaces import CubeSpace, reference, space_of
from ckptz.state.roles import role_of
from ckptz.torch import load_file

BUDGETS: Final = (0.05, 0.01)
REDUCED: Final = 1  # evaluation batches on which every setting is measured
MAX_SIZE_EXCESS, MAX_SHARE_OF_CUBE = 0.02, 0.25


class WeightQuality:
    """Evaluation function of a budget: quality of weights by name on the reduced slice."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.model = task.model()
        self.metric = task.budgeted
        self.data_digest = f"{task.name}, {SEARCH}"

    def __call__(self, state: Mapping[str, Tensor]) -> Tensor:
        """Return the budgeted measure of each example [n]."""
        self.model.load_state_dict(state)
        return self.task.answers(self.model, SEARCH, REDUCED)[self.metric]


def budget_of(task: Task, max_drop: float) -> Budget:
    """Create a relative budget for the budgeted measure of a task."""
    # Searches accept unsure files: the change of each file is recorded, and compared with the budgets later.
    return Budget(WeightQuality(task), max_drop, lower_is_better=task.budgeted == "loss", allow_unsure=True)


def every(task: Task, budget: float) -> dict[str, Any]:
    """Write and evaluate a file of the first checkpoint with each setting that prunes by magnitude."""
    state, quality = weights_of(Run(task).state(0)), WeightQuality(task)
    limit, exact = Limit(budget, True, allow_unsure=True), budget_of(task, budget).read(quality(state))
    layer_types = {
        role_of(name, tuple(t.shape), t.is_floating_point()).layer_type for name, t in state.items()
    }
    space = space_of(KMeans)
    assert isinstance(space, CubeSpace)
    (cube,) = space.cubes(reference(KMeans), ["magnitude"], layer_types, is_ranked=True)
    trials = []
    with tempfile.TemporaryDirectory() as folder:
        plain, packed = Path(folder, "weights.safetensors"), Path(folder, "weights.ckptz")
        save_file(state, plain)
        for config in sorted(set(map(cube.config, cube.points)), key=repr):
            (report,) = ckptz.compress([plain], packed, config=config, force=True, **_guides(task))
            measurement = budget_of(task, budget).read(quality(load_file(packed)))
            judgement = asdict(judge(limit, exact, measurement))
            trials.append({"n_bytes": report.stored_bytes, "judgement": judgement})
    return {"budget": budget, "trials": trials}


def _guides(task: Task) -> dict[str, Path]:
    run, has_second_moments = Run(task), "exp_avg_sq" in task.moments
    return {"moments_from": run.path(0)} if has_second_moments else {"sensitivity": run.gradients_path(0)}


def guided(task: Task, budget: float) -> dict[str, Any]:
    """List the trials of a guided search that prunes by magnitude at the first checkpoint; write no file."""
    search = SearchOptions(
        template=reference(KMeans),
        budgets=(budget_of(task, budget),),
        cubes=("magnitude",),
        is_dry_run=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder, "weights.safetensors")
        save_file(weights_of(Run(task).state(0)), plain)
        (report,) = ckptz.compress([plain], Path(folder, "unused.ckptz"), search=search, **_guides(task))
    assert report.search is not None
    trials = [{"n_bytes": t.n_bytes, "judgement": asdict(t.judgements[0])} for t in report.search.trials]
    print(f"{task.name}, guided search at {budget:g}: {len(trials)} evaluations", flush=True)
    return {"budget": budget, "trials": trials}


def least(searched: Mapping[str, Any], budget: float) -> int:
    """Return the bytes of the smallest trial within `budget`, which may differ from the search's budget."""
    return min(t["n_bytes"] for t in searched["trials"] if keeps(t["judgement"], budget))


def keeps(judgement: Mapping[str, Any], budget: float) -> bool:
    """Return whether a trial is within a budget; numbers that are not finite (None) exceed it."""
    change, error, example = (judgement[n] for n in ("mean_change", "standard_error", "example_change"))
    limit = Limit(budget, True, allow_unsure=True)
    return None not in (change, error, example) and share_used(change, error, example, limit) <= 1


def rows_of(task: Task) -> Iterator[Row]:
    """Yield a row for each budget."""
    folder = folder_of(task)
    exhaustive = remembered(folder / "every.json", lambda: every(task, BUDGETS[0]))
    for budget in BUDGETS:
        searched = remembered(folder / f"guided-{budget:g}.json", lambda b=budget: guided(task, b))
        excess = least(searched, budget) / least(exhaustive, budget) - 1
        n_guided, n_every = len(searched["trials"]), len(exhaustive["trials"])
        most = MAX_SHARE_OF_CUBE * n_every
        yield {
            "task": task.name,
            "budget": f"{100 * budget:g} %",
            "evaluations": n_guided,
            "of all settings": n_every,
            "size over the best of all": f"{100 * excess:+.2f} %",
            "target": f"<= {MAX_SIZE_EXCESS:.0%}, <= {most:.0f}",
            "verdict": verdict(excess <= MAX_SIZE_EXCESS and n_guided <= most),
        }


def main() -> None:
    """Run the command line."""
    parser_of(__doc__).parse_args()
    torch.set_num_threads(N_THREADS)
    rows: list[Row] = []
    for make in TASKS.values():
        Run(make()).train(n_checkpoints=1)
        rows += rows_of(make())
    save_rows("search", rows)
    finish("search", machine())


if __name__ == "__main__":
    main()
