"""Names of files that not every system can hold, and names that some systems take for one.

A folder that is packed here may be restored anywhere: Windows keeps names such as `con` and `nul.pt` for
devices, and its file systems and those of macOS tell neither `A` from `a` nor the forms of Unicode apart.
"""

from __future__ import annotations

import os
import re
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from ckptz.errors import UnsupportedError

SYSTEM: Final = os.name
_DEVICE: Final = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]) *(\..*)?", re.IGNORECASE)
_NOT_IN_NAMES: Final = frozenset('<>"|?*')  # of Windows, beside those that no file name of ours has


def is_portable(path: str) -> bool:
    """Tell whether every system can hold a file with this relative path."""
    return not any(
        _DEVICE.fullmatch(part) or part.endswith((".", " ")) or not _NOT_IN_NAMES.isdisjoint(part)
        for part in path.split("/")
    )


class Spellings:
    """Relative paths so far, to find those that some system takes for one of them, or for its folder."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def clash(self, path: str) -> str | None:
        """Add `path`, and return the path or folder that it, or a folder of it, is only spelled unlike."""
        parts = path.split("/")
        for n in range(1, len(parts) + 1):
            part = "/".join(parts[:n])
            if (known := self._known.setdefault(_folded(part), part)) != part:
                return known
        return None


def _folded(path: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", path).casefold())


def clashes(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Find pairs of paths, or folders of such, that some systems take for one."""
    known = Spellings()
    for path in paths:
        if (other := known.clash(path)) is not None:
            yield other, path


def check_holds(folder: Path, paths: Iterable[str]) -> None:
    """Require that a folder can hold files with these relative paths, each as a file of its own.

    Raises:
        UnsupportedError: names the file, or the two that would become one.
    """
    found = list(paths)
    remedy = "restore it on another system, or into one file with --to"
    for path in found:
        if SYSTEM == "nt" and not is_portable(path):
            raise UnsupportedError(f"{folder}: this system cannot hold a file called {path!r}; {remedy}")
    for one, other in clashes(found):
        if _takes_as_one(folder, one, other):
            raise UnsupportedError(f"{folder}: {one!r} and {other!r} are one name on this disk; {remedy}")


def _takes_as_one(folder: Path, one: str, other: str) -> bool:
    """Ask the file system itself."""
    n = one.count("/")  # `one` may be a folder of the other path
    with tempfile.TemporaryDirectory(dir=folder) as probe:
        (Path(probe) / one.split("/")[n]).touch()
        return (Path(probe) / other.split("/")[n]).exists()
