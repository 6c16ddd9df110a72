"""The states that levers.py measures on, what their planner knows of them, and figures that are kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from measure import CACHE
from numpy.typing import NDArray
from paper_a_tasks import Task
from paper_a_training import Run, Trainer, publish, remembered
from safetensors.numpy import load_file

from ckptz.codec.units import ArraySource
from ckptz.container.contents import Contents
from ckptz.dtypes import dtype_of
from ckptz.encoding.guide import Guide
from ckptz.guidance.guides import GuideFiles, guides_of
from ckptz.hooks import Calibration
from ckptz.methods.grid import Grid

FOLDER: Final = CACHE / "levers"
N_FILES: Final = 4
MIN_ELEMENTS: Final = Grid().min_elements
N_CALIBRATION_BATCHES: Final = 16  # of training, as small as they are
CALIBRATION_STEP: Final = 1_000_000  # batches that no step of the run has

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One exact state, and what the planner may know of it.

    Attributes:
        index: of the run.
        arrays: all tensors by name.
        guides: by name.
    """

    index: int
    arrays: Arrays
    guides: Mapping[str, Guide]

    @classmethod
    def of(cls, task: Task, index: int) -> Checkpoint:
        """A checkpoint of the uninterrupted run."""
        arrays = load_file(Run(task).path(index))
        sources = {name: source_of(array) for name, array in arrays.items() if array.dtype == np.float32}
        files = GuideFiles(calibration=calibrated(task, index))
        with contextlib.ExitStack() as held:
            found = guides_of(sources, Contents(config=Grid()), files, held)
            guides = {name: _in_memory(guide) for name, guide in found.guides.items()}
        return cls(index, arrays, guides)

    @property
    def lossy(self) -> list[str]:
        """Weights that a grid stores."""
        return [
            name
            for name, array in self.arrays.items()
            if name.startswith("model.") and array.ndim > 1 and array.size >= MIN_ELEMENTS
        ]

    def moment(self, name: str, moment: str) -> Floats:
        """A moment of a weight."""
        return self.arrays[f"optimizer.{name.removeprefix('model.')}.{moment}"]


def source_of(array: NDArray[Any]) -> ArraySource:
    """A float32 array for the planner."""
    return ArraySource.from_buffer(dtype_of("F32"), array.shape, np.ascontiguousarray(array).reshape(-1))


def calibrated(task: Task, index: int) -> Path:
    """Second moments of the layers' inputs at a checkpoint, recorded where they are missing."""
    path = FOLDER / f"calibration-{N_CALIBRATION_BATCHES}-{index:02d}.safetensors"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        trainer = Trainer(task, Run(task).state(index))
        calibration = Calibration(trainer.model)
        with calibration, torch.no_grad():
            for i in range(N_CALIBRATION_BATCHES):
                trainer.model(task.batch(CALIBRATION_STEP + i)[0])
        publish(path, calibration.save)
    return path


def _in_memory(guide: Guide) -> Guide:
    """The guide with its matrix in memory, so that the file may be closed."""
    if guide.inputs is None:
        return guide
    moments = guide.inputs.read()
    return replace(guide, inputs=replace(guide.inputs, read=lambda: moments))


@cache
def points(task: Task) -> list[Checkpoint]:
    """The chain's exact states."""
    return [Checkpoint.of(task, index) for index in range(N_FILES)]


def measured(key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What is kept under a key."""
    FOLDER.mkdir(parents=True, exist_ok=True)

    def shown() -> dict[str, Any]:
        found = make()
        print(key, found, flush=True)
        return found

    return remembered(FOLDER / f"{key.replace(' ', '-').replace(',', '').replace(':', '')}.json", shown)
