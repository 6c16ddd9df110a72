"""Uploads: finished files that go behind an fsspec URL, once and whole.

An object store shows an upload when it is complete. Elsewhere fsspec's transactions write aside and rename,
where the file system implements them; where not, an upload that is cut off leaves a file that ends early.
"""

from __future__ import annotations

import errno
import itertools
from pathlib import Path
from typing import Any, Final

from ckptz.format.byte_source import MAX_PIECE, failed

ATTEMPTS: Final = 3
FINAL: Final = (FileNotFoundError, PermissionError, NotADirectoryError)  # no second attempt ends otherwise
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # nor does one on a full disk


def upload(local: Path, fs: Any, path: str, name: str) -> None:
    """Put a file of this machine behind a URL, under its final name.

    Where a response was lost, the store may have taken the file. So after an error it is asked for what it
    has: if these are the bytes of the file, all is well, and nothing is sent twice.

    Args:
        local: the finished file.
        fs: fsspec's file system.
        path: where the file goes in it.
        name: of the URL, for messages.

    Raises:
        OSError: the store refused the file or does not answer.
    """
    for attempt in itertools.count(1):
        try:
            _put(local, fs, path)
            return
        except Exception as error:  # file systems behind URLs have errors of their own
            try:
                if _is_there(local, fs, path):
                    return
            except Exception:
                attempt = ATTEMPTS  # nobody answers
            is_final = isinstance(error, FINAL) or (isinstance(error, OSError) and error.errno in FULL)
            if attempt == ATTEMPTS or is_final:
                raise failed(name, error, "written") from error


def _put(local: Path, fs: Any, path: str) -> None:
    parent = path.rpartition("/")[0]
    # Of an object store the first part is a bucket: a misspelt one is not made here.
    first = path[: path.find("/", 1)]
    if not fs.exists(parent) and fs.exists(first):
        fs.makedirs(parent, exist_ok=True)
    try:
        with fs.transaction:
            fs.put_file(str(local), path)
    except (AttributeError, NotImplementedError):  # no transactions
        fs.put_file(str(local), path)


def _is_there(local: Path, fs: Any, path: str) -> bool:
    """Return whether the bytes behind the URL are those of a file."""
    fs.invalidate_cache(path.rpartition("/")[0])
    try:
        if fs.info(path)["size"] != local.stat().st_size:
            return False
        with fs.open(path, "rb") as stored, local.open("rb") as wanted:
            while piece := wanted.read(MAX_PIECE):
                if stored.read(len(piece)) != piece:
                    return False
    except FileNotFoundError:
        return False
    return True
