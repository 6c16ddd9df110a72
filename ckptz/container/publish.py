"""Atomic publication: a file appears whole under its name, or not at all.

The only caller of `os.replace` in the package.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

TEMPORARY_SUFFIX: Final = ".ckptz-tmp"


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` last a power cut, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def publish(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file that replaces `path` when the block ends well; on any error the old one stays.

    The temporary file stands beside `path`, so that the rename stays within one file system.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)
