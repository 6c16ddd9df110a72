"""The folder of a run of `CkptzStorageWriter`: finds existing steps and deletes old ones.

    run/step-100/      self-contained; a step exists when its index does
    run/step-150/

Folders with other names, and folders without an index that have other files, are never changed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from ckptz.api.read import PathLike
from ckptz.errors import ConfigError
from ckptz.foreign.dcp_index import INDEX_FILE, read_index, shard_path
from ckptz.format.suffixes import SUFFIX, TEMPORARY_SUFFIX
from ckptz.run.deletion import finish_removals, remove_residuals, remove_step
from ckptz.run.keep import KeepPolicy, retention_of
from ckptz.run.names import is_base_name, step_of_folder
from ckptz.run.residuals import residuals_in

SHARD_PREFIX: Final = "shard-"  # begins the names of the files of ranks


def latest(run: PathLike) -> Path | None:
    """Return the newest step of a run that training can resume from.

    Args:
        run: a folder with one subfolder for each step, as `CkptzStorageWriter(keep_last=...)` writes it.

    Returns:
        The folder of the step; None if there is no step or no folder.

    Raises:
        OSError: the folder cannot be read.
    """
    return next((path for _, path in reversed(_folders(Path(run))) if _is_there(path / INDEX_FILE)), None)


def begin_step(folder: Path) -> Path | None:
    """Delete the files of an interrupted save from the folder of a new step.

    Returns:
        The folder of the newest step before; None for the first step.

    Raises:
        ConfigError: the folder is not named after a step, the step is not new, or the folder has other files.
    """
    step, newest = step_of_folder(folder), latest(folder.parent)
    if step is None:
        raise ConfigError(f"{folder}: keep_last needs folders that are called after steps, as run/step-100")
    if newest is not None and step <= (before := step_of_folder(newest) or 0):
        raise ConfigError(f"{folder}: step {step} is not after {before}, the newest that is there")
    if not _is_ours(folder):
        raise ConfigError(f"{folder}: holds files of something else; save to another folder")
    for path in folder.iterdir():
        path.unlink(missing_ok=True)
    return newest


def delete_old(run: Path, keep_last: int, exact: int) -> tuple[str, ...]:
    """Delete all but the newest steps, if these are readable, and the folders of failed saves.

    Args:
        run: the folder of all steps.
        keep_last: number of newest steps to keep.
        exact: number of kept steps that keep their residuals.

    Returns:
        Notes for the user on steps that could not be deleted.
    """
    try:
        finish_removals(run)
        step_folders = _folders(run)
        folders = [path for _, path in step_folders]
        whole = [(step, path) for step, path in step_folders if _is_there(path / INDEX_FILE)]
        rules = KeepPolicy(last=keep_last, exact=exact)
        steps = rules.kept({step for step, _ in whole}, {})
        kept = [(step, path) for step, path in whole if step in steps]
        for path in (path for step, path in kept if step not in rules.heads(steps)):
            remove_residuals(residuals_in(path))
        older = folders[: folders.index(kept[-1][1])] if kept else []
        may_go, _, notes = retention_of(
            older, [path for _, path in kept], _checked, lambda path: folders[: folders.index(path)]
        )
        for path in filter(_is_ours, sorted(may_go)):
            remove_step(path)
    except OSError as error:
        return (f"older steps stay until the next save: {error}",)
    return notes


def _folders(run: Path) -> list[tuple[int, Path]]:
    """Return the subfolders that are named after steps, with the steps, ascending."""
    try:
        names = os.listdir(run)
    except FileNotFoundError:
        return []
    return sorted((step, run / name) for name in names if (step := step_of_folder(run / name)) is not None)


def _is_there(path: Path) -> bool:
    """Return whether a file exists; unlike `Path.is_file`, raise other errors."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _is_ours(folder: Path) -> bool:
    """Return whether a folder is a step or the remains of an interrupted save."""
    if _is_there(folder / INDEX_FILE):
        return True
    # Other files may be compressed by users.
    return folder.is_dir() and all(
        (name.startswith(SHARD_PREFIX) and name.endswith(SUFFIX))
        or is_base_name(Path(name))
        or name.endswith(TEMPORARY_SUFFIX)
        for name in os.listdir(folder)
    )


def _checked(folder: Path) -> tuple[Path, ...]:
    """Check the index of a step and that its files exist; return its bases, of which it has none."""
    index = read_index(folder)
    for number in range(len(index.files)):
        shard_path(folder, index, number)
    return ()
