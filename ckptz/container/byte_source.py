"""Random access to the bytes of a file or a buffer."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Protocol

import numpy as np

from ckptz.errors import ConfigError, TruncatedError
from ckptz.kernels.floats import Bytes

MAX_READ = 1 << 30  # one read call moves at most about 2 GiB on Linux


class ByteSource(Protocol):
    """Bytes by offset."""

    name: str
    size: int

    def read(self, offset: int, n_bytes: int) -> Bytes:
        """Read exactly `n_bytes` bytes, in memory of the caller's own."""
        ...

    def close(self) -> None: ...


def _check_end(source: ByteSource, end: int) -> None:
    if end > source.size:
        raise TruncatedError(f"{source.name}: is cut off: it has {source.size} bytes and should have {end}")


class FileBytes:
    """A file read by position: threads share it, and replacing the file leaves it whole.

    Raises:
        ConfigError: a pipe or a device, which has no positions, and which opening could wait for.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        mode = self.path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # of a folder `open` has its own error
            raise ConfigError(f"{self.path}: is not a regular file; copy what it gives into one")
        self.name = str(self.path)
        self._file = self.path.open("rb")
        self.size = os.fstat(self._file.fileno()).st_size

    def read(self, offset: int, n_bytes: int) -> Bytes:
        _check_end(self, offset + n_bytes)
        out = np.empty(n_bytes, np.uint8)
        view, done = out.data, 0
        while done < n_bytes:
            try:
                n = os.preadv(self._file.fileno(), [view[done : done + MAX_READ]], offset + done)
            except OSError as error:
                raise OSError(error.errno, error.strerror, self.name) from None  # it names no file itself
            if not n:
                raise TruncatedError(f"{self.name}: was cut at byte {offset + done} while it was read")
            done += n
        return out

    def close(self) -> None:
        """Release the file."""
        self._file.close()


class MemoryBytes:
    """A buffer in memory."""

    name = "<bytes>"

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self.size = len(self._data)

    def read(self, offset: int, n_bytes: int) -> Bytes:
        _check_end(self, offset + n_bytes)
        return self._data[offset : offset + n_bytes].copy()

    def close(self) -> None: ...
