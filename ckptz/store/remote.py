"""Where the files of a store live beside this machine: uploads of finished files, reads by range."""

from __future__ import annotations

import contextlib
import errno
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from ckptz.container.byte_source import ByteSource
from ckptz.container.publish import publish
from ckptz.errors import TruncatedError
from ckptz.store.places import Place, RemoteFolder

READ_AHEAD: Final = 1 << 16  # header and index of most files are two requests


class _Ranges:
    """A remote file read by ranges, for its header and its index."""

    def __init__(self, folder: UploadFolder, name: str, size: int) -> None:
        self._folder, self._file = folder, name
        self.name, self.size = f"{folder.name.rstrip('/')}/{name}", size
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
        """Let go of what was read."""
        self._read = b""


class UploadFolder(RemoteFolder):
    """A remote folder whose files are finished before they are uploaded."""

    def upload(self, path: Path, name: str) -> None:
        """Put a local file there under its final name; nothing there is sought in.

        Object stores show it when it is complete, and so do file systems that can rename. Elsewhere an
        upload that is cut off leaves a file that ends early.
        """
        self._fs.makedirs(self._root, exist_ok=True)
        try:
            with self._fs.transaction:
                self._fs.put_file(str(path), self._path(name))
        except (AttributeError, NotImplementedError):  # no transactions
            self._fs.put_file(str(path), self._path(name))

    @contextlib.contextmanager
    def publish(self, name: str) -> Iterator[BinaryIO]:
        with tempfile.NamedTemporaryFile(prefix="ckptz-", suffix=".upload") as spool:
            yield spool  # type: ignore[misc]  # a wrapper that reads, writes and seeks like a file
            spool.flush()
            self.upload(Path(spool.name), name)

    def download(self, name: str, path: Path) -> None:
        """Bring a file here, whole or not at all.

        Raises:
            FileNotFoundError: no such file.
        """
        with publish(path) as file:
            self._fs.get_file(self._path(name), file.name)

    def _size(self, entry: dict[str, Any]) -> int:
        size = entry["size"] if entry["size"] is not None else self._fs.size(entry["name"])
        if size is None:
            raise OSError(errno.EIO, f"{entry['name']}: the store does not say how long it is")
        return int(size)

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Read bytes begin..end of a file."""
        return bytes(self._fs.cat_file(self._path(name), start=begin, end=end))

    def peek(self, name: str, size: int) -> ByteSource:
        """Open a file whose header and index are wanted: by ranges where the store can, else downloaded."""
        ranges = _Ranges(self, name, size)
        with contextlib.suppress(NotImplementedError, ValueError, OSError):
            ranges.read(0, min(size, READ_AHEAD))
            return ranges
        whole = self.open(name)
        if whole.size != size:
            whole.close()
            raise _short(whole.name, whole.size, size)
        return whole


def peeked(place: Place, name: str, size: int) -> ByteSource:
    """Open a file of any folder whose header and index are wanted.

    Args:
        place: the folder.
        name: of the file.
        size: its bytes, as listed.
    """
    if isinstance(place, RemoteFolder):
        return (place if isinstance(place, UploadFolder) else UploadFolder(place.name)).peek(name, size)
    return place.open(name)


def _short(name: str, found: int, wanted: int) -> OSError:
    """What a connection that was cut gives; the file itself may be whole."""
    return OSError(errno.EIO, f"{name}: only {found} of {wanted} bytes came through; try again")
