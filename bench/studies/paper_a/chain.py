"""A run whose checkpoints are compressed as a chain, and which really restarts from some of them.

Knows nothing of how a checkpoint is compressed: that is a `Method`. A failure strikes after a checkpoint is
written; training then goes on from what the file restores to. Every checkpoint's result is kept, so an
interrupted run goes on where it stopped.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors.torch import load_file, save_file

from bench.studies.paper_a.tasks import HELD_OUT, SEARCH, Task
from bench.studies.paper_a.training import (
    N_CHECKPOINTS,
    Run,
    State,
    Trainer,
    folder_of,
    probe_on,
    publish,
    remembered,
    weights_of,
)

N_FAILURES: Final = 10
# They cut the time from the first checkpoint to the last into equal parts; each restarts from the one before.
FAILURES: Final = tuple((i + 1) * (N_CHECKPOINTS - 1) // (N_FAILURES + 1) for i in range(N_FAILURES))
NEVER: Final[tuple[int, ...]] = ()
DISTURBANCE: Final = 0.01  # of a tensor's standard deviation, for the noise floor


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a method is given of a checkpoint.

    Attributes:
        index: counted from 0.
        path: file of the whole state.
        gradients_path: averages of the gradients before it, as `SensitivityTracker` saves them.
        state: the whole state.
    """

    index: int
    path: Path
    gradients_path: Path
    state: State

    @classmethod
    def of(cls, run: Run, index: int) -> Snapshot:
        """A checkpoint of the uninterrupted run."""
        return cls(index, run.path(index), run.gradients_path(index), run.state(index))


class Method(Protocol):
    """A way to store the checkpoints of a run in a folder."""

    @property
    def name(self) -> str:
        """Name of the folder; names everything that the results depend on."""
        ...

    def store(self, task: Task, snapshot: Snapshot, folder: Path) -> dict[str, Any]:
        """Write one checkpoint; earlier ones of the run are in the folder. Returns what to record."""
        ...

    def restore(self, snapshot: Snapshot, folder: Path) -> State:
        """The whole state that training would go on from."""
        ...


@dataclass(frozen=True, slots=True)
class Chain:
    """One run with one method.

    Attributes:
        task: what is trained.
        method: how its checkpoints are stored.
        failures: indices of the checkpoints that training restarts from.
        probes: whether the resumed loss is measured at every checkpoint.
    """

    task: Task
    method: Method
    failures: tuple[int, ...] = FAILURES
    probes: bool = True

    @property
    def folder(self) -> Path:
        """Where its files and results are kept."""
        folder = folder_of(self.task) / f"{self.method.name}-{len(self.failures)}-failures"
        folder.mkdir(exist_ok=True)
        return folder

    @property
    def is_complete(self) -> bool:
        """Whether every checkpoint's result is there."""
        return self._result_path(N_CHECKPOINTS - 1).exists()

    def results(self) -> list[dict[str, Any]]:
        """The result of every checkpoint, made where it is missing."""
        return [
            remembered(self._result_path(i), lambda i=i: self._checkpoint(i)) for i in range(N_CHECKPOINTS)
        ]

    def _result_path(self, index: int) -> Path:
        return self.folder / f"result-{index:02d}.json"

    def end(self) -> dict[str, Any]:
        """(quality of the last exact state of this run, of the uninterrupted one), by slice."""
        uninterrupted = Run(self.task).facts(N_CHECKPOINTS - 1)
        return {part: (self.results()[-1]["exact"][part], uninterrupted[part]) for part in (SEARCH, HELD_OUT)}

    def _checkpoint(self, index: int) -> dict[str, Any]:
        snapshot = self.snapshot(index)
        begin = time.perf_counter()
        facts = self.method.store(self.task, snapshot, self.folder)
        stored_at = time.perf_counter()
        restored = self.method.restore(snapshot, self.folder)
        seconds = {"store_seconds": stored_at - begin, "restore_seconds": time.perf_counter() - stored_at}
        trainers = {"exact": Trainer(self.task, snapshot.state), "restored": Trainer(self.task, restored)}
        after_restart = index - 1 in self.failures
        result: dict[str, Any] = {"index": index, "step": trainers["exact"].step, **facts, **seconds}
        result |= {"after_restart": after_restart}
        for name, trainer in trainers.items():
            result[name] = {part: asdict(trainer.evaluate(part)) for part in (SEARCH, HELD_OUT)}
        if self.probes:
            result["resumed"] = self._probe(index, trainers)
        self._train_on(index, trainers["restored" if index in self.failures else "exact"])
        print(f"{self.task.name}, {self.folder.name}: {_brief(result)}", flush=True)
        return result

    def snapshot(self, index: int) -> Snapshot:
        """A checkpoint of this run, before it is compressed."""
        if not index or not self.failures:
            return Snapshot.of(Run(self.task), index)
        path = self._state_path(index)
        return Snapshot(index, path, self._gradients_path(index), load_file(path))

    def _state_path(self, index: int) -> Path:
        return self.folder / f"state-{index:02d}.safetensors"

    def _gradients_path(self, index: int) -> Path:
        return self.folder / f"gradients-{index:02d}.safetensors"

    def _probe(self, index: int, trainers: Mapping[str, Trainer]) -> dict[str, list[float]]:
        if not self.failures:
            return {"exact": exact_probe(self.task, index), "restored": probe_on(trainers["restored"])}
        return {name: probe_on(trainer) for name, trainer in trainers.items()}

    def _train_on(self, index: int, trainer: Trainer) -> None:
        """Train to the next checkpoint, from where the trainer stands by now."""
        if not self.failures or index == N_CHECKPOINTS - 1:
            return
        trainer.train(self.task.step_of(index + 1) - trainer.step)
        trainer.gradients.save(self._gradients_path(index + 1))
        publish(self._state_path(index + 1), lambda p: save_file(trainer.state(), p))


def _brief(result: Mapping[str, Any]) -> str:
    at_once = [result[name][SEARCH]["loss"] for name in ("exact", "restored")]
    gap = f", resumed {resumed_gap(result['resumed']):+.4f}" if "resumed" in result else ""
    return (
        f"{result['index']}: {result.get('n_bytes')} bytes, at once {at_once[1] / at_once[0] - 1:+.4f}{gap}"
    )


def resumed_gap(probes: Mapping[str, list[float]]) -> float:
    """Relative change of the mean validation loss over PROBE_STEPS after a restore."""
    return statistics.mean(probes["restored"]) / statistics.mean(probes["exact"]) - 1


# --- what resuming costs without any compression ------------------------------------------------


def exact_probe(task: Task, index: int) -> list[float]:
    """Losses after a resumption from an exact checkpoint of the uninterrupted run."""
    path = folder_of(task) / f"probe-{index:02d}.json"
    state = Run(task).state
    found = remembered(path, lambda: {"losses": probe_on(Trainer(task, state(index)))})
    return found["losses"]


def disturbed(state: State, seed: int) -> dict[str, torch.Tensor]:
    """The state with noise of DISTURBANCE of each weight tensor's spread, as if a mild compressor had run."""
    generator = torch.Generator().manual_seed(seed)
    names = {f"model.{n}" for n, t in weights_of(state).items() if t.dim() > 1}
    return {
        name: t + DISTURBANCE * t.std() * torch.randn(t.shape, generator=generator) if name in names else t
        for name, t in state.items()
    }


def noise_floor(task: Task, indices: tuple[int, ...] = (2, 7, 11), n_seeds: int = 2) -> float:
    """Mean magnitude of the resumed gap of disturbed states."""

    def measure() -> dict[str, Any]:
        gaps = []
        for index in indices:
            for seed in range(n_seeds):
                losses = probe_on(Trainer(task, disturbed(Run(task).state(index), seed)))
                gaps.append(resumed_gap({"restored": losses, "exact": exact_probe(task, index)}))
        return {"gaps": gaps}

    gaps = remembered(folder_of(task) / "noise-floor.json", measure)["gaps"]
    return statistics.mean(map(abs, gaps))
