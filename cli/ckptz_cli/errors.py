"""Errors as one line and an exit code by cause; no library module loads before something failed.

0 ok    1 internal    2 usage    3 damaged    4 unsupported    5 missing file or base
6 budget not met    7 I/O    10 checkpoints differ, if asked for    130 interrupted
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import Final

import click

from ckptz.pages.words import printable

INTERNAL, USAGE, DAMAGED, MISSING, IO, INTERRUPTED = 1, 2, 3, 5, 7, 130

_REMEDIES: Final = {
    errno.ENOSPC: "free some space, or write elsewhere with -o",
    errno.EDQUOT: "free some of your quota, or write elsewhere with -o",
    errno.EFBIG: "the file size limit is reached; raise it, or write elsewhere with -o",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "write elsewhere with -o",
    errno.EISDIR: "name a file in it",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """The line that the command line prints for an error, and its exit code."""

    exit_code: int
    kind: str
    message: str


def failure_of(error: BaseException) -> Failure:
    """Give the exit code and one line of text for any error."""
    code, message = _explain(error)
    return Failure(code, type(error).__name__, printable(message))


def _explain(error: BaseException) -> tuple[int, str]:
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        where = f"; see {context.command_path} --help" if context is not None else ""
        return USAGE, " ".join(error.format_message().split()).rstrip(".") + where
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return INTERRUPTED, f"interrupted after {error}" if str(error) else "interrupted"
    if isinstance(error, OSError):
        return _explain_os_error(error)
    if isinstance(error, MemoryError):
        return INTERNAL, "out of memory; try --jobs 1"
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return USAGE, "this needs torch; install it with: pip install 'ckptz[torch]'"
    from safetensors import SafetensorError

    if isinstance(error, SafetensorError):  # CkptzError is one, and knows its code
        return getattr(error, "exit_code", DAMAGED), str(error)
    return INTERNAL, f"internal error, {type(error).__name__}: {error}; --debug shows where, please report it"


def _explain_os_error(error: OSError) -> tuple[int, str]:
    where = "" if error.filename is None else f"{error.filename}: "
    if isinstance(error.filename, bytes):
        where = f"{os.fsdecode(error.filename)}: "
    if isinstance(error, FileNotFoundError):
        return MISSING, f"{where}no such file or folder; check the path" if where else str(error)
    remedy = _REMEDIES.get(error.errno or 0)
    return IO, f"{where}{error.strerror or error}" + (f"; {remedy}" if remedy else "")
