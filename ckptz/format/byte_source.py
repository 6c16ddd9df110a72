"""Random access to the bytes of a file or a buffer."""

from __future__ import annotations

import errno
import functools
import os
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Final, ParamSpec, Protocol, TypeVar, runtime_checkable

import numpy as np

from ckptz import lazy
from ckptz.errors import ConfigError, TruncatedError
from ckptz.format.suffixes import FILE_SUFFIXES
from ckptz.kernels.floats import Bytes

FILE_URL: Final = "file://"
PATIENCE: Final = 20.0  # seconds without data after which a request fails
LEAST_RATE: Final = 1 << 16  # bytes per second; a slower server fails
MAX_UNKNOWN: Final = 4 << 30  # largest file of a server that does not send its length, in bytes
MAX_PIECE: Final = 1 << 22
# What a URL of a protocol needs besides ckptz[remote].
PACKAGES: Final = {
    "s3": "s3fs",
    "hf": "huggingface_hub",
    "gs": "gcsfs",
    "http": "aiohttp",
    "https": "aiohttp",
}
P = ParamSpec("P")
T = TypeVar("T")
MAX_READ = 1 << 30  # one read call moves at most about 2 GiB on Linux


@runtime_checkable
class ByteSource(Protocol):
    """Bytes by offset."""

    name: str
    size: int

    def read(self, offset: int, n_bytes: int) -> Bytes:
        """Read exactly `n_bytes` bytes into new memory."""
        ...

    def close(self) -> None: ...


def _check_end(source: ByteSource, end: int) -> None:
    if end > source.size:
        raise TruncatedError(f"{source.name}: is cut off: it has {source.size} bytes and should have {end}")


def path_of(name: str | os.PathLike[str]) -> Path:
    """Return the path of a name; for an fsspec URL such as "s3://bucket/run" a path-like object.

    Raises:
        ConfigError: the package for the URL is not installed, or the protocol is unknown.
        OSError: the connection fails.
    """
    text = str(name) if is_url(name) else os.fspath(name)
    if text.startswith(FILE_URL):
        return Path(text.removeprefix(FILE_URL))
    if isinstance(name, Path) or not is_url(text):
        return Path(text)
    try:  # an optional package that is slow to import
        path: Path = lazy.module("upath").UPath(name, **url_options(text))
        _check_connection(path)
        return path
    except ImportError as error:
        raise needs_package(text, error) from None
    except ValueError as error:
        raise ConfigError(f"{text}: {error}; check the part before ://") from None
    except Exception as error:  # a connection error, whose class depends on the library
        raise failed(text, error) from error


def _check_connection(path: Any) -> None:
    """Request the info of a file, to import the protocol's package and to detect a dead server."""
    try:
        path.fs.info(path.path)
    except FileNotFoundError as error:  # http raises this for every failure
        if isinstance(cause := error.__cause__, OSError) and not isinstance(cause, FileNotFoundError):
            raise cause from None
    except NotImplementedError:
        pass


def needs_package(url: str, error: ImportError) -> ConfigError:
    """Return the error for a URL whose protocol needs a missing package."""
    name = getattr(error.__cause__, "name", None) or error.name
    missing = name
    if name in (None, "upath", "fsspec"):
        missing = f"'ckptz[remote]' {PACKAGES.get(url.partition('://')[0], '')}".rstrip()
    return ConfigError(
        f"{url}: needs a package that is not installed; install it with: pip install {missing}"
    )


def url_options(url: str) -> dict[str, Any]:
    """Return fsspec's options for a URL: a request fails if no data arrive for `PATIENCE` seconds.

    Raises:
        ImportError: the package for the protocol is not installed.
    """
    if not _is_http(url):
        return {}
    patience = lazy.module("aiohttp").ClientTimeout(sock_connect=PATIENCE, sock_read=PATIENCE)
    return {"client_kwargs": {"timeout": patience}}


def _is_http(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def seconds_for(url: str, n_bytes: int) -> float | None:
    """Return the timeout of an http request for `n_bytes`, in seconds; None for other protocols.

    A timeout for silence alone would never end for a server that sends a byte now and then.
    """
    return PATIENCE + n_bytes / LEAST_RATE if _is_http(url) else None


class Pace:
    """Checks the data rate of a response that is read in parts."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._since, self._n_bytes = time.monotonic(), 0

    def add(self, n_bytes: int) -> None:
        """Count received bytes.

        Raises:
            OSError: the rate was below `LEAST_RATE` for `PATIENCE` seconds.
        """
        now = time.monotonic()
        self._n_bytes += n_bytes
        seconds = now - self._since
        if seconds > PATIENCE:
            if self._n_bytes < LEAST_RATE * seconds:
                raise failed(self._name, TimeoutError())
            self._since, self._n_bytes = now, 0


def failed(name: str, error: Exception, done: str = "read") -> OSError:
    """Return an OSError that names the file for an error of a URL library; `done` is "read" or "written"."""
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, error.strerror or str(error), name)
    what = str(error) or f"{type(error).__name__} of the connection"
    if isinstance(error, TimeoutError):
        what = "the server is too slow; try again, or download it first"
    elif type(error).__name__ == "NoCredentialsError":  # of botocore, which may be missing
        what += "; set AWS_PROFILE, or pass --storage-options key=... and secret=..."
    else:
        what += "; check the URL and the network"
    return OSError(errno.EIO, f"cannot be {done}: {what}", name)


def naming_urls(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that read errors contain the URL in its first argument."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            package = type(error).__module__.split(".")[0]
            if package in ("builtins", "ckptz", "safetensors", "click") or not is_url(next(iter(args), None)):
                raise
            raise failed(str(args[0]), error) from error

    return run


def is_url(path: object) -> bool:
    """Return whether this is a URL, or a path that `path_of` returned for one."""
    return hasattr(path, "fs") or (isinstance(path, str) and "://" in path)


def is_folder(path: Path) -> bool:
    """Return whether this is a folder; a URL with the suffix of a file is not requested."""
    return not (is_url(path) and path.suffix in FILE_SUFFIXES) and path.is_dir()


def local_copy(path: Path) -> BinaryIO:
    """Copy a file to a temporary local file, which is deleted when closed."""
    copy = tempfile.NamedTemporaryFile(prefix="ckptz-", suffix=path.suffix)  # noqa: SIM115
    try:
        n_bytes = 0
        with path.open("rb") as file:
            pace = Pace(str(path))
            while data := _read(file, path, MAX_PIECE):
                n_bytes += copy.write(data)
                pace.add(len(data))
                if n_bytes > MAX_UNKNOWN:
                    raise OSError(
                        errno.EFBIG,
                        "the server sends no length and too many bytes; download it first",
                        str(path),
                    )
        copy.flush()
    except BaseException:
        copy.close()
        raise
    return copy  # type: ignore[return-value]  # a wrapper that reads, writes and seeks like a file


def _read(file: BinaryIO, path: Path, n_bytes: int) -> bytes:
    """Read from a URL with a timeout."""
    ahead = getattr(file, "blocksize", None)  # bytes that fsspec requests in addition
    seconds = None if ahead is None else seconds_for(str(path), n_bytes + ahead)
    if seconds is not None:
        patience = lazy.module("aiohttp").ClientTimeout(total=seconds, sock_read=PATIENCE)
        file.kwargs["timeout"] = patience  # type: ignore[attr-defined]  # used by fsspec's requests
    return file.read(n_bytes)


class UrlBytes:
    """A file behind a URL, read by ranges or copied if the server has none; usable from several threads."""

    def __init__(self, path: Path) -> None:
        self.name, self._path = str(path), path
        self._lock = threading.Lock()
        try:
            self._file = self._open(path)
            self.size = self._file.seek(0, os.SEEK_END)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.name) from None
        except Exception as error:  # file systems behind URLs have errors of their own
            raise failed(self.name, error) from error

    @staticmethod
    def _open(path: Path) -> BinaryIO:
        file: BinaryIO = path.open("rb")
        if file.seekable() and getattr(file, "size", 0) is not None:  # None for a stream without a length
            return file
        file.close()
        return local_copy(path)

    def read(self, offset: int, n_bytes: int) -> Bytes:
        _check_end(self, offset + n_bytes)
        try:
            with self._lock:
                self._file.seek(offset)
                data = _read(self._file, self._path, n_bytes)
        except Exception as error:
            raise failed(self.name, error) from error
        if len(data) < n_bytes:
            what = f"{self.name}: only {len(data)} of {n_bytes} bytes came through; try again"
            raise OSError(errno.EIO, what)
        return np.frombuffer(bytearray(data), np.uint8)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def open_bytes(path: str | os.PathLike[str]) -> ByteSource:
    """Open a local file or a URL."""
    location = path_of(path)
    return UrlBytes(location) if is_url(location) else FileBytes(location)


# Close files that an interrupt between two calls left open. Such a file may be in a reference cycle, and when
# the collector ends it, Python's warning of an unclosed file runs signal handlers and swallows their Ctrl-C.
# A file's method in C cannot be interrupted.
_ends: Final = set[weakref.ref[Any]]()


class FileBytes:
    """An open local file, read by position from any thread; it stays readable if its name is replaced.

    Raises:
        ConfigError: a pipe or a device, which cannot be read by position.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        mode = self.path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a folder raises
            raise ConfigError(f"{self.path}: is not a regular file; copy its content into one")
        self.name = str(self.path)
        self._file = self.path.open("rb")
        end: Any = self._file.__exit__  # closes, whatever its arguments
        self._end = weakref.ref(self, end)
        _ends.add(self._end)
        self.size = os.fstat(self._file.fileno()).st_size
        self._lock = threading.Lock()

    def read(self, offset: int, n_bytes: int) -> Bytes:
        _check_end(self, offset + n_bytes)
        out = np.empty(n_bytes, np.uint8)
        view, done = out.data, 0
        while done < n_bytes:
            try:
                n = self._read_into(view[done : done + MAX_READ], offset + done)
            except OSError as error:
                raise OSError(
                    error.errno, error.strerror, self.name
                ) from None  # the original error names no file
            if not n:
                raise TruncatedError(f"{self.name}: was cut at byte {offset + done} while it was read")
            done += n
        return out

    def _read_into(self, view: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [view], offset)
        with self._lock:  # Windows
            self._file.seek(offset)
            return self._file.readinto(view)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        _ends.discard(self._end)


class _FlaggedWritable:
    """A view of read-only bytes that is flagged as writable, so that kernels need no second compilation."""

    def __init__(self, data: Bytes) -> None:
        self._data = data  # keeps the memory alive
        address, _ = data.__array_interface__["data"]
        self.__array_interface__ = data.__array_interface__ | {"data": (address, False)}


class MemoryBytes:
    """A buffer in memory, read without copying."""

    name = "<bytes>"

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = np.asarray(_FlaggedWritable(np.frombuffer(data, np.uint8)))
        self.size = len(self._data)

    def read(self, offset: int, n_bytes: int) -> Bytes:
        _check_end(self, offset + n_bytes)
        return self._data[offset : offset + n_bytes]

    def close(self) -> None: ...
