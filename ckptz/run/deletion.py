"""Deletes checkpoints of frameworks' runs: steps, files, residuals, and bases that nothing needs any more.

Callers decide what is deleted, by `keep.py`; this module makes it safe. A folder disappears at once, and one
whose deletion was cut off goes with the next. A base goes only if all other files of its folder were read.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Final

from ckptz.errors import CkptzError, ConfigError, MissingBaseError
from ckptz.format.byte_source import FileBytes
from ckptz.format.envelope import HEAD_BYTES, is_head
from ckptz.format.suffixes import LIGHTNING_SUFFIX, SUFFIX, TEMPORARY_SUFFIX
from ckptz.run.keep import retention_of
from ckptz.run.links import BASE_PREFIX
from ckptz.run.residuals import residuals_of
from ckptz.run.step_files import ABANDONED_SECONDS, FileFacts

TORCH_MAGIC: Final = b"PK\x03\x04"  # begins files of torch
_DELETED: Final = ".ckptz-deleted"  # ends the name of a step's folder while it is deleted


def remove_step(path: Path) -> None:
    """Delete a file, a link or the folder of a step, which disappears as a whole.

    Raises:
        OSError: it cannot be deleted.
    """
    if path.is_dir() and not path.is_symlink():
        gone = path.with_name(f".{path.name}{_DELETED}")
        path.rename(gone)
        shutil.rmtree(gone)
    else:
        path.unlink(missing_ok=True)


def finish_removals(run: Path) -> None:
    """Delete the folders of steps in a run whose deletion was cut off.

    Raises:
        OSError: one cannot be deleted.
    """
    for path in run.glob(f".*{_DELETED}"):
        shutil.rmtree(path)


def remove_checkpoints(paths: Sequence[Path]) -> tuple[str, ...]:
    """Delete files with their residuals, then those bases in their folders that nothing needs any more.

    Returns:
        Notes for the user: which files cannot be read, so that bases stay.

    Raises:
        OSError: one cannot be deleted.
    """
    for path in paths:
        remove_residuals(residuals_of(path))
        path.unlink(missing_ok=True)
    folders = dict.fromkeys(path.parent for path in paths)
    return tuple(note for folder in folders for note in drop_unneeded(folder))


def remove_residuals(residuals: Iterable[Path]) -> None:
    """Delete residuals of one folder and restore its modification time: the Trainer sorts folders by it."""
    gone = list(residuals)
    if gone:
        folder = gone[0].parent
        before = folder.stat()
        for residual in gone:
            residual.unlink(missing_ok=True)
        os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))


def drop_unneeded(folder: Path) -> tuple[str, ...]:
    """Delete the bases in a folder that none of its other files is stored against.

    Returns:
        What the user should know: which files cannot be read, so that all bases stay.

    Raises:
        OSError: one cannot be deleted.
    """
    try:
        with os.scandir(folder) as entries:
            files = {folder / entry.name for entry in entries if not entry.is_dir()}
    except FileNotFoundError:
        return ()
    bases = {path for path in files if path.name.startswith(BASE_PREFIX) and path.name.endswith(SUFFIX)}
    if not bases:
        return ()
    may_go, _, notes = retention_of(
        bases, files - bases, lambda path: _bases_of(path, files), lambda _: bases
    )
    for path in may_go:
        path.unlink(missing_ok=True)
    return notes


def _bases_of(path: Path, files: Collection[Path]) -> tuple[Path, ...]:
    """The file that another is stored against; raises if this cannot be told, or it is not in `files`."""
    try:
        facts = FileFacts.read(FileBytes(path))
    except (OSError, CkptzError):
        if _is_no_checkpoint(path):
            return ()
        raise
    if facts is None or facts.base is None:
        return ()
    base = path.parent / facts.base.file
    if base not in files:
        raise MissingBaseError(f"its base {facts.base.title} is not here")
    return (base,)


def _is_no_checkpoint(path: Path) -> bool:
    """Return whether an unreadable file is certainly no checkpoint of ckptz."""
    try:
        if path.name.endswith(TEMPORARY_SUFFIX):  # somebody writes it, or was killed while doing so
            return time.time() - path.stat().st_mtime > ABANDONED_SECONDS
        with contextlib.closing(FileBytes(path)) as file:
            head = file.read(0, min(file.size, HEAD_BYTES)).tobytes()
    except ConfigError:  # a pipe or a device
        return True
    except FileNotFoundError:  # deleted meanwhile; a link may lead to where nothing is mounted
        return path.resolve().parent == path.parent.resolve()
    is_named = path.name.endswith((SUFFIX, LIGHTNING_SUFFIX))
    return head.startswith(TORCH_MAGIC) or not (is_named or is_head(head))
