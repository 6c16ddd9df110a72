"""Runs of training_state that really restart: ten times, from what the last file restores to.

The checkpoints are those of each run itself, so inputs are recorded from its own states.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.core.measure import CACHE, cpu_seconds
from bench.studies.paper_a.chain import FAILURES, Chain, Snapshot, disturbed
from bench.studies.paper_a.tasks import HELD_OUT, SEARCH, Task
from bench.studies.paper_a.training import N_CHECKPOINTS, State, Trainer, remembered
from bench.studies.training_state.settings import grid_weights, kmeans_weights, whole
from bench.studies.training_state.study import Study, calibrate
from bench.studies.training_state.ways import FileWay, Given, Stored, file_of, plain_weights

WAYS = (whole(0.5, 6, 1), whole(0.15, 4, 0.5), grid_weights(0.15), kmeans_weights(16))


@dataclass(frozen=True, slots=True)
class RestartMethod:
    """A way as a `Method` of a chain with restarts."""

    way: FileWay

    @property
    def name(self) -> str:
        """Of the folder."""
        return f"restarts-{self.way.scope}-{self.way.name.replace(' ', '_')}"

    def store(self, task: Task, snapshot: Snapshot, folder: Path) -> dict[str, Any]:
        """Record inputs, write the file against the one before, and note what it took."""
        weights, calibration = (folder / f"{n}.safetensors" for n in ("weights", "calibration"))
        plain_weights(weights, snapshot.state)
        record_seconds = calibrate(task, snapshot.state, calibration) if self.way.is_calibrated else 0.0
        base = self._path(folder, snapshot.index - 1) if snapshot.index else None
        given = Given(snapshot, weights, calibration)
        stored, seconds = cpu_seconds(lambda: self._stored(given, folder, base))
        return {
            "n_bytes": stored.n_bytes,
            "weight_bytes": stored.weight_bytes,
            "encode_seconds": stored.encode_seconds,
            "calibration_seconds": record_seconds,
            "cpu_seconds": seconds,
        }

    def restore(self, snapshot: Snapshot, folder: Path) -> State:
        """What the file restores to; optimizer state is exact where the scope is weights."""
        return self.way.restored(snapshot.state, self._path(folder, snapshot.index))

    def _stored(self, given: Given, folder: Path, base: Path | None) -> Stored:
        return file_of(self.way, given, self._path(folder, given.snapshot.index), base)

    def _path(self, folder: Path, index: int) -> Path:
        return folder / f"file-{index:02d}.ckptz"


@dataclass(frozen=True, slots=True)
class Restarts(Chain):
    """A chain in a folder of this study."""

    @property
    def folder(self) -> Path:
        """Where its files and results are kept."""
        folder = CACHE / "training_state" / self.task.name / self.method.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def chain_of(study: Study, way: FileWay) -> Restarts:
    """A run with all its restarts and no probes."""
    return Restarts(study.task, RestartMethod(way), failures=FAILURES, probes=False)


def restarts(study: Study, only: Collection[str] = ()) -> list[dict[str, Any]]:
    """Every run of which a name has one of the words; all if there are none."""
    ways = [way for way in WAYS if not only or any(word in way.name for word in only)]
    return [end_of(study, way) for way in ways]


def end_of(study: Study, way: FileWay) -> dict[str, Any]:
    """Sizes of a run, and its end against that of the uninterrupted one."""
    chain = chain_of(study, way)
    results, end = chain.results(), chain.end()
    changes = {part: end[part][0]["loss"] / end[part][1]["loss"] - 1 for part in (SEARCH, HELD_OUT)}
    return {
        "way": way,
        "n_restores": len(chain.failures),
        "n_bytes": sum(one["n_bytes"] for one in results),
        "n_files": len(results),
        "n_parameters": study.n_parameters(),
        "changes": changes,
        "encode_seconds": [one["encode_seconds"] for one in results],
    }


# --- what a restart does by itself --------------------------------------------------------------


CONTROLS = ((FAILURES[0], 0), (FAILURES[-3], 0))  # (checkpoint, seed)


def controls(study: Study) -> list[dict[str, Any]]:
    """Runs to the end from a checkpoint whose weights are disturbed by a hundredth of their spread.

    Nothing else happens to them: what is left at the end is how far apart two runs of this training come.
    """
    return [
        remembered(_control_path(study, *one), functools.partial(_control, study, *one)) for one in CONTROLS
    ]


def known_controls(study: Study) -> list[dict[str, Any]]:
    """Those that the cache holds."""
    paths = [_control_path(study, *one) for one in CONTROLS]
    return [remembered(path, dict) for path in paths if path.exists()]


def _control_path(study: Study, index: int, seed: int) -> Path:
    return study.folder / f"control-{index:02d}-{seed}.json"


def _control(study: Study, index: int, seed: int) -> dict[str, Any]:
    trainer = Trainer(study.task, disturbed(study.run.state(index), seed))
    changes: dict[str, dict[str, float]] = {part: {} for part in (SEARCH, HELD_OUT)}
    for later in range(index + 1, N_CHECKPOINTS):
        trainer.train(study.task.step_of(later) - trainer.step)
        for part, found in changes.items():
            found[str(later)] = trainer.evaluate(part).loss / study.run.facts(later)[part]["loss"] - 1
    return {"index": index, "seed": seed, "changes": changes}


def complete(study: Study) -> list[dict[str, Any]]:
    """Runs that the cache holds to the end."""
    return [end_of(study, way) for way in WAYS if chain_of(study, way).is_complete]
