"""Writers of a run's steps: one for each front door that keeps a step in a folder or file of its own.

Each writer saves steps in any order, and resumes from any step as a new process does. None deletes files.
"""

from __future__ import annotations

import json
import os
import warnings
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ckptz import Checkpointer, KeepPolicy
from ckptz.integrations.linked import Chain, ChainOptions, job_of, read_newest
from ckptz.run.step_files import COMPLETE, INDEX_FILE, METRIC_KEY, Listing, StepFile

SIZE = 600


def weights_of(value: int) -> torch.Tensor:
    """Return weights that change a little with each value, so that deltas are small."""
    start = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    return torch.where(torch.arange(SIZE) % 97 == value % 97, start + value, start)


def metric(value: int) -> float:
    return float(value * 7 % 5)


class Writer(ABC):
    """A process that writes steps to a run.

    Args:
        run: folder of the run.
        full_every: option of `ChainOptions`.
        step: step to resume from, or None.
    """

    name = "checkpoint-{}"  # name of a step's folder or file
    last: str | None = None  # name of the file that is written last into a step's folder
    has_metrics = False  # whether files record a metric
    is_split = False  # whether the optimizer state is in separate files
    goes_forward = False  # whether it only saves steps after all existing ones
    n_calls = 10  # number of calls of the system in a save that change the folder

    def __init__(self, run: Path, full_every: int, step: int | None) -> None:
        self.run, self.options = run, ChainOptions(jobs=1, full_every=full_every)
        run.mkdir(exist_ok=True)
        self.begin(None if step is None else self.place(step))

    @classmethod
    def steps(cls, run: Path) -> set[int]:
        """Return the steps that have a folder or file in the run."""
        start, end = cls.name.split("{}")
        names = [path.name for path in run.glob(cls.name.format("*"))]
        return {int(name.removeprefix(start).removesuffix(end)) for name in names}

    def place(self, step: int) -> Path:
        return self.run / self.name.format(step)

    def is_whole(self, step: int) -> bool:
        """Return whether a step was written completely, as the framework sees it."""
        path = self.place(step)
        if self.last is None:
            return path.exists()
        return (path / self.last).exists() and (path / self.last).stat().st_size > 0

    @abstractmethod
    def begin(self, path: Path | None) -> None: ...

    @abstractmethod
    def save(self, step: int, value: int) -> None: ...

    @abstractmethod
    def read(self, step: int) -> torch.Tensor: ...


class Folders(Writer):
    """Folders as older versions and `compress` write them; no file marks a complete folder."""

    has_metrics = True

    def begin(self, path: Path | None) -> None:
        self.chain = Chain(self.options)
        self.chain.go_on_from(None if path is None else path / "model.ckptz")

    def save(self, step: int, value: int) -> None:
        self.place(step).mkdir(exist_ok=True)
        (self.place(step) / "config.json").write_text("{}")
        job = replace(job_of({"w": weights_of(value)}, step), metadata={METRIC_KEY: repr(metric(value))})
        self.chain.write(self.place(step) / "model.ckptz", job)
        self.chain.settle()

    def is_whole(self, step: int) -> bool:
        return (self.place(step) / "model.ckptz").exists()

    def read(self, step: int) -> torch.Tensor:
        weights: torch.Tensor = read_newest(self.place(step) / "model.ckptz", jobs=1)["w"]
        return weights


class FoldersOfParts(Folders):
    """Folders as accelerate writes them: model, optimizer, random states, and a file that marks the end."""

    name, last, is_split, has_metrics = "checkpoint_{}", COMPLETE, True, False
    n_calls = 14

    def save(self, step: int, value: int) -> None:
        (self.place(step) / COMPLETE).unlink(missing_ok=True)
        super().save(step, value)
        for name in ("optimizer.bin", "random_states_0.pkl", COMPLETE):
            (self.run / name).write_bytes(b"{}")
            os.replace(self.run / name, self.place(step) / name)  # a test may kill the process at this call

    def is_whole(self, step: int) -> bool:
        return Writer.is_whole(self, step)


class Checkpoints(Writer):
    """The Checkpointer, opened anew for each save; resuming from a step discards later steps."""

    name, has_metrics, goes_forward = "step-{:08}.ckptz", True, True
    n_calls = 14

    @classmethod
    def steps(cls, run: Path) -> set[int]:
        listing = Listing.of(dict.fromkeys(os.listdir(run), 1))
        return {file.step for file in listing.sizes.keys() - listing.hidden}

    def open_run(self) -> tuple[torch.nn.Module, Checkpointer]:
        model, keep = torch.nn.Linear(SIZE, 1, bias=False), KeepPolicy(last=None)
        options: dict[str, Any] = {"full_every": self.options.full_every, "background": False, "jobs": 1}
        return model, Checkpointer(self.run, model, keep=keep, **options)

    def begin(self, path: Path | None) -> None:
        file = None if path is None else StepFile.parse(path.name)
        self.step = None if file is None else file.step
        if self.step is not None:
            with self.open_run()[1] as checkpointer:
                checkpointer.discard_after(self.step)

    def save(self, step: int, value: int) -> None:
        model, checkpointer = self.open_run()
        with checkpointer:
            if self.step is not None:
                checkpointer.restore(self.step)
            with torch.no_grad():
                model.weight.copy_(weights_of(value)[None])
            checkpointer.save(step, metric=metric(value))
        self.step = step

    def read(self, step: int) -> torch.Tensor:
        model, checkpointer = self.open_run()
        with checkpointer:
            checkpointer.restore(step)
        return model.weight[0].detach()


class Dcp(Writer):
    """The writer of `torch.distributed.checkpoint`."""

    name, last = "step-{}", INDEX_FILE

    def begin(self, path: Path | None) -> None:
        self.base = path

    def save(self, step: int, value: int) -> None:
        import torch.distributed.checkpoint as dcp

        from ckptz.integrations.dcp import CkptzStorageWriter

        writer = CkptzStorageWriter(self.place(step), options=self.options, base=self.base)
        dcp.save({"w": weights_of(value), "step": step}, storage_writer=writer, no_dist=True)
        self.base = self.place(step)

    def read(self, step: int) -> torch.Tensor:
        import torch.distributed.checkpoint as dcp

        from ckptz.integrations.dcp import CkptzStorageReader

        state = {"w": torch.zeros(SIZE), "step": -1}
        dcp.load(state, storage_reader=CkptzStorageReader(self.place(step), jobs=1), no_dist=True)
        assert state["step"] == step
        return state["w"]


class Accelerate(Writer):
    """The method `save_state` of accelerate."""

    name, last, is_split = "checkpoint_{}", COMPLETE, True

    def begin(self, path: Path | None) -> None:
        import accelerate

        from ckptz.integrations.accelerate import register

        accelerator = accelerate.Accelerator(cpu=True)
        model = torch.nn.Linear(SIZE, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.accelerator = accelerator
        register(accelerator, self.options)
        if path is not None:
            accelerator.load_state(str(path))

    def save(self, step: int, value: int) -> None:
        with torch.no_grad():
            self.model.weight.copy_(weights_of(value)[None])
        self.optimizer.state[self.model.weight] = {"momentum_buffer": weights_of(value)[None]}
        self.accelerator.save_state(str(self.place(step)))

    def read(self, step: int) -> torch.Tensor:
        weights: torch.Tensor = read_newest(self.place(step) / "model.ckptz", jobs=1)["weight"]
        if (path := self.place(step) / "optimizer.bin").exists():
            assert torch.equal(torch.load(path)["state"][0]["momentum_buffer"], weights)
        return weights[0]


class Lightning(Writer):
    """Files of Lightning, which share a folder with links to their bases."""

    name, has_metrics = "epoch=0-step={}.ckpt", True

    def begin(self, path: Path | None) -> None:
        from ckptz.integrations.lightning import CkptzIO

        self.io = CkptzIO(full_every=self.options.full_every, jobs=1)
        if path is not None:
            self.io.load_checkpoint(path)

    def save(self, step: int, value: int) -> None:
        monitor = {"monitor": "loss", "current_score": metric(value), "best_model_path": ""}
        state = {
            "state_dict": {"w": weights_of(value)},
            "global_step": step,
            "callbacks": {"ModelCheckpoint": monitor},
        }
        self.io.save_checkpoint(state, self.place(step))

    def read(self, step: int) -> torch.Tensor:
        weights: torch.Tensor = read_newest(self.place(step), jobs=1)["state_dict"]["w"]
        return weights


class Trainer(Writer):
    """The Trainer's `_save_checkpoint` without training; a resumed Trainer has loaded the model."""

    last, has_metrics, is_split = "trainer_state.json", True, True
    n_calls = 24

    def begin(self, path: Path | None) -> None:
        from tests.support.trainer_support import Trainer as CkptzTrainer
        from tests.support.trainer_support import transformers

        quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "metric_for_best_model": "loss"}
        args = transformers.TrainingArguments(output_dir=str(self.run), **quiet)
        model = torch.nn.Linear(SIZE, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        self.trainer = CkptzTrainer(model, args, optimizers=(optimizer, None), ckptz=self.options)
        self.trainer.create_optimizer_and_scheduler(10)
        if path is not None:
            self.trainer._load_from_checkpoint(str(path))
            self.trainer.state.global_step = int(path.name.partition("-")[2])
            self.trainer._load_optimizer_and_scheduler(str(path))

    def save(self, step: int, value: int) -> None:
        with torch.no_grad():
            self.trainer.model.weight.copy_(weights_of(value)[None])
        moments = {"momentum_buffer": weights_of(value)[None]}
        self.trainer.optimizer.state[self.trainer.model.weight] = moments
        self.trainer.state.global_step = step
        self.trainer.state.log_history.append({"step": step, "eval_loss": metric(value)})
        self.trainer._save_checkpoint(self.trainer.model, trial=None)

    def is_whole(self, step: int) -> bool:
        try:
            return bool(json.loads((self.place(step) / "trainer_state.json").read_bytes()))
        except (FileNotFoundError, ValueError):
            return False

    def read(self, step: int) -> torch.Tensor:
        weights: torch.Tensor = read_newest(self.place(step) / "model.ckptz", jobs=1)["weight"]
        if (state := self.place(step) / "state.ckptz").exists():
            assert torch.equal(read_newest(state)["optimizer"]["weight"]["momentum_buffer"], weights)
        return weights[0]


def quietly(call: Any, *args: Any) -> Any:
    """Make a call without the warnings of frameworks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args)


WRITERS: dict[str, type[Writer]] = {
    "folders": Folders,
    "folders of parts": FoldersOfParts,
    "checkpointer": Checkpoints,
    "dcp": Dcp,
    "lightning": Lightning,
    "accelerate": Accelerate,
    "trainer": Trainer,
}
