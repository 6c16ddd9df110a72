"""Searches with one knob, as `ckptz compress --method grid --budget ...` makes them, along the run.

Each checkpoint's file is searched for against the file before: weights alone under a budget of divergence,
and whole states under a budget of the resumed loss. Evaluations, sizes and seconds are kept.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.studies.paper_a.tasks import SEARCH
from bench.studies.paper_a.training import PROBE_STEPS, State, Trainer, probe_on, remembered
from bench.studies.training_state.study import Study, logits_of
from bench.studies.training_state.ways import WEIGHTS, WHOLE, Given
from ckptz import Agreement, Budget, ResumeProbe, compress
from ckptz.methods.grid import Grid
from ckptz.search_run.run import SearchOptions


@dataclass(frozen=True, slots=True)
class Searched:
    """A chain that is searched for.

    Attributes:
        name: of its budget.
        scope: weights or the whole state.
        budget: of each file.
        n_files: checkpoints from the first on.
    """

    name: str
    scope: str
    budget: Callable[[Study], Budget]
    n_files: int


def kl_budget(most: float) -> Callable[[Study], Budget]:
    """Divergence on the search's slice."""

    def budget(study: Study) -> Budget:
        agreement = Agreement(lambda state: logits_of(study.task, state, SEARCH))
        return Budget(agreement, most, relative=False, metric="kl")

    return budget


def resume_budget(most: float) -> Callable[[Study], Budget]:
    """Relative change of the mean validation loss 10 to 40 steps on."""

    def budget(study: Study) -> Budget:
        def resume(state: State, n_steps: int) -> float:
            assert n_steps == PROBE_STEPS[-1]
            return statistics.mean(probe_on(Trainer(study.task, state)))

        return Budget(ResumeProbe(resume, n_steps=PROBE_STEPS[-1]), most)

    return budget


SEARCHES: Final = (
    Searched("KL 5.6e-3", WEIGHTS, kl_budget(5.6e-3), 8),
    Searched("resume 0.2 %", WHOLE, resume_budget(0.002), 4),
)


def searches(study: Study) -> None:
    """Whatever the cache lacks of all searches."""
    for search in SEARCHES:
        for index in range(search.n_files):
            remembered(_path(study, search, index), functools.partial(_searched, study, search, index))


def found(study: Study, search: Searched) -> list[dict[str, Any]]:
    """Results of the files that the cache holds."""
    paths = (_path(study, search, index) for index in range(search.n_files))
    return [remembered(path, dict) for path in paths if path.exists()]


def _folder(study: Study, search: Searched) -> Path:
    folder = study.folder / f"search-{search.scope}-{search.name.replace(' ', '_').replace('%', 'percent')}"
    folder.mkdir(exist_ok=True)
    return folder


def _path(study: Study, search: Searched, index: int) -> Path:
    return _folder(study, search) / f"result-{index:02d}.json"


def _searched(study: Study, search: Searched, index: int) -> dict[str, Any]:
    given, folder = study.given(index), _folder(study, search)
    begin = time.process_time()
    (report,) = compress(
        [_source(given, search)],
        folder / f"file-{index:02d}.ckptz",
        base=folder / f"file-{index - 1:02d}.ckptz" if index else None,
        jobs=1,
        force=True,
        read_optimizer=given.snapshot.path if search.scope == WEIGHTS else None,
        calibration=given.calibration,
        search=SearchOptions(budgets=(search.budget(study),), template=Grid()),
    )
    seconds = time.process_time() - begin
    done = report.search
    assert done is not None
    print(
        f"search {search.name}, {index}: {report.stored_bytes} bytes, {len(done.trials)} trials", flush=True
    )
    return {
        "index": index,
        "n_bytes": report.stored_bytes,
        "is_met": done.is_met,
        "step": done.config["step"] if done.config else None,
        "n_evaluations": len(done.trials),
        "trials": [[trial.config["step"], trial.n_bytes, trial.drop] for trial in done.trials],
        "noise": done.noise,
        "cpu_seconds": seconds,
        "evaluation_share": done.evaluation_seconds / done.seconds,
    }


def _source(given: Given, search: Searched) -> Path:
    return given.snapshot.path if search.scope == WHOLE else given.weights
