"""Folders that checkpoints are published in, on a local file system; those behind URLs are in `remote.py`.

A file appears under its name when it is complete, never before.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from ckptz.format.byte_source import ByteSource, FileBytes
from ckptz.format.publish import make_folder, publish


class LocalFolder:
    """A flat folder of files, of this machine or one that is mounted; `name` is for messages."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path

    def sizes(self) -> dict[str, int]:
        """Give the bytes of each file by name; empty if there is no folder."""
        found: dict[str, int] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._path) as entries:
            for entry in entries:
                try:
                    found[entry.name] = entry.stat().st_size
                except OSError as error:  # removed meanwhile, or a link to what is not here now
                    if entry.is_symlink():
                        found[entry.name] = 0
                    elif not isinstance(error, FileNotFoundError):
                        raise
        return found

    def open(self, name: str) -> ByteSource:
        """Open a file of the folder to read.

        Raises:
            FileNotFoundError: no such file.
        """
        return FileBytes(self._path / name)

    def peek(self, name: str, size: int) -> ByteSource:
        """Open a file of `size` bytes, as listed, of which header and index are wanted."""
        return self.open(name)

    def publish(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a new file that appears under `name` when the block ends well, and otherwise not at all."""
        make_folder(self._path)
        return publish(self._path / name)

    def remove(self, name: str) -> None:
        """Delete a file, if it is there."""
        (self._path / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def fetched(self, names: Iterable[str]) -> Iterator[Path]:
        """Hold a local folder with these files while the block lasts."""
        yield self._path
