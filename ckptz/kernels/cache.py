"""Where compiled kernels are kept, and what users are told: where that is, and that it takes long.

numba keeps them beside the package, else in the home directory, unless NUMBA_CACHE_DIR says where.
Containers often let neither be written: then a folder of the temporary files does, which none but the user
may write.

The notice that kernels are being compiled, once a process, listens to the compiler itself. Looking for
cache files would err where the cache stands elsewhere, belongs to an older version, or lacks just the
kernel that is needed.
"""

from __future__ import annotations

import functools
import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import numba
from numba.core import event

from ckptz.kernels import cache

config: Final[Any] = numba.config
NOTICE: Final = "ckptz: compiling kernels that were not needed here before (ahead: ckptz warm-up)"


@functools.cache
def is_kept() -> bool:
    """Tell whether compiled kernels can be kept for later processes; finds a place if numba finds none."""
    if _finds_place():
        return True
    folder = _temporary()
    if folder is not None:
        config.CACHE_DIR = str(folder)
    return folder is not None and _finds_place()


def _finds_place() -> bool:
    try:
        numba.njit(cache=True)(_finds_place)
    except RuntimeError:  # "no locator available"
        return False
    return True


def _temporary() -> Path | None:
    """A folder for this user's kernels among the temporary files; None where there is no safe one."""
    try:
        folder = Path(tempfile.gettempdir(), f"ckptz-kernels-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except (OSError, AttributeError):  # nothing can be written, or a system without user numbers
        return None
    # Kernels are code: nobody else may have put the folder there or write into it.
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return folder if is_own else None


def note() -> str:
    """Say where kernels are kept if it is not the usual place, as the end of a sentence; "" if it is."""
    if not is_kept():
        return "; again in each process, as nothing can be written to keep them: set NUMBA_CACHE_DIR"
    if str(_temporary()) == config.CACHE_DIR:
        return f"; kept in {config.CACHE_DIR}, as neither the package nor the home can be written"
    return ""


class _CompilationNotice(event.Listener):
    """Prints `NOTICE` when the first of our own kernels starts to compile."""

    def __init__(self) -> None:
        self.is_said = False

    def on_start(self, event: event.Event) -> None:
        """A dispatcher found nothing in its cache."""
        dispatcher = event.data["dispatcher"]
        if self.is_said or not dispatcher.py_func.__module__.startswith("ckptz."):
            return
        self.is_said = True
        print(NOTICE + cache.note(), file=sys.stderr, flush=True)

    def on_end(self, event: event.Event) -> None:
        """Nothing to say."""


# One for the process: threads that come here together register it twice, and it still speaks once.
_notice: Final = _CompilationNotice()


def listen() -> None:
    """Begin to watch for compilation."""
    event.register("numba:compile", _notice)  # type: ignore[no-untyped-call]  # numba has no types


def be_silent() -> None:
    """Stop the notice in this process, which compiles because it was asked to."""
    _notice.is_said = True
