"""Checkpoints of a run on many ranks: each rank saves its shards beside training, any number restores.

    checkpointer = ShardedCheckpointer("run", model, optimizer)     # on all ranks
    step = checkpointer.restore_latest() or 0
    ...
    checkpointer.save(step)

    run/step-00000100/      one folder for each step, complete by itself; see `ckptz.integrations.dcp`

For models sharded by FSDP2 (`fully_shard`), tensor parallelism or anything else that makes DTensors, and
for plain ones. All ranks call all methods, in the same order.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Self, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from ckptz.api.safe_open import PathLike
from ckptz.container.publish import TEMPORARY_SUFFIX
from ckptz.errors import CkptzError, ConfigError, WriteError, named, whole
from ckptz.integrations.dcp import CkptzStorageReader, CkptzStorageWriter
from ckptz.integrations.dcp_index import INDEX_FILE, read_index, shard_path
from ckptz.integrations.dcp_plan import TIMEOUT, own_group
from ckptz.integrations.dcp_write import check_begins_alone
from ckptz.integrations.linked import DEFAULTS, ChainOptions
from ckptz.integrations.run_files import RunFiles
from ckptz.store.needs import needs_of
from ckptz.store.resolve import SUFFIX
from ckptz.store.runs import EXACT
from ckptz.store.step_files import Kept, checked_step
from ckptz.training.state import random_state, set_random_state

__all__ = ["ShardedCheckpointer"]

_FOLDER: Final = re.compile(r"step-(\d{8,})")


class ShardedCheckpointer:
    """Saves and restores a training run of many ranks.

    A step is there when its index is: a rank that dies during a save leaves no half of one, and the steps
    before it whole; the other ranks raise within `timeout`. Saves use a gloo group of their own, so that
    training goes on with its collectives. Random states come back if as many ranks restore as saved.

    Args:
        directory: the run's folder, which all ranks share.
        model: its parameters and buffers.
        optimizer: one or several.
        extra: by name, what else has `state_dict` and `load_state_dict`.
        options: how steps are stored, each against the one before if the layout of shards is the same; and
            how many newest ones stay exact if they are lossy.
        keep_last: so many steps stay.
        background: write beside training.
        timeout: after which a rank gives up on the others.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        directory: PathLike,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] = (),
        *,
        extra: Mapping[str, Stateful] | None = None,
        options: ChainOptions = DEFAULTS,
        keep_last: int = 3,
        background: bool = True,
        timeout: timedelta = TIMEOUT,
    ) -> None:
        keep_last = whole("keep_last", keep_last)
        if keep_last < 1:
            raise ConfigError(f"keep_last must be at least 1, got {keep_last}")
        check_begins_alone(options)
        self._model, self._extra = model, dict(extra or {})
        self._folder = Path(directory).absolute()  # training may go to another working folder
        self._optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self._options, self._keep_last, self._is_background = options, keep_last, background
        self._files = RunFiles(Kept(last=keep_last))
        self._group = own_group(timeout)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._n_ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._saving: Future[Any] | None = None

    def save(self, step: int) -> None:
        """Save the run as it is now; with `background`, training goes on when a copy is made.

        Args:
            step: after all that are in the folder.

        Raises:
            ConfigError: the step is not new, something else is in its place, or ranks disagree on the model.
            WriteError: this save, or with `background` the one before, failed on some rank; it is not there.
        """
        step = checked_step(step)
        self.wait()
        steps = self.steps()
        if steps and step <= steps[-1]:
            raise ConfigError(
                f"{self._folder}: step {step} is not after {steps[-1]}, the newest that is there"
            )
        base = self._path(steps[-1]) if steps else None
        path = self._path(step)
        if self._rank == 0 and path.exists():  # of a save that was cut off
            if not _is_ours(path):
                raise ConfigError(f"{path}: holds files of something else; name another directory")
            shutil.rmtree(path)
        exact = self._options.exact != 0
        writer = CkptzStorageWriter(
            path, options=self._options, base=base, group=self._group, exact=exact, files=self._files
        )
        if self._is_background:
            saving = async_save(
                self._state(),
                storage_writer=writer,
                process_group=self._group,
                no_dist=self._n_ranks == 1,
            )
            self._saving = cast("Future[Any]", saving)
            return
        with _told(f"{path}: was not saved"):
            save(self._state(), storage_writer=writer, process_group=self._group, no_dist=self._n_ranks == 1)
        self._prune()

    def wait(self) -> None:
        """Wait until no save is under way.

        Raises:
            WriteError: it failed, on this rank or on another; the steps before it are whole.
            ConfigError: ranks disagree on the model.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            with _told(f"{self._folder}: a step was not saved"):
                saving.result()
            self._prune()

    def _prune(self) -> None:
        """Delete old steps, and what saves that failed left; files that others need have names there too.

        What was saved is saved whether this succeeds or not, so what stays is only a warning.
        """
        if self._rank == 0:
            try:
                notes = self._delete_old()
            except OSError as error:
                notes = (f"older steps stay until the next save: {error}",)
            for note in notes:
                warnings.warn(f"{self._folder}: {note}", RuntimeWarning, stacklevel=4)

    def _delete_old(self) -> tuple[str, ...]:
        """Delete what is older than the steps to be kept, as far as these can be read; notes."""
        folders, steps = [path for _, path in self._folders()], self.steps()
        kept = [self._path(step) for step in steps[-self._keep_last :]]
        if not kept:
            return ()
        for path in kept[: max(0, len(kept) - self._options.exact)]:
            for residual in path.glob(f"*{EXACT}*{SUFFIX}"):
                residual.unlink(missing_ok=True)
        older = folders[: folders.index(kept[-1])]
        needs = needs_of(kept, _checked, lambda path: folders[: folders.index(path)])
        for path in older:
            if path not in kept and path not in needs.doubtful and _is_ours(path):
                _remove(path)
        return needs.notes

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizers)
        return {
            "model": model,
            "optimizer": optimizer,
            "extra": {name: extra.state_dict() for name, extra in self._extra.items()},
            # Ranks draw different numbers.
            f"rng-{self._rank}-of-{self._n_ranks}": random_state(),
        }

    def steps(self) -> tuple[int, ...]:
        """List the steps that training can resume from, ascending.

        Raises:
            OSError: the folder cannot be read.
        """
        return tuple(step for step, path in self._folders() if _is_there(path / INDEX_FILE))

    def _folders(self) -> list[tuple[int, Path]]:
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return []
        found = [(int(match[1]), name) for name in names if (match := _FOLDER.fullmatch(name))]
        return sorted((step, path) for step, name in found if (path := self._path(step)).name == name)

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def restore_latest(self) -> int | None:
        """Restore the newest step; None, and nothing changed, if there is none."""
        self.wait()
        steps = self.steps()
        return self.restore(steps[-1]) if steps else None

    def restore(self, step: int) -> int:
        """Bring the run back to a step; as many ranks may do so as like.

        Args:
            step: one of `steps`.

        Returns:
            The step.

        Raises:
            ConfigError: there is no such step, or it is of another model, optimizer or extras.
            FormatError: a file is damaged.
            OSError: a file cannot be read, or a rank was lost.
        """
        self.wait()
        if step not in self.steps():
            raise ConfigError(f"{self._folder}: step {step} is not there; steps() lists those that are")
        state = self._state()
        numbers = f"rng-{self._rank}-of-{self._n_ranks}"
        reader = CkptzStorageReader(self._path(step), jobs=self._options.jobs)
        index, _ = reader.read_metadata().storage_data
        if index.ranks != self._n_ranks:
            del state[numbers]
        with _told(f"{self._path(step)}: was not restored", _of_restore):
            load(
                state,
                storage_reader=reader,
                process_group=self._group,
                no_dist=self._n_ranks == 1,
            )
        set_state_dict(
            self._model,
            self._optimizers,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        for name, extra in self._extra.items():
            extra.load_state_dict(state["extra"][name])
        if numbers in state:
            set_random_state(state[numbers])
        return step

    def close(self) -> None:
        """Wait for the save that is under way."""
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_there(path: Path) -> bool:
    """Whether there is a file; `Path.is_file` takes some errors for a no."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _is_ours(folder: Path) -> bool:
    """Whether a folder is a step, or what a save that was cut off left of one."""
    if _is_there(folder / INDEX_FILE):
        return True
    return folder.is_dir() and all(name.endswith((SUFFIX, TEMPORARY_SUFFIX)) for name in os.listdir(folder))


def _remove(folder: Path) -> None:
    """Delete a step; of one that was moved away and linked, the link."""
    if folder.is_symlink():
        folder.unlink()
        return
    (folder / INDEX_FILE).unlink(missing_ok=True)  # first, so that half of it is no step
    shutil.rmtree(folder, ignore_errors=True)


def _checked(folder: Path) -> tuple[Path, ...]:
    """Require that a step can be read, as far as its index tells; it needs no other."""
    index = read_index(folder)
    for number in range(len(index.files)):
        shard_path(folder, index, number)
    return ()


def _of_save(cause: BaseException, what: str) -> Exception:
    return WriteError(errno.EIO, f"{what}: {cause}")


def _of_restore(cause: BaseException, what: str) -> Exception:
    if type(cause) in (RuntimeError, ValueError):  # of torch's planner, which compares names and shapes
        what = f"{what}: {str(cause).rstrip('.')}"
        return ConfigError(f"{what}; restore into the model, optimizer and extras that were saved")
    return OSError(getattr(cause, "errno", None) or errno.EIO, f"{what}: {cause}")


@contextlib.contextmanager
def _told(what: str, told: Callable[[BaseException, str], Exception] = _of_save) -> Iterator[None]:
    """Errors by their cause, with the rank that had it; torch's own is no `Exception`, and says traces."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, CkptzError) and not isinstance(cause, OSError):
            raise named(cause, f"{what}: rank {rank}") from error
        raise told(cause, f"{what}: rank {rank}") from error
    except RuntimeError as error:  # of gloo
        raise told(OSError(errno.EIO, str(error)), f"{what}: a rank was lost") from error
