"""Folders among the files that a verb is given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptz.errors import CkptzError
from ckptz.store.verify_store import checkpoint_files, leftovers, mismatched_pairs
from ckptz_cli.session import Session


def expanded(paths: Iterable[Path], session: Session) -> Iterator[Path]:
    """Give files as they are, of folders all checkpoints; a folder without any is reported as a failure."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        try:
            yield from checkpoint_files(path)
        except (CkptzError, OSError) as error:
            session.add_failure(str(path), error)


def report_folders(paths: Iterable[Path], session: Session) -> None:
    """Say what is wrong with the folders as such."""
    for folder in filter(Path.is_dir, paths):
        for file, error in mismatched_pairs(folder):
            session.add_failure(str(file), error)
        if left := leftovers(folder):
            session.note(f"{folder}: {len(left)} unfinished files; ckptz prune removes them")
