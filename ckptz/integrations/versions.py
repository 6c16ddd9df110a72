"""Warning at import when a library's version differs from the tested ones."""

from __future__ import annotations

import re
import warnings
from typing import TypeAlias

Version: TypeAlias = tuple[int, int]


class UntestedVersionWarning(UserWarning):
    """A library that an adapter builds on has a version that the adapter was not tested with."""


def warn_untested(package: str, version: str, tested: tuple[Version, Version]) -> None:
    """Warn unless a version such as "2.6.6" lies within the first and last one that tests ran with."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and tested[0] <= (int(numbers[1]), int(numbers[2])) <= tested[1]:
        return
    first, last = (".".join(map(str, edge)) for edge in tested)
    warnings.warn(
        f"{package} {version} is outside of the versions that ckptz was tested with, {first} to {last}; "
        "save and restore once before you rely on it",
        UntestedVersionWarning,
        stacklevel=3,
    )
