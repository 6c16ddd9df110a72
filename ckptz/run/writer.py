"""Writes a file of a run against the base that is chosen for it, or without one where that cannot be read.

The one way of all who write runs: what is saved is in memory, and no base is worth losing it.
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
    held: contextlib.ExitStack,
    notes: list[str],
    why: str = UNREAD,
) -> B | None:
    """Open a base, which is closed with `held`; None, with a note that begins with `why`, if that fails."""
    try:
        return find(held)
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
    """Write what belongs to a step against its base; without, where that turns out to be unreadable.

    Args:
        find: opens the base and leaves it to the stack to be closed; gives None for a full file.
        write: is given the base, or None; is called again with None if it fails with a base.
        notes: are told why there is a full file in place of a delta.
        why: begins such a note.
        of_base: what a base may raise that cannot be read; what else is raised ends the writing.

    Raises:
        CkptzError, OSError: what is written cannot be, with a base or without.
    """
    with contextlib.ExitStack() as held:
        base = found_base(find, held, notes, why)
        try:
            return write(base)
        except of_base as error:
            if base is None:
                raise
            notes.append(f"{why}: {error}")
    return write(None)
