"""Writes a file as a delta, or as a full file if the base cannot be read. All writers of runs use this.

The data to save exist only in memory, so an unreadable base must not prevent a save.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final, TypeVar

from ckptz.errors import CkptzError

B = TypeVar("B")
T = TypeVar("T")
UNREAD: Final = "stored as a full file, because the base cannot be read"


def found_base(
    find: Callable[[contextlib.ExitStack], B | None],
    stack: contextlib.ExitStack,
    notes: list[str],
    why: str = UNREAD,
) -> B | None:
    """Open a base, which `stack` closes; if that fails, return None and add a note that begins with `why`."""
    try:
        return find(stack)
    except Exception as error:  # stores behind URLs have errors of their own
        notes.append(f"{why}: {error}")
        return None


def write_against(
    find: Callable[[contextlib.ExitStack], B | None],
    write: Callable[[B | None], T],
    notes: list[str],
    why: str = UNREAD,
    of_base: tuple[type[Exception], ...] = (CkptzError, OSError),
) -> T:
    """Write a file as a delta to its base, or as a full file if the base turns out to be unreadable.

    Args:
        find: opens the base, which the stack closes; returns None for a full file.
        write: called with the base or None, and again with None if it fails with a base.
        notes: list to which the reason for a full file is added.
        why: beginning of that note.
        of_base: errors of an unreadable base; all other errors are raised.

    Raises:
        CkptzError, OSError: the file cannot be written without a base either.
    """
    with contextlib.ExitStack() as stack:
        base = found_base(find, stack, notes, why)
        try:
            return write(base)
        except of_base as error:
            if base is None:
                raise
            notes.append(f"{why}: {error}")
    return write(None)
