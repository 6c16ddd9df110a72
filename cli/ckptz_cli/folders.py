"""Folders among the files that a verb is given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptz.container.byte_source import is_folder
from ckptz.errors import CkptzError, ConfigError
from ckptz.store.runs import run_files
from ckptz.store.steps import leftovers, mismatched_pairs
from ckptz_cli.session import Session


def expanded(paths: Iterable[Path], session: Session) -> Iterator[Path]:
    """Give files as they are, and of folders the files that `log` lists; one without any is a failure."""
    for path in paths:
        try:
            yield from _checkpoint_files(path) if is_folder(path) else (path,)
        except (CkptzError, OSError) as error:
            session.add_failure(str(path), error)


def _checkpoint_files(folder: Path) -> list[Path]:
    """List the files of a run, bases included that are kept for others, but not what a killed writer left."""
    left = {folder / name for name in leftovers(folder)}
    files = [path for path in run_files(folder) if path not in left]
    if not files:
        raise ConfigError(
            f"{folder}: holds no .ckptz files; name a folder of checkpoints, or a file with --against"
        )
    return files


def report_folders(paths: Iterable[Path], session: Session) -> None:
    """Say what is wrong with the folders as such."""
    for folder in filter(Path.is_dir, paths):
        for file, error in mismatched_pairs(folder):
            session.add_failure(str(file), error)
        if left := leftovers(folder):
            session.note(f"{folder}: {len(left)} unfinished files; ckptz prune removes them")
