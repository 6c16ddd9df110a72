"""The disk cache of compiled kernels, and the notice that kernels are being compiled.

The cache folder is next to the package, else in the home directory, else a folder for temporary files that
only the user can write. NUMBA_CACHE_DIR replaces the first two. Read-only folders, such as those of an image,
are read as well.

Cache entries are keyed by a hash of all kernel sources, not by path and time of a file as in numba, so that
a copy of the package or a rebuilt image compiles nothing again. All sources are hashed together, because a
kernel includes the functions that it calls in other files.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final

import numba
from llvmlite import binding
from numba.core import caching as _caching
from numba.core import event as _event
from numba.core.runtime import _nrt_python  # type: ignore[attr-defined]
from numba.misc import appdirs as _appdirs

from ckptz.kernels import clock

config: Final[Any] = numba.config
caching: Any = _caching  # numba has no types
events: Any = _event
appdirs: Any = _appdirs
CHECKSUM_BYTES: Final = 16
SOURCES: Final = Path(__file__).parent
NOTICE: Final = (
    "ckptz: compiling kernels (first use on this machine; about 20 CPU seconds for all of them, longer on a "
    "busy machine; ckptz warm-up compiles them ahead of time)"
)
PATIENCE: Final = 2.0  # seconds of compilation before the notice is printed


@functools.cache
def stamp() -> str:
    """Return a hash of all kernel sources and the numba version, which keys the cache."""
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(SOURCES.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _usual() -> list[Path]:
    """Return the preferred cache folders."""
    name = f"ckptz-{stamp()}"
    if config.CACHE_DIR:
        return [Path(config.CACHE_DIR, name)]
    home = appdirs.AppDirs(appname="numba", appauthor=False).user_cache_dir
    return [SOURCES / "__pycache__", Path(home, name)]


@functools.cache
def writable_folder() -> Path | None:
    """Return the folder that new kernels are written to; None if no folder is writable."""
    return next(filter(_is_writable, _usual()), None) or _temporary()


def readable_folders() -> list[Path]:
    """Return all folders to look for kernels in, also read-only ones."""
    folder = writable_folder()
    return _usual() + ([folder] if folder and folder not in _usual() else [])


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def _temporary() -> Path | None:
    """Return a folder in the temporary directory that only this user can write; None if there is none."""
    try:
        folder = Path(tempfile.gettempdir(), f"ckptz-kernels-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        folder_stat = folder.lstat()
    except (OSError, AttributeError):  # not writable, or a system without user ids
        return None
    # Kernels are executable code, so no other user may own the folder or write into it.
    is_own = (
        stat.S_ISDIR(folder_stat.st_mode)
        and folder_stat.st_uid == os.getuid()
        and not folder_stat.st_mode & 0o022
    )
    return folder if is_own else None


def note() -> str:
    """Return a clause for the notice if no preferred folder is used; else an empty string."""
    folder = writable_folder()
    if folder is None:
        return "; no cache folder is writable, so each process compiles again: set NUMBA_CACHE_DIR"
    if folder not in _usual():
        return f"; cached in {folder}, as the default cache folders are not writable"
    return ""


# --- numba's cache interface --------------------------------------------------------------------


class _Locator(caching._CacheLocator):  # type: ignore[misc]
    """Locator of numba's cache: the cache folder, and the hash of the sources."""

    def __init__(self, function: Any, path: str) -> None:
        self._py_file, self._line = path, function.__code__.co_firstlineno

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _Locator:
        return cls(py_func, py_file)

    def get_cache_path(self) -> str:
        return str(writable_folder() or readable_folders()[0])

    def get_source_stamp(self) -> str:
        return stamp()

    def get_disambiguator(self) -> str:
        return str(self._line)

    def ensure_cache_path(self) -> None:
        """Do nothing: `writable_folder` has created the folder."""


class _Names(caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes: ClassVar = [_Locator]


@functools.cache
def _name_runtime() -> None:
    """Register the symbols of numba's runtime for compiled code."""
    for name, address in _nrt_python.c_helpers.items():
        binding.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)


class _CheckedFile(caching.IndexDataCacheFile):  # type: ignore[misc]
    """Cache files of one function, index and kernels, each with a checksum at its end.

    Without it, damaged machine code could run and compute wrong values.
    """

    @contextlib.contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[BinaryIO]:
        content = io.BytesIO()
        yield content
        with super()._open_for_write(filepath) as file:
            file.write(content.getvalue() + _checksum(content.getbuffer()))

    def _load_index(self) -> Any:
        with contextlib.suppress(FileNotFoundError):  # nothing is cached yet
            _check_checksum(self._index_path)
        return super()._load_index()

    def _load_data(self, name: str) -> Any:
        _check_checksum(self._data_path(name))
        return super()._load_data(name)


def _checksum(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=CHECKSUM_BYTES).digest()


def _check_checksum(path: str) -> None:
    """Check that a file ends with the checksum of its content.

    Raises:
        ValueError: the checksum does not match, so the file is damaged.
    """
    content = memoryview(Path(path).read_bytes())
    if _checksum(content[:-CHECKSUM_BYTES]) != content[-CHECKSUM_BYTES:]:
        raise ValueError(f"{path}: its checksum does not match")


class CachedKernels(caching.FunctionCache):  # type: ignore[misc]
    """Cached kernels of one function, in all readable folders."""

    _impl_class = _Names

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        name = self._impl.filename_base
        self._files = {folder: _CheckedFile(str(folder), name, stamp()) for folder in readable_folders()}

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load the kernel of a signature; None if no folder has it.

        numba's own method first initialises its compiler, which takes longer than loading. Cached code only
        needs the symbols of numba's runtime.
        """
        _name_runtime()
        key = self._index_key(sig, target_context.codegen())
        for file in self._files.values():
            # If the file is damaged or unreadable, the kernel is compiled again.
            with contextlib.suppress(Exception):
                kernel = file.load(key)
                if kernel is not None:
                    return self._impl.rebuild(target_context, kernel)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write a kernel to the cache; errors are ignored, since a full disk must not end a command."""
        folder = writable_folder()
        if folder is not None and self._impl.check_cachable(data):
            file, reduced = self._files[folder], self._impl.reduce(data)
            key = self._index_key(sig, data.codegen)
            with contextlib.suppress(OSError):
                try:
                    file.save(key, reduced)
                except Exception:  # the index is damaged: start a new one
                    file.flush()
                    file.save(key, reduced)


# --- the notice ---------------------------------------------------------------------------------


class _Compilation(events.Listener):  # type: ignore[misc]
    """Prints `NOTICE` after `PATIENCE` seconds of compilation, and excludes compilation from the clock."""

    def __init__(self) -> None:
        self.is_silent = False  # the notice was printed or turned off
        self._depth, self._begin = 0, 0.0

    def on_start(self, event: Any) -> None:
        """Start the timer when a compilation begins; numba compiles in one thread at a time."""
        self._depth += 1
        if self._depth == 1:
            self._begin = time.perf_counter()
        is_silent = self.is_silent or sys.stderr is None  # with stderr closed, print would write to stdout
        is_own = event.data["dispatcher"].py_func.__module__.startswith("ckptz.")
        if is_own and not is_silent and clock.compiled_seconds() >= PATIENCE:
            self.is_silent = True
            if _is_first_notice():
                print(NOTICE + note(), file=sys.stderr, flush=True)

    def on_end(self, event: Any) -> None:
        """Exclude the time of a compilation that has ended or failed from the clock."""
        del event
        self._depth -= 1
        if not self._depth:
            clock.exclude(time.perf_counter() - self._begin)


def _is_first_notice() -> bool:
    """Return whether no process has printed the notice for these kernels, and mark it as printed."""
    folder = writable_folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            (folder / f"told-{stamp()}").touch(exist_ok=False)
            return True
        return not (folder / f"told-{stamp()}").exists()
    return True


_compilation: Final = _Compilation()


@functools.cache
def listen() -> None:
    """Register the listener for compilation, once."""
    events.register("numba:compile", _compilation)


def silence_notice() -> None:
    """Turn off the notice in this process."""
    _compilation.is_silent = True
