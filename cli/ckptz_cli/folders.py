"""Folders among the files that a verb is given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptz.commands.seal import SEAL_NAME
from ckptz.container.byte_source import is_folder
from ckptz.errors import CkptzError, ConfigError
from ckptz.store.steps import checkpoint_files, leftovers, mismatched_pairs
from ckptz_cli.session import Session


def expanded(paths: Iterable[Path], session: Session) -> Iterator[Path]:
    """Give files and sealed folders as they are, of folders all checkpoints; one without any is a failure."""
    for path in paths:
        has_seal = (path / SEAL_NAME).is_file()
        if has_seal or not is_folder(path):
            yield path
        try:
            yield from checkpoint_files(path) if is_folder(path) else ()
        except (CkptzError, OSError) as error:
            if not (has_seal and isinstance(error, ConfigError)):
                session.add_failure(str(path), error)


def report_folders(paths: Iterable[Path], session: Session) -> None:
    """Say what is wrong with the folders as such."""
    for folder in filter(Path.is_dir, paths):
        for file, error in mismatched_pairs(folder):
            session.add_failure(str(file), error)
        if left := leftovers(folder):
            session.note(f"{folder}: {len(left)} unfinished files; ckptz prune removes them")
