"""Local folders in which files are finished before they are uploaded, and which nobody has to tidy up.

Each is locked by the process that uses it. What a killed process left is found by its lock, which nobody
holds, and removed by the next one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from ckptz.store.lock import LOCK_NAME, FileLock, fcntl, is_held

PREFIX: Final = "ckptz-spool-"


class Spool:
    """A folder of this process's own, `folder`."""

    def __init__(self) -> None:
        if fcntl is not None:
            _remove_abandoned(Path(tempfile.gettempdir()))
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = None if fcntl is None else FileLock(self.folder)

    def keep_only(self, names: frozenset[str]) -> None:
        """Remove every other file."""
        for path in self.folder.iterdir():
            if path.name not in names and path.name != LOCK_NAME:
                path.unlink()

    def close(self) -> None:
        """Remove the folder with all files in it."""
        if self._lock is not None:
            self._lock.release()
        shutil.rmtree(self.folder, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        # Another may be about to lock one that it just made: it has no lock file yet.
        with contextlib.suppress(OSError):
            if os.access(folder / LOCK_NAME, os.W_OK) and not is_held(folder):
                shutil.rmtree(folder, ignore_errors=True)
