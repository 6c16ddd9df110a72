"""Folders that checkpoints are published in: on a local file system, or wherever fsspec reaches.

A file appears under its name when it is complete, never before. Remote files are written to a local
file first and uploaded whole; they are read by downloading them whole.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

from ckptz.container.byte_source import ByteSource, FileBytes
from ckptz.container.publish import make_folder, publish
from ckptz.errors import ConfigError

_FILE_URL: Final = "file://"


class Place(Protocol):
    """A flat folder of files.

    Attributes:
        name: for messages.
    """

    name: str

    def sizes(self) -> dict[str, int]:
        """Give the bytes of each file by name; empty if there is no folder."""

    def open(self, name: str) -> ByteSource:
        """Open a file.

        Raises:
            FileNotFoundError: no such file.
        """

    def publish(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a new file that appears under `name` when the block ends well, and otherwise not at all."""

    def remove(self, name: str) -> None:
        """Delete a file, if it is there."""

    def fetched(self, names: Iterable[str]) -> AbstractContextManager[Path]:
        """Hold a local folder with these files while the block lasts."""


class LocalFolder:
    """A folder of this machine, or one that is mounted."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path

    def sizes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._path) as entries:
            for entry in entries:
                try:
                    found[entry.name] = entry.stat().st_size
                except FileNotFoundError:  # removed meanwhile, or a link to what is not here now
                    if entry.is_symlink():
                        found[entry.name] = 0
        return found

    def open(self, name: str) -> ByteSource:
        return FileBytes(self._path / name)

    def publish(self, name: str) -> AbstractContextManager[BinaryIO]:
        make_folder(self._path)
        return publish(self._path / name)

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def fetched(self, names: Iterable[str]) -> Iterator[Path]:
        yield self._path


class _Downloaded(FileBytes):
    """A local copy that goes with the last who reads it."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path)
        self.name = name
        path.unlink()  # the open file keeps its bytes


class RemoteFolder:
    """A folder behind an fsspec URL.

    An object store shows an upload when it is complete. Elsewhere fsspec's transactions write aside and
    rename, where the file system implements them.
    """

    def __init__(self, url: str) -> None:
        self.name = url
        self._fs, root = _fsspec().core.url_to_fs(url)
        self._root = str(root).rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def sizes(self) -> dict[str, int]:
        self._fs.invalidate_cache(self._root)
        try:
            entries: list[dict[str, Any]] = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            return {}
        files = (entry for entry in entries if entry["type"] != "directory")
        return {entry["name"].rsplit("/", 1)[-1]: self._size(entry) for entry in files}

    def _size(self, entry: dict[str, Any]) -> int:
        return int(entry["size"] or 0)

    def open(self, name: str) -> ByteSource:
        handle, path = tempfile.mkstemp(prefix="ckptz-", suffix=".download")
        os.close(handle)
        try:
            self._fs.get_file(self._path(name), path)
            return _Downloaded(Path(path), f"{self.name.rstrip('/')}/{name}")
        finally:
            Path(path).unlink(missing_ok=True)

    @contextlib.contextmanager
    def publish(self, name: str) -> Iterator[BinaryIO]:
        with tempfile.NamedTemporaryFile(prefix="ckptz-", suffix=".upload") as spool:
            yield spool  # type: ignore[misc]  # a wrapper that reads, writes and seeks like a file
            spool.flush()
            self._fs.makedirs(self._root, exist_ok=True)
            with self._fs.transaction:
                self._fs.put_file(spool.name, self._path(name))

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    @contextlib.contextmanager
    def fetched(self, names: Iterable[str]) -> Iterator[Path]:
        folder = Path(tempfile.mkdtemp(prefix="ckptz-"))
        try:
            for name in names:
                self._fs.get_file(self._path(name), str(folder / name))
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _fsspec() -> Any:
    # Optional, and slow to load: only a URL asks for it.
    try:
        importlib.import_module("fsspec.core")
        return importlib.import_module("fsspec")
    except ModuleNotFoundError:
        raise ConfigError("a URL needs fsspec; install it with: pip install 'ckptz[remote]'") from None


def place_of(folder_or_url: str | os.PathLike[str]) -> Place:
    """Give the folder that a path or an fsspec URL such as "s3://bucket/run" names; it need not exist."""
    text = os.fspath(folder_or_url)
    if text.startswith(_FILE_URL):
        return LocalFolder(Path(text.removeprefix(_FILE_URL)))
    return RemoteFolder(text) if "://" in text else LocalFolder(Path(text))
