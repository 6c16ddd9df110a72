"""Measures ways to store checkpoints on a cached run: bytes, divergence at once, and the resumed loss.

Every figure of a checkpoint is kept as JSON in bench/.cache/training_state, so that an interrupted study goes
on where it stopped, and several processes may measure different ways at once.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from bench.core.measure import CACHE, cpu_seconds
from bench.core.tiny_gpt import batches, read_corpus
from bench.studies.paper_a.chain import Snapshot, disturbed, exact_probe, resumed_gap
from bench.studies.paper_a.tasks import GPT, HELD_OUT, Task
from bench.studies.paper_a.training import (
    N_CHECKPOINTS,
    Run,
    State,
    Trainer,
    probe_on,
    remembered,
    weights_of,
)
from bench.studies.training_state.ways import (
    BYTES_OF_PARAMETER,
    WEIGHTS,
    Given,
    Stored,
    Way,
    plain_weights,
)
from ckptz.hooks import Calibration
from ckptz.search.agreement import agreement_of

POINTS: Final = (2, 5, 8, 10, 12)  # checkpoints that training resumes from
N_NOISE_SEEDS: Final = 2
N_CALIBRATION_BATCHES, CALIBRATION_BATCH, CALIBRATION_SEED = 16, 4, 3  # of training text


@dataclasses.dataclass(frozen=True, slots=True)
class Study:
    """A run, and where everything that is measured on it lies.

    Attributes:
        task: what is trained.
        folder: in the cache.
        points: checkpoints that training resumes from, counted from 0.
    """

    task: Task
    folder: Path
    points: tuple[int, ...] = POINTS

    @classmethod
    def of(cls, task: Task, points: tuple[int, ...] = POINTS) -> Study:
        """The study of a task."""
        folder = CACHE / "training_state" / task.name
        folder.mkdir(parents=True, exist_ok=True)
        return cls(task, folder, points)

    @property
    def run(self) -> Run:
        """The uninterrupted run."""
        return Run(self.task)

    @functools.cache  # noqa: B019  # one study lives as long as the process
    def n_parameters(self) -> int:
        """Parameters of the model."""
        return sum(tensor.numel() for tensor in weights_of(self.run.state(0)).values())

    # --- what encoders are given ---------------------------------------------------------------

    def given(self, index: int) -> Given:
        """A checkpoint of the uninterrupted run with its weights and its calibration, made once."""
        snapshot = Snapshot.of(self.run, index)
        weights = self.folder / f"weights-{index:02d}.safetensors"
        if not weights.exists():
            plain_weights(weights, snapshot.state)
        calibration = self.folder / f"calibration-{index:02d}.safetensors"
        facts = self.folder / f"calibration-{index:02d}.json"
        if not calibration.exists() or not facts.exists():
            remembered(facts, lambda: {"cpu_seconds": calibrate(self.task, snapshot.state, calibration)})
        return Given(snapshot, weights, calibration)

    # --- one way -------------------------------------------------------------------------------

    def folder_of(self, way: Way) -> Path:
        """Where a way's files and figures lie."""
        kind = "chain" if way.is_chain else "snapshots"
        folder = self.folder / f"{way.scope}-{kind}" / way.name.replace(" ", "_").replace("'", "")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def indices(self, way: Way) -> tuple[int, ...]:
        """Checkpoints that a way stores: all as a chain, otherwise those that training resumes from."""
        return tuple(range(N_CHECKPOINTS)) if way.is_chain else self.points

    def _paths(self, way: Way, *, probes: bool) -> tuple[dict[int, Path], dict[int, Path]]:
        """Where figures of each checkpoint and losses of each resumption are kept."""
        folder = self.folder_of(way)
        stores = {i: folder / f"stored-{i:02d}.json" for i in self.indices(way)}
        resumed = {i: folder / f"probe-{i:02d}.json" for i in self.points} if probes else {}
        return stores, resumed

    def is_complete(self, way: Way, *, probes: bool = True) -> bool:
        """Whether the cache holds everything about a way."""
        stores, resumed = self._paths(way, probes=probes)
        return all(path.exists() for path in (*stores.values(), *resumed.values()))

    def measured(self, way: Way, *, probes: bool = True) -> Measured:
        """Everything about a way; what the cache lacks is measured now."""
        stores, resumed = self._paths(way, probes=probes)
        if not self.is_complete(way, probes=probes):
            with way.walk(self.folder_of(way)) as store:
                for index in stores:
                    self._measure(store(self.given(index)), index, stores[index], resumed.get(index))
            print(f"{way.scope}, {way.name}: done", flush=True)
        gaps = {i: resumed_gap(self._losses(i, remembered(path, dict))) for i, path in resumed.items()}
        return Measured(way, [remembered(path, dict) for path in stores.values()], gaps, self.n_parameters())

    def _losses(self, index: int, found: Mapping[str, Any]) -> dict[str, list[float]]:
        return {"restored": found["losses"], "exact": exact_probe(self.task, index)}

    def _measure(self, stored: Stored, index: int, facts: Path, resumed: Path | None) -> None:
        def at_once() -> dict[str, Any]:
            return {
                "index": index,
                "n_bytes": stored.n_bytes,
                "weight_bytes": stored.weight_bytes,
                "encode_seconds": stored.encode_seconds,
                "restore_seconds": stored.restore_seconds,
                "is_exact": is_same(stored.restored, self.run.state(index)),
                **self.at_once(index, stored.restored),
            }

        remembered(facts, at_once)
        if resumed is not None:
            remembered(resumed, lambda: {"losses": probe_on(Trainer(self.task, stored.restored))})

    def at_once(self, index: int, restored: State) -> dict[str, float]:
        """Divergence from the exact model, and both losses, on the held-out slice."""
        exact, found = self.logits(self.run.state(index)), self.logits(restored)
        targets = torch.cat([wanted.flatten() for _, wanted in self.task.slices(HELD_OUT)])
        losses = [functional.cross_entropy(one, targets).item() for one in (exact, found)]
        kl = agreement_of(exact.numpy(), found.numpy())["kl"]
        return {"kl": kl, "exact_loss": losses[0], "loss": losses[1]}

    def logits(self, state: State, part: str = HELD_OUT) -> Tensor:
        """Answers of the model of a state [positions, entries]."""
        return logits_of(self.task, weights_of(state), part)

    # --- what gaps mean ------------------------------------------------------------------------

    def noise(self) -> dict[int, list[float]]:
        """Resumed gaps of states whose weights are disturbed by a hundredth of their spread, by point."""
        found: dict[int, list[float]] = {index: [] for index in self.points}
        for index in self.points:
            for seed in range(N_NOISE_SEEDS):
                path = self.folder / f"noise-{index:02d}-{seed}.json"
                losses = remembered(path, functools.partial(self._noise, index, seed))
                found[index].append(resumed_gap(self._losses(index, losses)))
        return found

    def _noise(self, index: int, seed: int) -> dict[str, Any]:
        return {"losses": probe_on(Trainer(self.task, disturbed(self.run.state(index), seed)))}

    def training_seconds(self) -> float:
        """CPU seconds of training from one checkpoint to the next."""

        def train() -> dict[str, Any]:
            trainer = Trainer(self.task, self.run.state(self.points[0]))
            trainer.train(2)
            n_steps = min(60, self.task.interval)
            _, seconds = cpu_seconds(lambda: trainer.train(n_steps))
            return {"cpu_seconds": seconds * self.task.interval / n_steps}

        return remembered(self.folder / "training.json", train)["cpu_seconds"]

    def calibration_seconds(self) -> float:
        """CPU seconds of recording the inputs of the layers, median of all checkpoints."""
        found = [remembered(path, dict) for path in sorted(self.folder.glob("calibration-*.json"))]
        return statistics.median(one["cpu_seconds"] for one in found)


def is_same(one: State, other: State) -> bool:
    """Whether all tensors are equal to the bit."""
    return all(torch.equal(tensor, one[name]) for name, tensor in other.items())


@torch.no_grad()
def logits_of(task: Task, weights: State, part: str) -> Tensor:
    """Answers of a model with these weights on a slice [positions, entries]."""
    model = task.model()
    model.load_state_dict(dict(weights))
    model.eval()
    return torch.cat([model(inputs).flatten(0, -2) for inputs, _ in task.slices(part)])


def calibrate(task: Task, state: State, path: Path) -> float:
    """Record the inputs of the layers over a few batches of training text; returns CPU seconds."""
    model = Trainer(task, state).model
    context = getattr(model, "config", GPT).context
    source = batches(read_corpus()[0], batch=CALIBRATION_BATCH, context=context, seed=CALIBRATION_SEED)
    inputs = [next(source)[:, :-1] for _ in range(N_CALIBRATION_BATCHES)]
    calibration = Calibration(model)

    def record() -> None:
        with calibration:
            for batch in inputs:
                model(batch)
        calibration.save(path)

    return cpu_seconds(record)[1]


# --- what was measured --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """A way's figures.

    Attributes:
        way: which.
        stored: facts of each checkpoint, in order.
        gaps: relative change of the mean validation loss 10 to 40 steps after a restore, by checkpoint.
        n_parameters: of the model.
    """

    way: Way
    stored: list[dict[str, Any]]
    gaps: dict[int, float]
    n_parameters: int

    @property
    def worst(self) -> float:
        """The largest gap."""
        return max(self.gaps.values())

    @property
    def mean_gap(self) -> float:
        """Mean of all points."""
        return statistics.mean(self.gaps.values())

    @property
    def kl(self) -> float:
        """Mean divergence at once over the checkpoints."""
        return statistics.mean(one["kl"] for one in self.stored)

    @property
    def ratio(self) -> float:
        """Raw bytes of the scope over stored bytes, all files together, anchors included."""
        return self._raw(self.way.scope) * len(self.stored) / sum(one["n_bytes"] for one in self.stored)

    @property
    def anchor_ratio(self) -> float:
        """The same of the first file."""
        return self._raw(self.way.scope) / self.stored[0]["n_bytes"]

    @property
    def delta_ratio(self) -> float:
        """The same of all others."""
        deltas = self.stored[1:]
        return self._raw(self.way.scope) * len(deltas) / sum(one["n_bytes"] for one in deltas)

    @property
    def weights_ratio(self) -> float:
        """fp32 weights over the bytes of weights, all files together."""
        return self._raw(WEIGHTS) * len(self.stored) / sum(one["weight_bytes"] for one in self.stored)

    def _raw(self, scope: str) -> int:
        return BYTES_OF_PARAMETER[scope] * self.n_parameters

    def seconds(self, what: str) -> float:
        """Median CPU seconds of the files after the first."""
        return statistics.median(one[what] for one in self.stored[1:])

    @property
    def loss_change(self) -> float:
        """Mean relative change of the loss at once."""
        return statistics.mean(one["loss"] / one["exact_loss"] - 1 for one in self.stored)
