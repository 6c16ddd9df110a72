"""Folders that checkpoints are published in: on a local file system, or behind an fsspec URL.

A file appears under its name when it is complete, never before. Of files behind URLs headers are read by
range, and the others whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from ckptz import lazy
from ckptz.errors import TruncatedError
from ckptz.format.byte_source import (
    FILE_URL,
    ByteSource,
    FileBytes,
    needs_package,
    seconds_for,
    url_options,
)
from ckptz.format.publish import make_folder, publish, sync_folder
from ckptz.format.uploads import upload


class LocalFolder:
    """A flat folder of files, of this machine or one that is mounted; `name` is for messages."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file by name; empty if there is no folder."""
        n_bytes: dict[str, int] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._path) as entries:
            for entry in entries:
                try:
                    n_bytes[entry.name] = entry.stat().st_size
                except OSError as error:  # removed meanwhile, or a link to what is not here now
                    if entry.is_symlink():
                        n_bytes[entry.name] = 0
                    elif not isinstance(error, FileNotFoundError):
                        raise
        return n_bytes

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

    def copy(self, name: str, new: str) -> None:
        """Make a second name of a file, or where there are no hard links a copy.

        Raises:
            OSError: the disk is full or fails, or `new` is there already.
        """
        try:
            os.link(self._path / name, self._path / new)
        except FileExistsError:
            raise
        except OSError:
            with (self._path / name).open("rb") as source, publish(self._path / new) as sink:
                shutil.copyfileobj(source, sink)
        sync_folder(self._path)

    def remove(self, name: str) -> None:
        """Delete a file, if it is there."""
        (self._path / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def fetched(self, names: Iterable[str]) -> Iterator[Path]:
        """Hold a local folder with these files while the block lasts."""
        yield self._path


# --- behind URLs --------------------------------------------------------------------------------

READ_AHEAD: Final = 1 << 16  # header and index of most files are two requests


class _Ranges:
    """A remote file read by ranges, for its header and its index."""

    def __init__(self, folder: UploadFolder, name: str, size: int) -> None:
        self._folder, self._file = folder, name
        self.name, self.size = folder.full_name(name), size
        self._begin, self._read = 0, b""

    def read(self, offset: int, n_bytes: int) -> NDArray[np.uint8]:
        end = offset + n_bytes
        if end > self.size:
            raise TruncatedError(f"{self.name}: is cut off: it has {self.size} bytes and should have {end}")
        if not self._begin <= offset <= end <= self._begin + len(self._read):
            self._begin = offset
            self._read = self._folder.read_range(self._file, offset, min(self.size, end + READ_AHEAD))
        begin = offset - self._begin
        part = np.frombuffer(self._read, np.uint8)[begin : begin + n_bytes]
        if len(part) < n_bytes:
            raise _short(self.name, offset + len(part), end)
        return part.copy()

    def close(self) -> None:
        self._read = b""


class UploadFolder:
    """A folder behind an fsspec URL, whose files are finished before they are uploaded; as `LocalFolder`."""

    def __init__(self, url: str) -> None:
        self.name = url
        try:  # optional, and slow to load: only a URL asks for it
            self._fs, root = lazy.module("fsspec.core").url_to_fs(url, **url_options(url))
        except ImportError as error:
            raise needs_package(url, error) from None
        self._root = str(root).rstrip("/")

    def full_name(self, name: str) -> str:
        """Name a file of the folder for messages."""
        return f"{self.name.rstrip('/')}/{name}"

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
        size = entry["size"] if entry["size"] is not None else self._fs.size(entry["name"])
        if size is None:
            raise OSError(errno.EIO, f"{entry['name']}: the store does not say how long it is")
        return int(size)

    def open(self, name: str) -> ByteSource:
        with self.fetched([name]) as folder:
            opened = FileBytes(folder / name)  # keeps its bytes when the name goes
        opened.name = self.full_name(name)
        return opened

    def peek(self, name: str, size: int) -> ByteSource:
        ranges = _Ranges(self, name, size)
        with contextlib.suppress(NotImplementedError, ValueError, OSError):
            ranges.read(0, min(size, READ_AHEAD))
            return ranges
        whole = self.open(name)
        if whole.size != size:
            whole.close()
            raise _short(whole.name, whole.size, size)
        return whole

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Read bytes begin..end of a file."""
        seconds = seconds_for(self.name, end - begin)
        limit = {} if seconds is None else {"timeout": seconds}
        return bytes(self._fs.cat_file(self._path(name), start=begin, end=end, **limit))

    def upload(self, path: Path, name: str) -> None:
        """Put a local file there under its final name; nothing there is sought in."""
        upload(path, self._fs, self._path(name), self.full_name(name))

    @contextlib.contextmanager
    def publish(self, name: str) -> Iterator[BinaryIO]:
        with tempfile.NamedTemporaryFile(prefix="ckptz-", suffix=".upload") as spool:
            yield spool  # type: ignore[misc]  # a wrapper that reads, writes and seeks like a file
            spool.flush()
            self.upload(Path(spool.name), name)

    def download(self, name: str, path: Path) -> None:
        """Download a file, completely or not at all.

        Raises:
            FileNotFoundError: no such file.
        """
        with publish(path) as file:
            self._fs.get_file(self._path(name), file.name)

    def copy(self, name: str, new: str) -> None:
        self._fs.cp_file(self._path(name), self._path(new))

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    @contextlib.contextmanager
    def fetched(self, names: Iterable[str]) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="ckptz-", ignore_cleanup_errors=True) as folder:
            for name in names:
                self._fs.get_file(self._path(name), f"{folder}/{name}")
            yield Path(folder)


Folder = LocalFolder | UploadFolder


def folder_at(folder_or_url: str | os.PathLike[str]) -> Folder:
    """Return the folder of a path or an fsspec URL such as "s3://bucket/run"; it need not exist."""
    text = os.fspath(folder_or_url)
    if text.startswith(FILE_URL):
        return LocalFolder(Path(text.removeprefix(FILE_URL)))
    return UploadFolder(text) if "://" in text else LocalFolder(Path(text))


def _short(name: str, n_bytes: int, wanted: int) -> OSError:
    """Make the error of a connection that was cut; the file itself may be whole."""
    return OSError(errno.EIO, f"{name}: only {n_bytes} of {wanted} bytes came through; try again")
