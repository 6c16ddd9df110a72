"""The ways in which users keep the steps of a run in a folder, each as a `Door`, for the same tests.

The state of a step depends on its number only, so that every process knows what a step must restore to.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import save as save_plain

import ckptz
from ckptz import Checkpointer, Grid, KeepPolicy
from ckptz.integrations.linked import Chain, ChainOptions, job_of, read_newest
from ckptz.run.versions import versions_in
from ckptz.sync import Follower, Publisher
from ckptz.torch import load_file, load_state, save_file

Report = Callable[[int], None]
GRID: Final = Grid(min_elements=1)
N_AT_ONCE: Final = 3  # inputs of one call of `compress`


def weight_at(step: int) -> torch.Tensor:
    """Return the weight of the run after a step [50, 40]."""
    return torch.randn(50, 40, generator=torch.Generator().manual_seed(3)) + step % 64 / 64


def nothing(step: int) -> None:
    """Ignore a report."""


@dataclass(frozen=True, kw_only=True)
class Door:
    """One way to save and restore the steps of a run.

    Attributes:
        save: resumes from the newest step as a new process does, and saves `n` more steps. It reports each
            step when it is complete, and deletes the older steps that the rules do not keep.
        steps: the steps in the folder, ascending.
        read: restores a step as exactly as possible.
        n_kept: minimum number of newest steps that are kept.
        is_lossy: whether only the newest step must be exact.
        complete: name of the file or folder of a step, with "{}" for its number, if it contains all that the
            step needs; None where steps need files of other steps.
    """

    name: str
    save: Callable[[Path, int, Report], None]
    steps: Callable[[Path], list[int]]
    read: Callable[[Path, int], torch.Tensor]
    n_kept: int = 2
    is_lossy: bool = False
    complete: str | None = None

    def check(self, folder: Path, reported: int = 0) -> None:
        """Require that the steps that the rules keep restore correctly, and that the next save succeeds."""
        self.check_steps(folder, reported)
        before = self.newest(folder)
        self.save(folder, 1, nothing)
        assert self.newest(folder) == before + 1
        self.check_steps(folder, before + 1)

    def check_steps(self, folder: Path, reported: int, n_read: int | None = None) -> None:
        """Require that all steps that the rules keep exist, and that the newest `n_read` of them restore."""
        steps = self.steps(folder)
        assert self.newest(folder) >= reported
        expected = range(max(1, reported - self.n_kept + 1), reported + 1)
        newest_kept = range(max(1, self.newest(folder) - self.n_kept + 1), self.newest(folder) + 1)
        assert set(steps) >= set(expected) & set(newest_kept)
        for step in steps[-(n_read or self.n_kept) :]:
            self.check_step(folder, step, must_be_exact=not self.is_lossy or step == steps[-1])

    def check_step(self, folder: Path, step: int, *, must_be_exact: bool = True) -> None:
        """Require that a step restores to its weight, exactly or nearly."""
        with warnings.catch_warnings():
            if not must_be_exact:  # a missing residual file causes a warning
                warnings.simplefilter("ignore", RuntimeWarning)
            weight = self.read(folder, step)
        if must_be_exact:
            assert weight.equal(weight_at(step)), (self.name, step)
        else:
            assert (weight - weight_at(step)).abs().max() < 1

    def newest(self, folder: Path) -> int:
        """Return the newest step, or 0 if there is none."""
        return max(self.steps(folder), default=0)


def numbers_in(folder: Path, pattern: str) -> list[int]:
    """List the numbers in the names that match a pattern, ascending."""
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := re.fullmatch(pattern, name)))


# --- Checkpointer -------------------------------------------------------------------------------


def checkpointer_door(**options: Any) -> Door:
    def open_run(folder: Path) -> tuple[torch.nn.Module, Checkpointer]:
        model = torch.nn.Linear(40, 50, bias=False)
        defaults = {"keep": KeepPolicy(last=2), "full_every": 3, "background": False, "jobs": 1}
        return model, Checkpointer(folder, model, **(defaults | options))

    def save(folder: Path, n_saves: int, report: Report) -> None:
        model, checkpointer = open_run(folder)
        with checkpointer:
            newest = checkpointer.restore_latest() or 0
            for step in range(newest + 1, newest + n_saves + 1):
                with torch.no_grad():
                    model.weight.copy_(weight_at(step))
                checkpointer.save(step)
                report(
                    step - options.get("background", False)
                )  # in the background, the step before is complete

    def steps(folder: Path) -> list[int]:
        return list(open_run(folder)[1].steps())

    def read(folder: Path, step: int) -> torch.Tensor:
        model, checkpointer = open_run(folder)
        with checkpointer:
            checkpointer.restore(step)
        return model.weight.detach()

    return Door(name="Checkpointer", save=save, steps=steps, read=read)


# --- adapters -----------------------------------------------------------------------------------


def lightning_door(config: Any = ckptz.LOSSLESS) -> Door:
    def steps(folder: Path) -> list[int]:
        return numbers_in(folder, r"step=(\d+)\.ckpt")

    def save(folder: Path, n_saves: int, report: Report) -> None:
        from ckptz.integrations.lightning import CkptzIO

        io = CkptzIO(config=config, full_every=3, jobs=1)
        newest = max(steps(folder), default=0)
        if newest:
            io.load_checkpoint(folder / f"step={newest}.ckpt")
        for step in range(newest + 1, newest + n_saves + 1):
            state = {"state_dict": {"weight": weight_at(step)}, "global_step": step}
            io.save_checkpoint(state, folder / f"step={step}.ckpt")
            for old in steps(folder)[:-2]:
                io.remove_checkpoint(folder / f"step={old}.ckpt")
            report(step)

    def read(folder: Path, step: int) -> torch.Tensor:
        weight: torch.Tensor = read_newest(folder / f"step={step}.ckpt", jobs=1)["state_dict"]["weight"]
        return weight

    return Door(name="Lightning", save=save, steps=steps, read=read, complete="step={}.ckpt")


def accelerate_door(config: Any = ckptz.LOSSLESS) -> Door:
    def steps(folder: Path) -> list[int]:
        folder = folder / "checkpoints"
        numbers = numbers_in(folder, r"checkpoint_(\d+)")
        return [step for step in numbers if (folder / f"checkpoint_{step}" / "random_states_0.pkl").exists()]

    def save(folder: Path, n_saves: int, report: Report) -> None:
        import accelerate
        from accelerate.utils import ProjectConfiguration

        from ckptz.integrations.accelerate import register

        # accelerate deletes old folders before it saves.
        project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
        accelerator = accelerate.Accelerator(cpu=True, project_config=project)
        model = accelerator.prepare(torch.nn.Linear(40, 50, bias=False))
        register(accelerator, ChainOptions(config=config, full_every=3, jobs=1))
        newest = max(steps(folder), default=0)
        if newest:
            accelerator.load_state(str(folder / f"checkpoints/checkpoint_{newest}"))
        for step in range(newest + 1, newest + n_saves + 1):
            project.iteration = step
            shutil.rmtree(
                folder / f"checkpoints/checkpoint_{step}", ignore_errors=True
            )  # accelerate creates it
            with torch.no_grad():
                accelerator.unwrap_model(model).weight.copy_(weight_at(step))
            accelerator.save_state()
            report(step)

    def read(folder: Path, step: int) -> torch.Tensor:
        path = folder / f"checkpoints/checkpoint_{step}/model.ckptz"
        weight: torch.Tensor = read_newest(path, jobs=1)["weight"]
        return weight

    return Door(
        name="accelerate", save=save, steps=steps, read=read, n_kept=1, complete="checkpoints/checkpoint_{}"
    )


def trainer_door(config: Any = ckptz.LOSSLESS) -> Door:
    def steps(folder: Path) -> list[int]:
        def is_complete(step: int) -> bool:
            """Return whether the Trainer has written its own state, which is its last file, completely."""
            try:
                json.loads((folder / f"checkpoint-{step}" / "trainer_state.json").read_bytes())
            except (FileNotFoundError, ValueError):
                return False
            return True

        return [step for step in numbers_in(folder, r"checkpoint-(\d+)") if is_complete(step)]

    def save(folder: Path, n_saves: int, report: Report) -> None:
        from tests.support.trainer_support import trainer, transformers

        step = max(steps(folder), default=0)

        class Follow(transformers.TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                with torch.no_grad():
                    kwargs["model"].lm_head.weight.flatten()[:2000].copy_(
                        weight_at(state.global_step).flatten()
                    )

            def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                report(state.global_step)

        options = ChainOptions(config=config, full_every=3, jobs=1)
        run = trainer(folder, options=options, max_steps=step + n_saves)
        run.add_callback(Follow())
        run.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}") if step else None)

    def read(folder: Path, step: int) -> torch.Tensor:
        folder = folder / f"checkpoint-{step}"
        assert read_newest(folder / "state.ckptz", jobs=1)["scheduler"]["last_epoch"] == step
        assert load_state(folder / "rng-00000.ckptz", jobs=1)["rng"]
        weight: torch.Tensor = read_newest(folder / "model.ckptz", jobs=1)["transformer.wte.weight"]
        return weight.flatten()[:2000].reshape(50, 40)

    return Door(name="Trainer", save=save, steps=steps, read=read, complete="checkpoint-{}")


def dcp_door(config: Any = ckptz.LOSSLESS) -> Door:
    import torch.distributed.checkpoint as dcp

    from ckptz.integrations.dcp import CkptzStorageReader, CkptzStorageWriter, latest

    def steps(folder: Path) -> list[int]:
        numbers = numbers_in(folder, r"step-(\d+)")
        return [step for step in numbers if (folder / f"step-{step}" / "ckptz-index.json").exists()]

    def save(folder: Path, n_saves: int, report: Report) -> None:
        newest_folder = latest(folder)
        newest = 0 if newest_folder is None else int(newest_folder.name.partition("-")[2])
        options = ChainOptions(config=config, full_every=3, jobs=1)
        writer = CkptzStorageWriter(options=options, keep_last=2)
        for step in range(newest + 1, newest + n_saves + 1):
            target = {"checkpoint_id": folder / f"step-{step}", "storage_writer": writer}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    dcp.save({"weight": weight_at(step)}, no_dist=True, **target)
                except dcp.api.CheckpointException as error:  # not a subclass of Exception
                    raise RuntimeError(error) from error
            report(step)

    def read(folder: Path, step: int) -> torch.Tensor:
        state = {"weight": torch.zeros(50, 40)}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*(distributed|TypedStorage)")
            dcp.load(state, storage_reader=CkptzStorageReader(folder / f"step-{step}", jobs=1), no_dist=True)
        return state["weight"]

    return Door(name="DCP", save=save, steps=steps, read=read, complete="step-{}")


def linked_door() -> Door:
    """Return a door like the adapters of frameworks, which delete older files themselves."""

    def steps(folder: Path) -> list[int]:
        return numbers_in(folder, r"(\d+)\.ckpt")

    def save(folder: Path, n_saves: int, report: Report) -> None:
        chain, newest = Chain(ChainOptions(full_every=3, jobs=1)), max(steps(folder), default=0)
        if newest:
            chain.go_on_from(folder / f"{newest}.ckpt")
        for step in range(newest + 1, newest + n_saves + 1):
            chain.write(folder / f"{step}.ckpt", job_of({"weight": weight_at(step)}, step))
            for old in steps(folder)[:-2]:
                chain.remove(folder / f"{old}.ckpt")
            report(step)

    def read(folder: Path, step: int) -> torch.Tensor:
        weight: torch.Tensor = load_state(folder / f"{step}.ckpt", jobs=1)["weight"]
        return weight

    return Door(name="linked files", save=save, steps=steps, read=read, complete="{}.ckpt")


# --- verbs ----------------------------------------------------------------------------------------


def compress_door() -> Door:
    def steps(folder: Path) -> list[int]:
        return numbers_in(folder / "out", r"step-(\d+)\.ckptz")

    def source(folder: Path, step: int) -> Path:
        path, temporary = folder / f"step-{step}.safetensors", folder / ".made"
        if not path.exists():
            temporary.write_bytes(save_plain({"weight": weight_at(step)}))
            temporary.replace(path)
        return path

    def save(folder: Path, n_saves: int, report: Report) -> None:
        step = max(steps(folder), default=0)
        (folder / "out").mkdir(exist_ok=True)
        while n_saves:
            n = min(n_saves, N_AT_ONCE)
            sources = [source(folder, at) for at in range(max(1, step), step + n + 1)]
            for file_report in ckptz.compress(sources, folder / "out", chain=True, resume=True, jobs=1):
                report(file_report.step or 0)
            step, n_saves = step + n, n_saves - n

    def read(folder: Path, step: int) -> torch.Tensor:
        return load_file(folder / f"out/step-{step}.ckptz", jobs=1)["weight"]

    return Door(name="compress --chain", save=save, steps=steps, read=read, n_kept=1 << 30)


def prune_door(*, in_folders: bool) -> Door:
    """Return a door that stores each file against the one before, and prunes after each save."""
    name, pattern = "step-{}.ckptz", r"step-(\d+)\.ckptz"
    if in_folders:
        name, pattern = "checkpoint-{}/model.ckptz", r"checkpoint-(\d+)"

    def steps(folder: Path) -> list[int]:
        return [n for n in numbers_in(folder, pattern) if (folder / name.format(n)).exists()]

    def save(folder: Path, n_saves: int, report: Report) -> None:
        chain, newest = Chain(ChainOptions(full_every=3, jobs=1)), max(steps(folder), default=0)
        if newest:
            chain.go_on_from(folder / name.format(newest))
        for step in range(newest + 1, newest + n_saves + 1):
            path = folder / name.format(step)
            if in_folders:
                chain.write(path, job_of({"weight": weight_at(step)}, step))
            else:
                before = folder / name.format(step - 1) if step % 3 != 1 else None
                save_file({"weight": weight_at(step)}, path, base=before)
            ckptz.prune(folder, KeepPolicy(last=2))
            report(step)

    def read(folder: Path, step: int) -> torch.Tensor:
        weight: torch.Tensor = load_state(folder / name.format(step), jobs=1)["weight"]
        return weight

    complete = "checkpoint-{}" if in_folders else None
    return Door(name="prune", save=save, steps=steps, read=read, complete=complete)


# --- weight sync ----------------------------------------------------------------------------------


def publisher_door() -> Door:
    def steps(folder: Path) -> list[int]:
        names = dict.fromkeys(os.listdir(folder) if folder.is_dir() else (), 1)
        return sorted({version.step for version in versions_in(names)})

    def save(folder: Path, n_saves: int, report: Report) -> None:
        publisher = Publisher(folder, full_every=3, keep_full=1, jobs=1)
        newest = max(steps(folder), default=0)
        for step in range(newest + 1, newest + n_saves + 1):
            publisher.publish({"weight": weight_at(step)}, step)
            report(step)

    def read(folder: Path, step: int) -> torch.Tensor:
        live = {"weight": torch.zeros(50, 40)}
        assert Follower(folder, jobs=1).apply_to(live, step).step == step
        return live["weight"]

    return Door(name="Publisher", save=save, steps=steps, read=read, n_kept=1)


def door(kind: str) -> Door:
    """Return a door by name; a name that ends with " grid" has lossy files."""
    name, _, is_lossy = kind.partition(" ")
    doors: dict[str, Callable[..., Door]] = {
        "checkpointer": checkpointer_door,
        "checkpointer-beside": lambda **options: checkpointer_door(background=True, **options),
        "lightning": lightning_door,
        "accelerate": accelerate_door,
        "trainer": trainer_door,
        "dcp": dcp_door,
        "linked": linked_door,
        "compress": compress_door,
        "prune-files": lambda: prune_door(in_folders=False),
        "prune-folders": lambda: prune_door(in_folders=True),
        "publisher": publisher_door,
    }
    if is_lossy:
        return replace(doors[name](config=GRID), name=kind, is_lossy=True)
    return replace(doors[name](), name=kind)


_APPS: Final = ("trainer", "trainer grid", "accelerate", "accelerate grid", "lightning", "lightning grid")
DOORS: Final = (
    *(
        "checkpointer",
        "checkpointer grid",
        "checkpointer-beside",
        "dcp",
        "dcp grid",
        "linked",
        "compress",
        "prune-files",
        "prune-folders",
    ),
    *("publisher", *_APPS),
)
each_door = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.apps if kind in _APPS else ()) for kind in DOORS]
)
