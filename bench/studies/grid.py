"""Weights on grids against k-means maps: bits a weight, loss at once, and loss after training on.

    python -m bench.studies.grid [--quick]    results/grid.csv; about half an hour on two cores the first time

The demo's run is trained once. Each method stores one snapshot, or a chain of an anchor and three deltas of
which the last one counts, through the files that `ckptz compress` writes. Training resumes from the restored
weights with exact moments; the gap is the mean validation loss of the next steps over that of the exact
resume. "noise" resumes from weights disturbed by a hundredth of their spread: smaller gaps mean nothing. Bits
are all bytes of lossy weights' frames. "projection" is the share of the exact movement that a delta sent.
Everything is kept in bench/.cache/grid; delete a row of rows.json there to measure it again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import ckptz.torch
from bench.core.measure import CACHE, machine, save_rows, verdict
from bench.core.report import finish
from bench.core.tiny_gpt import read_corpus
from bench.demo.training import QUICK, Settings, Trainer, resume, threads
from ckptz import compress, inspect
from ckptz.methods.grid import Grid
from ckptz.methods.kmeans import KMeans
from ckptz.methods.method import Method

VERSION: Final = 1  # of what is measured: a change makes cached rows stale
N_THREADS: Final = 1
N_NOISE: Final = 2
LARGEST_GAP: Final = 0.3  # per cent, up to which kmeans and grid are compared
TARGET: Final = 1.4
SETTINGS: Final = dataclasses.replace(Settings(), resume_steps=20, validation_batches=4)

Data = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row.

    Attributes:
        name: of the method and its setting.
        config: of all files.
        is_chain: whether the checkpoint is the third delta of a chain.
        is_guided: whether second moments are read.
        is_calibrated: whether the rounding knows the inputs of the layers.
    """

    name: str
    config: Method
    is_chain: bool = False
    is_guided: bool = True
    is_calibrated: bool = False

    @property
    def key(self) -> str:
        """For the cache."""
        return f"{VERSION} {self}"


def kmeans(levels: int, is_chain: bool) -> Case:
    """The published method with some levels."""
    config = KMeans(levels=levels, prune=0.1, protect=0.005)
    return Case(name=f"kmeans {levels}", config=config, is_chain=is_chain, is_guided=False)


def grid(step: float, is_chain: bool, is_calibrated: bool = True, is_guided: bool = True) -> Case:
    """The grid with a step."""
    words = ("calibrated" if is_calibrated else "plain", "" if is_guided else "without moments")
    return Case(
        name=" ".join(filter(None, ("grid", *words, f"{step:g}"))),
        config=Grid(step=step, moments=None),
        is_chain=is_chain,
        is_guided=is_guided,
        is_calibrated=is_calibrated,
    )


CASES: Final = (
    *(kmeans(levels, is_chain=False) for levels in (16, 8, 6, 4)),
    *(grid(step, is_chain=False) for step in (1.0, 1.4)),
    *(grid(step, is_chain=True) for step in (1.0, 0.5)),
    grid(1.0, is_chain=False, is_calibrated=False),
    kmeans(8, is_chain=True),
)


# --- the run ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """A trained run on disk: per checkpoint the state, the weights alone, and a calibration."""

    settings: Settings
    data: Data
    folder: Path

    @property
    def steps(self) -> list[int]:
        """Steps of the chain; the last one is where training resumes."""
        ends = [self.settings.steps_between * (i + 1) for i in range(self.settings.n_checkpoints)]
        return ends[-4:]

    def path(self, kind: str, step: int) -> Path:
        """A file of the run."""
        return self.folder / f"{kind}-{step:04d}.safetensors"

    def train(self) -> None:
        """Train, save and calibrate what is missing."""
        if self.path("step", self.steps[-1]).exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        trainer = Trainer(self.settings.model, self.data[0])
        for _ in range(self.settings.n_checkpoints):
            trainer.train(self.settings.steps_between)
            save_file({n: t.clone() for n, t in trainer.state().items()}, self.path("step", trainer.step))

    def prepare(self) -> None:
        """Weights alone and calibrations of the chain."""
        for step in self.steps:
            state = load_file(self.path("step", step))
            weights = {name: tensor for name, tensor in state.items() if name.startswith("model.")}
            save_file(weights, self.path("weights", step))
        self.calibrate(self.steps)

    def calibrate(self, steps: Iterable[int]) -> None:
        """Record the inputs of the layers, at the steps where that is missing."""
        for step in steps:
            if not self.path("calibration", step).exists():
                trainer = Trainer(self.settings.model, self.data[0])
                trainer.load(load_file(self.path("step", step)))
                trainer.calibrate(self.path("calibration", step))


# --- one row ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured:
    """What one way to store the last checkpoint gave; losses are validation losses."""

    bits: float
    projection: float | None
    at_once: float
    resumed: float


def stored(case: Case, run: Run, folder: Path) -> list[Path]:
    """The files of the chain, or of the one snapshot."""
    files: list[Path] = []
    for step in run.steps if case.is_chain else run.steps[-1:]:
        out = folder / f"{step}.ckptz"
        compress(
            [run.path("weights", step)],
            out,
            base=files[-1] if files else None,
            config=case.config,
            read_optimizer=run.path("step", step) if case.is_guided else None,
            calibration=run.path("calibration", step) if case.is_calibrated else None,
        )
        files.append(out)
    return files


def measure(case: Case, run: Run) -> Measured:
    """Store, restore and train on."""
    with tempfile.TemporaryDirectory() as folder:
        files = stored(case, run, Path(folder))
        lossy = [t for t in inspect(files[-1]).tensors if t.lossy]
        n_weights = sum(t.tensor_bytes // 4 for t in lossy)
        restored = ckptz.torch.load_file(files[-1])
        state = load_file(run.path("step", run.steps[-1]))
        projection = None
        if case.is_chain:
            before = load_file(run.path("weights", run.steps[-2]))
            sent = difference([t.name for t in lossy], restored, ckptz.torch.load_file(files[-2]))
            true = difference([t.name for t in lossy], state, before)
            projection = float(sent @ true / (true @ true))
    at_once, resumed = resumption({**state, **restored}, run)
    return Measured(8 * sum(t.stored_bytes for t in lossy) / n_weights, projection, at_once, resumed)


def difference(names: Sequence[str], now: dict[str, Tensor], before: dict[str, Tensor]) -> Tensor:
    """Movement of some tensors, one after another."""
    return torch.cat([(now[name] - before[name]).flatten() for name in names]).double()


def resumption(state: dict[str, Tensor], run: Run) -> tuple[float, float]:
    """Validation loss at once, and its mean over the next steps."""
    found = resume(state, run.settings, run.data, N_THREADS)
    return found.at_once, found.resumed


def disturbed(run: Run, seed: int) -> Measured:
    """Weights with noise of a hundredth of each tensor's spread."""
    state = load_file(run.path("step", run.steps[-1]))
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in state.items():
        if name.startswith("model."):
            state[name] = tensor + 0.01 * tensor.std() * torch.randn(tensor.shape, generator=generator)
    return Measured(32.0, None, *resumption(state, run))


# --- the table ----------------------------------------------------------------------------------


class Rows:
    """Measured rows, kept in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, list[float | None]] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, key: str, measured: Callable[[], Measured]) -> Measured:
        """A row of the file, or what `measured` gives."""
        if key not in self._rows:
            print(key, flush=True)
            self._rows[key] = list(dataclasses.astuple(measured()))
            self._path.write_text(json.dumps(self._rows, indent=1) + "\n")
        bits, projection, at_once, resumed = self._rows[key]
        assert bits is not None
        assert at_once is not None
        assert resumed is not None
        return Measured(bits, projection, at_once, resumed)


def row_of(name: str, stored_as: str, found: Measured, exact: Measured) -> dict[str, object]:
    """A line of the table; gaps in per cent of the exact loss."""
    return {
        "method": name,
        "stored as": stored_as,
        "bits a weight": f"{found.bits:.3f}",
        "ratio to fp32": f"{32 / found.bits:.1f}",
        "at once, %": f"{100 * (found.at_once / exact.at_once - 1):+.3f}",
        "resumed, %": f"{100 * (found.resumed / exact.resumed - 1):+.3f}",
        "projection": "" if found.projection is None else f"{found.projection:.3f}",
    }


def target_row(measured: dict[str, Measured], exact: Measured) -> dict[str, object]:
    """The smallest snapshot within the largest gap, and kmeans at its gap, between two numbers of levels."""

    def gaps(method: str) -> list[tuple[float, float, str]]:
        found = ((f.resumed / exact.resumed - 1, f.bits, n) for n, f in measured.items() if method in n)
        return sorted(found)

    gap, bits, name = min(
        (row for row in gaps("grid calibrated") if row[0] <= LARGEST_GAP / 100), key=lambda row: row[1]
    )
    rivals = gaps("kmeans")
    rival = float(np.interp(np.log(gap), [np.log(row[0]) for row in rivals], [row[1] for row in rivals]))
    return {
        "snapshot": name,
        "resumed, %": f"{100 * gap:+.3f}",
        "bits a weight": f"{bits:.3f}",
        "kmeans at that gap": f"{rival:.3f}",
        "smaller by": f"{rival / bits:.2f}x",
        "target": f"{TARGET}x: {verdict(rival / bits >= TARGET)}",
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Weights on grids against k-means maps.")
    parser.add_argument("--quick", action="store_true", help="a toy model, to see that everything runs")
    is_quick = parser.parse_args().quick
    settings = dataclasses.replace(QUICK, n_checkpoints=4) if is_quick else SETTINGS
    run = Run(settings, read_corpus(), CACHE / ("grid-quick" if is_quick else "grid"))
    with threads(N_THREADS):
        run.train()
        run.prepare()
    kept = Rows(run.folder / "rows.json")
    last = run.path("step", run.steps[-1])
    exact = kept.get(f"{VERSION} exact", lambda: Measured(32.0, None, *resumption(load_file(last), run)))
    noise = [kept.get(f"{VERSION} noise {i}", lambda i=i: disturbed(run, i)) for i in range(N_NOISE)]  # type: ignore[misc]
    rows = [row_of(f"noise {i}", "snapshot", found, exact) for i, found in enumerate(noise)]
    snapshots = {}
    for case in CASES:
        found = kept.get(case.key, lambda case=case: measure(case, run))  # type: ignore[misc]
        if not case.is_chain:
            snapshots[case.name] = found
        rows.append(row_of(case.name, "third delta" if case.is_chain else "snapshot", found, exact))
    if is_quick:
        return
    save_rows("grid", rows)
    save_rows("grid_target", [target_row(snapshots, exact)])
    finish("grid", machine())


if __name__ == "__main__":
    main()
