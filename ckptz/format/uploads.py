"""Uploads of finished files to fsspec URLs.

An object store only shows complete uploads. Other file systems use fsspec's transactions (write to a
temporary name, then rename) if they implement them; if not, an interrupted upload leaves a truncated file.
"""

from __future__ import annotations

import errno
import itertools
from pathlib import Path
from typing import Any, Final

from ckptz.format.byte_source import MAX_PIECE, failed

ATTEMPTS: Final = 3
FINAL: Final = (FileNotFoundError, PermissionError, NotADirectoryError)  # not worth a second attempt
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # a full disk: no second attempt either


def upload(local: Path, fs: Any, path: str, name: str) -> None:
    """Upload a local file under its final name.

    After an error the stored bytes are compared with the file, because an upload may succeed although its
    response is lost; the file is only sent again if they differ.

    Args:
        local: the finished file.
        fs: the fsspec file system.
        path: target path in the file system.
        name: the URL, for messages.

    Raises:
        OSError: the store refuses the file or does not respond.
    """
    for attempt in itertools.count(1):
        try:
            _put(local, fs, path)
            return
        except Exception as error:  # file systems behind URLs have errors of their own
            try:
                if _is_uploaded(local, fs, path):
                    return
            except Exception:
                attempt = ATTEMPTS  # the store does not respond
            is_final = isinstance(error, FINAL) or (isinstance(error, OSError) and error.errno in FULL)
            if attempt == ATTEMPTS or is_final:
                raise failed(name, error, "written") from error


def _put(local: Path, fs: Any, path: str) -> None:
    parent = path.rpartition("/")[0]
    # In an object store the first part is a bucket; a misspelt one must not be created.
    first = path[: path.find("/", 1)]
    if not fs.exists(parent) and fs.exists(first):
        fs.makedirs(parent, exist_ok=True)
    try:
        with fs.transaction:
            fs.put_file(str(local), path)
    except (AttributeError, NotImplementedError):  # no transactions
        fs.put_file(str(local), path)


def _is_uploaded(local: Path, fs: Any, path: str) -> bool:
    """Return whether the URL has the same bytes as a local file."""
    fs.invalidate_cache(path.rpartition("/")[0])
    try:
        if fs.info(path)["size"] != local.stat().st_size:
            return False
        with fs.open(path, "rb") as stored, local.open("rb") as expected:
            while piece := expected.read(MAX_PIECE):
                if stored.read(len(piece)) != piece:
                    return False
    except FileNotFoundError:
        return False
    return True
