"""Folders of checkpoint files: on a local file system, or behind an fsspec URL.

A file appears under its name only when it is complete. Behind URLs, header and index are read with range
requests; files whose tensors are read are downloaded.
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
from ckptz.format.byte_source import FILE_URL, ByteSource, FileBytes, needs_package, seconds_for, url_options
from ckptz.format.publish import make_folder, publish, sync_folder
from ckptz.format.uploads import upload


class LocalFolder:
    """A flat folder of files on a local or mounted file system; `name` is for messages."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path

    def sizes(self) -> dict[str, int]:
        """Return the size of each file in bytes, by name; empty if the folder does not exist."""
        n_bytes: dict[str, int] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._path) as entries:
            for entry in entries:
                try:
                    n_bytes[entry.name] = entry.stat().st_size
                except OSError as error:  # removed in the meantime, or a dangling link
                    if entry.is_symlink():
                        n_bytes[entry.name] = 0
                    elif not isinstance(error, FileNotFoundError):
                        raise
        return n_bytes

    def open(self, name: str) -> ByteSource:
        """Open a file of the folder for reading.

        Raises:
            FileNotFoundError: no such file.
        """
        return FileBytes(self._path / name)

    def open_header(self, name: str, size: int) -> ByteSource:
        """Open a file for reading its header and index; `size` is its listed size in bytes."""
        return self.open(name)

    def publish(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a new file that appears under `name` if the block ends without an error."""
        make_folder(self._path)
        return publish(self._path / name)

    def copy(self, name: str, new: str) -> None:
        """Make a hard link `new` to a file, or a copy where hard links are not supported.

        Raises:
            OSError: the disk is full or fails, or `new` exists.
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
        """Delete a file, if it exists."""
        (self._path / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def local_copies(self, names: Iterable[str]) -> Iterator[Path]:
        """Yield a local folder that contains these files; copies are removed when the block ends."""
        yield self._path


# --- behind URLs --------------------------------------------------------------------------------

READ_AHEAD: Final = 1 << 16  # bytes; header and index of most files then take two requests


class _RemoteBytes:
    """A remote file whose header and index are read with range requests."""

    def __init__(self, folder: UploadFolder, name: str, size: int) -> None:
        self._folder, self._file = folder, name
        self.name, self.size = folder.full_name(name), size
        self._begin, self._read = 0, b""

    def read(self, offset: int, n_bytes: int) -> NDArray[np.uint8]:
        end = offset + n_bytes
        if end > self.size:
            raise TruncatedError(f"{self.name}: is truncated: {self.size} bytes, expected {end}")
        if not self._begin <= offset <= end <= self._begin + len(self._read):
            self._begin = offset
            self._read = self._folder.read_range(self._file, offset, min(self.size, end + READ_AHEAD))
        begin = offset - self._begin
        part = np.frombuffer(self._read, np.uint8)[begin : begin + n_bytes]
        if len(part) < n_bytes:
            raise _incomplete(self.name, offset + len(part), end)
        return part.copy()

    def close(self) -> None:
        self._read = b""


class UploadFolder:
    """A folder behind an fsspec URL, with the methods of `LocalFolder`.

    New files are completed on the local disk before they are uploaded.
    """

    def __init__(self, url: str) -> None:
        self.name = url
        try:  # an optional package that is slow to import
            self._fs, root = lazy.module("fsspec.core").url_to_fs(url, **url_options(url))
        except ImportError as error:
            raise needs_package(url, error) from None
        self._root = str(root).rstrip("/")

    def full_name(self, name: str) -> str:
        """Return the URL of a file of the folder, for messages."""
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
        with self.local_copies([name]) as folder:
            file = FileBytes(folder / name)  # stays readable after its name is removed
        file.name = self.full_name(name)
        return file

    def open_header(self, name: str, size: int) -> ByteSource:
        remote = _RemoteBytes(self, name, size)
        with contextlib.suppress(NotImplementedError, ValueError, OSError):
            remote.read(0, min(size, READ_AHEAD))
            return remote
        file = self.open(name)
        if file.size != size:
            file.close()
            raise _incomplete(file.name, file.size, size)
        return file

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Read bytes `begin` to `end` (exclusive) of a file."""
        seconds = seconds_for(self.name, end - begin)
        limit = {} if seconds is None else {"timeout": seconds}
        return bytes(self._fs.cat_file(self._path(name), start=begin, end=end, **limit))

    def upload(self, path: Path, name: str) -> None:
        """Upload a local file under its final name."""
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
    def local_copies(self, names: Iterable[str]) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="ckptz-", ignore_cleanup_errors=True) as folder:
            for name in names:
                self._fs.get_file(self._path(name), f"{folder}/{name}")
            yield Path(folder)


Folder = LocalFolder | UploadFolder


def folder_at(folder_or_url: str | os.PathLike[str]) -> Folder:
    """Return the folder at a path or an fsspec URL such as "s3://bucket/run"; it need not exist."""
    text = os.fspath(folder_or_url)
    if text.startswith(FILE_URL):
        return LocalFolder(Path(text.removeprefix(FILE_URL)))
    return UploadFolder(text) if "://" in text else LocalFolder(Path(text))


def _incomplete(name: str, n_bytes: int, expected: int) -> OSError:
    """Make the error for an interrupted connection; the remote file itself may be complete."""
    return OSError(errno.EIO, f"{name}: only {n_bytes} of {expected} bytes came through; try again")
