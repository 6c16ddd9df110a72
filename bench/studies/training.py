"""Deterministic training of the tasks from checkpoint to checkpoint, and their cached runs.

    python -m bench.studies.training [--only language|image]

A checkpoint is a flat dict of tensors: `model.<name>` (parameters and buffers), `optimizer.<name>.<moment>`
and `step`, which is also the position in the data. Training depends only on the checkpoint: an exact restart
on the same number of threads is bit-identical. A second file for each checkpoint has averages of the
gradients before it. All files are cached in bench/.cache/runs/TASK. The device is the CPU, or the value of
the environment variable CKPTZ_STUDY_DEVICE, such as "cuda".
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.core.measure import CACHE
from bench.studies.tasks import HELD_OUT, MODEL_SEED, SEARCH, TASKS, Quality, Task
from ckptz.hooks import SensitivityTracker

VERSION: Final = 1  # in the file names of the runs: a new version ignores cached checkpoints
N_CHECKPOINTS: Final = 14
N_THREADS: Final = 1  # of one process: two processes with one thread are faster than one with two
DEVICE: Final = os.environ.get("CKPTZ_STUDY_DEVICE", "cpu")
N_FAILURES: Final = 10
# Indices of the checkpoints that training restarts from, evenly spaced.
FAILURES: Final = tuple((i + 1) * (N_CHECKPOINTS - 1) // (N_FAILURES + 1) for i in range(N_FAILURES))
DISTURBANCE: Final = 0.01  # standard deviation of the noise, relative to that of the weight tensor
PROBE_STEPS: Final = (10, 20, 30, 40)  # steps after a resume at which the loss is measured

State = Mapping[str, Tensor]


class Trainer:
    """A model and its optimizer at a step; `step` is also the position in the data."""

    def __init__(self, task: Task, state: State | None = None) -> None:
        torch.manual_seed(MODEL_SEED)
        self.task = task
        self.model = task.model().to(DEVICE)
        self.optimizer = task.optimizer(self.model)
        self.step = 0
        self.gradients = SensitivityTracker(self.model)
        if state is not None:
            self._load(state)

    def _load(self, state: State) -> None:
        self.model.load_state_dict(weights_of(state))
        self.step = int(state["step"])
        self._set_rate()
        for name, parameter in self.model.named_parameters():
            names = {m: f"optimizer.{name}.{m}" for m in self.task.moments}
            moments = {m: state[key] for m, key in names.items() if key in state}
            copies = {m: tensor.to(parameter.device, copy=True) for m, tensor in moments.items()}
            self.optimizer.state[parameter] = {"step": torch.tensor(float(self.step)), **copies}

    def _set_rate(self) -> None:
        """Set the learning rate of the next step in the optimizer, where the Checkpointer reads it."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.task.rate(self.step)

    def train(self, n_steps: int) -> None:
        """Train for `n_steps` from the current step."""
        for _ in range(n_steps):
            self._set_rate()
            self.optimizer.zero_grad()
            self.task.loss(self.model, self.task.batch(self.step)).backward()
            self.optimizer.step()
            self.step += 1

    def state(self) -> dict[str, Tensor]:
        """Copy the training state to host memory, by name."""
        live = self.model.state_dict().items()
        tensors = {f"model.{name}": tensor.to("cpu", copy=True) for name, tensor in live}
        for name, parameter in self.model.named_parameters():
            own = self.optimizer.state[parameter]
            for moment in self.task.moments:
                if moment in own:
                    tensors[f"optimizer.{name}.{moment}"] = own[moment].to("cpu", copy=True)
        tensors["step"] = torch.tensor(self.step)
        return tensors

    def evaluate(self, part: str) -> Quality:
        """Evaluate the model on a slice."""
        return self.task.evaluate(self.model, part)


def weights_of(state: State) -> dict[str, Tensor]:
    """Return the parameters and buffers of a state by their names in the model."""
    return {n.removeprefix("model."): t for n, t in state.items() if n.startswith("model.")}


def probe_on(trainer: Trainer) -> list[float]:
    """Train for the last of PROBE_STEPS steps, and return the held-out loss after each of PROBE_STEPS."""
    losses, n_done = [], 0
    for n_steps in PROBE_STEPS:
        trainer.train(n_steps - n_done)
        n_done = n_steps
        losses.append(trainer.evaluate(HELD_OUT).loss)
    return losses


# --- cached results -----------------------------------------------------------------------------


def folder_of(task: Task) -> Path:
    """Return the cache folder of a task, which is created if it is missing."""
    folder = CACHE / "runs" / task.name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def publish(path: Path, write: Callable[[Path], object]) -> None:
    """Write to a temporary name and rename the file, so that an interrupted study leaves no partial file."""
    partial = path.with_name(f"{path.name}.partial")
    write(partial)
    partial.replace(path)


def remembered(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the cached JSON at `path`; if it is missing, call `make` and store its result."""
    if not path.exists():
        content = make()
        publish(path, lambda p: p.write_text(json.dumps(content, indent=1)))
    return json.loads(path.read_text())


# --- the uninterrupted run ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """The cached checkpoints of a task's uninterrupted run; indices count from 0."""

    task: Task

    def path(self, index: int) -> Path:
        """Return the path of the training state of a checkpoint."""
        return folder_of(self.task) / f"state-{VERSION}-{index:02d}.safetensors"

    def gradients_path(self, index: int) -> Path:
        """Return the path of the gradient averages before a checkpoint, saved by `SensitivityTracker`."""
        return folder_of(self.task) / f"sensitivity-{VERSION}-{index:02d}.safetensors"

    def state(self, index: int) -> dict[str, Tensor]:
        """Load the training state of a checkpoint."""
        return load_file(self.path(index))

    def facts(self, index: int) -> dict[str, Any]:
        """Return the quality of a checkpoint on both slices, and the seconds of training before it."""
        return json.loads(self._facts_path(index).read_text())

    def _facts_path(self, index: int) -> Path:
        return folder_of(self.task) / f"facts-{VERSION}-{index:02d}.json"

    def _seconds_path(self, index: int) -> Path:
        return folder_of(self.task) / f"seconds-{VERSION}-{index:02d}.json"

    def train(self, n_checkpoints: int = N_CHECKPOINTS) -> None:
        """Train and evaluate the first `n_checkpoints` that are not cached; seconds exclude evaluations."""
        for index in range(n_checkpoints):
            if not self.path(index).exists():
                self._train_to(index)
        for index in range(n_checkpoints):
            remembered(self._facts_path(index), lambda i=index: self._measure(i))

    def _train_to(self, index: int) -> None:
        trainer = Trainer(self.task, self.state(index - 1) if index else None)
        begin = time.perf_counter()
        trainer.train(self.task.step_of(index) - trainer.step)
        seconds = time.perf_counter() - begin
        facts = {"training_seconds": seconds}
        publish(self._seconds_path(index), lambda p: p.write_text(json.dumps(facts)))
        trainer.gradients.save(self.gradients_path(index))
        publish(self.path(index), lambda p: save_file(trainer.state(), p))
        print(f"{self.task.name}: step {trainer.step}, {seconds:.0f} s", flush=True)

    def _measure(self, index: int) -> dict[str, Any]:
        trainer = Trainer(self.task, self.state(index))
        seconds = json.loads(self._seconds_path(index).read_text())["training_seconds"]
        facts: dict[str, Any] = {"step": trainer.step, "training_seconds": seconds}
        facts |= {part: dataclasses.asdict(trainer.evaluate(part)) for part in (SEARCH, HELD_OUT)}
        print(f"{self.task.name}: {facts}", flush=True)
        return facts


# --- reference losses without compression -------------------------------------------------------


def exact_probe(task: Task, index: int) -> list[float]:
    """Return the losses at PROBE_STEPS after a resume from an exact checkpoint of the uninterrupted run."""
    path = folder_of(task) / f"probe-{index:02d}.json"
    return remembered(path, lambda: {"losses": probe_on(Trainer(task, Run(task).state(index)))})["losses"]


def resumed_gap(probes: Mapping[str, list[float]]) -> float:
    """Return the relative change of the mean validation loss over PROBE_STEPS after a restore."""
    return statistics.mean(probes["restored"]) / statistics.mean(probes["exact"]) - 1


def disturbed(state: State, seed: int) -> dict[str, Tensor]:
    """Add normal noise of DISTURBANCE times the spread of each weight matrix, like a mild compressor."""
    generator = torch.Generator().manual_seed(seed)
    names = {f"model.{n}" for n, t in weights_of(state).items() if t.dim() > 1}
    return {
        name: t + DISTURBANCE * t.std() * torch.randn(t.shape, generator=generator) if name in names else t
        for name, t in state.items()
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=sorted(TASKS))
    only = parser.parse_args().only
    torch.set_num_threads(N_THREADS)
    for name, make in TASKS.items():
        if only in (None, name):
            Run(make()).train()


if __name__ == "__main__":
    main()
