"""Where compiled kernels are kept, and what users are told: where that is, and that it takes long.

They are kept beside the package, else in the home directory, else in a folder of the temporary files that
none but the user may write; NUMBA_CACHE_DIR, if set, stands for the first two. A folder that can be read but
not written, as in an image, serves what was compiled into it.

What is kept belongs to the text of the kernels, and not to the time or the place of their files as numba has
it: a copy of the package, or an image that was built anew, compiles nothing again. All files of kernels count
together, because a kernel contains those that it calls from other files.
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
    "ckptz: compiling kernels (first use on this machine, up to 20 seconds in all; "
    "ckptz warm-up compiles them ahead of time)"
)
PATIENCE: Final = 2.0  # seconds of compilation that need no notice


@functools.cache
def stamp() -> str:
    """Name the text of all kernels and the compiler: kernels of another name are others."""
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(SOURCES.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _usual() -> list[Path]:
    """Return the usual folders of compiled kernels."""
    name = f"ckptz-{stamp()}"
    if config.CACHE_DIR:
        return [Path(config.CACHE_DIR, name)]
    home = appdirs.AppDirs(appname="numba", appauthor=False).user_cache_dir
    return [SOURCES / "__pycache__", Path(home, name)]


@functools.cache
def written_to() -> Path | None:
    """Find the folder that new kernels go to; None if nothing can be written."""
    return next(filter(_is_writable, _usual()), None) or _temporary()


def read_from() -> list[Path]:
    """List the folders that may have kernels, those that others have filled among them."""
    own = written_to()
    return _usual() + ([own] if own and own not in _usual() else [])


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def _temporary() -> Path | None:
    """A folder for this user's kernels among the temporary files; None where there is no safe one."""
    try:
        folder = Path(tempfile.gettempdir(), f"ckptz-kernels-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        folder_stat = folder.lstat()
    except (OSError, AttributeError):  # nothing can be written, or a system without user numbers
        return None
    # Kernels are code: nobody else may have put the folder there or write into it.
    is_own = (
        stat.S_ISDIR(folder_stat.st_mode)
        and folder_stat.st_uid == os.getuid()
        and not folder_stat.st_mode & 0o022
    )
    return folder if is_own else None


def note() -> str:
    """Return a clause that names the kernel folder if it is not the usual one; else an empty string."""
    folder = written_to()
    if folder is None:
        return "; again in each process, as nothing can be written to keep them: set NUMBA_CACHE_DIR"
    if folder not in _usual():
        return f"; kept in {folder}, as no usual folder can be written"
    return ""


# --- what numba asks ----------------------------------------------------------------------------


class _Locator(caching._CacheLocator):  # type: ignore[misc]
    """Locator of numba's cache: the folder of a function's kernels, and their stamp."""

    def __init__(self, function: Any, path: str) -> None:
        self._py_file, self._line = path, function.__code__.co_firstlineno

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _Locator:
        return cls(py_func, py_file)

    def get_cache_path(self) -> str:
        return str(written_to() or read_from()[0])

    def get_source_stamp(self) -> str:
        return stamp()

    def get_disambiguator(self) -> str:
        return str(self._line)

    def ensure_cache_path(self) -> None:
        """`written_to` has done so."""


class _Names(caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes: ClassVar = [_Locator]


@functools.cache
def _name_runtime() -> None:
    """Register the symbols of numba's runtime for compiled code."""
    for name, address in _nrt_python.c_helpers.items():
        binding.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)


class _CheckedFile(caching.IndexDataCacheFile):  # type: ignore[misc]
    """The index and the kernels of one function, each file with a checksum at its end.

    Damaged machine code could run and compute something else.
    """

    @contextlib.contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[BinaryIO]:
        content = io.BytesIO()
        yield content
        with super()._open_for_write(filepath) as file:
            file.write(content.getvalue() + _checksum(content.getbuffer()))

    def _load_index(self) -> Any:
        with contextlib.suppress(FileNotFoundError):  # nothing is kept yet
            _check_whole(self._index_path)
        return super()._load_index()

    def _load_data(self, name: str) -> Any:
        _check_whole(self._data_path(name))
        return super()._load_data(name)


def _checksum(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=CHECKSUM_BYTES).digest()


def _check_whole(path: str) -> None:
    """Require that a file ends with the checksum of its content.

    Raises:
        ValueError: it does not, so it is damaged.
    """
    content = memoryview(Path(path).read_bytes())
    if _checksum(content[:-CHECKSUM_BYTES]) != content[-CHECKSUM_BYTES:]:
        raise ValueError(f"{path}: its checksum does not match")


class CachedKernels(caching.FunctionCache):  # type: ignore[misc]
    """Kernels of one function that are kept, in every folder."""

    _impl_class = _Names

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._files = {folder: self._file_in(folder) for folder in read_from()}

    def _file_in(self, folder: Path) -> Any:
        return _CheckedFile(str(folder), self._impl.filename_base, stamp())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load a kernel for arguments of these types; None if none of the folders has it.

        numba would set up all that it needs to compile first, which takes longer than to load. What is
        compiled needs the names of numba's runtime and nothing else.
        """
        _name_runtime()
        key = self._index_key(sig, target_context.codegen())
        for file in self._files.values():
            # A file that is damaged, or that may not be read: compile again instead.
            with contextlib.suppress(Exception):
                kernel = file.load(key)
                if kernel is not None:
                    return self._impl.rebuild(target_context, kernel)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a kernel, if it can be written: a full disk is no reason to end a command."""
        folder = written_to()
        if folder is not None and self._impl.check_cachable(data):
            file, key, reduced = (
                self._files[folder],
                self._index_key(sig, data.codegen),
                self._impl.reduce(data),
            )
            with contextlib.suppress(OSError):
                try:
                    file.save(key, reduced)
                except Exception:  # the index is damaged: begin a new one
                    file.flush()
                    file.save(key, reduced)


# --- what users are told ------------------------------------------------------------------------


class _Compilation(events.Listener):  # type: ignore[misc]
    """Prints `NOTICE` when compilation has taken `PATIENCE`, and stops the clock meanwhile."""

    def __init__(self) -> None:
        self.is_said = False
        self._depth, self._begin = 0, 0.0

    def on_start(self, event: Any) -> None:
        """A dispatcher found nothing in its cache; numba lets one thread compile at a time."""
        self._depth += 1
        if self._depth == 1:
            self._begin = time.perf_counter()
        is_told = self.is_said or sys.stderr is None  # closed: print would write to stdout, among data
        is_own = event.data["dispatcher"].py_func.__module__.startswith("ckptz.")
        if is_own and not is_told and clock.compiled_seconds() >= PATIENCE:
            self.is_said = True
            if _is_first_notice():
                print(NOTICE + note(), file=sys.stderr, flush=True)

    def on_end(self, event: Any) -> None:
        """It has compiled, or failed to."""
        del event
        self._depth -= 1
        if not self._depth:
            clock.stand_still(time.perf_counter() - self._begin)


def _is_first_notice() -> bool:
    """Return whether no process has printed the notice of these kernels; others will not after this one."""
    folder = written_to()
    if folder is not None:
        with contextlib.suppress(OSError):
            (folder / f"told-{stamp()}").touch(exist_ok=False)
            return True
        return not (folder / f"told-{stamp()}").exists()
    return True


_compilation: Final = _Compilation()


@functools.cache
def listen() -> None:
    """Begin to watch for compilation."""
    events.register("numba:compile", _compilation)


def be_silent() -> None:
    """Stop the notice in this process, which compiles because it was asked to."""
    _compilation.is_said = True
