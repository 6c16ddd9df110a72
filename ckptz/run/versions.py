"""Files of a weight-sync folder by name: published steps, and the files that lead from one to another.

step-000010.ckptz                 a full file of step 10
step-000012.from-000011.ckptz     a delta from step 11 to step 12
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ckptz.errors import MissingBaseError

_NAME: Final = re.compile(r"step-(\d{6,})(?:\.from-(\d{6,}))?\.ckptz")


@dataclass(frozen=True, slots=True)
class Version:
    """One file; `base` is the step of the base of a delta, None for a full file."""

    step: int
    base: int | None
    n_bytes: int = 0

    @property
    def name(self) -> str:
        """Name of the version's file."""
        middle = "" if self.base is None else f".from-{self.base:06d}"
        return f"step-{self.step:06d}{middle}.ckptz"


def versions_in(sizes: Mapping[str, int]) -> list[Version]:
    """Return the published files by step, a delta before the full file of its step."""
    versions = []
    for name, n_bytes in sizes.items():
        if match := _NAME.fullmatch(name):
            version = Version(int(match[1]), None if match[2] is None else int(match[2]), n_bytes)
            if version.name == name:
                versions.append(version)
    return sorted(versions, key=lambda v: (v.step, v.base is None, v.base or 0))


def newest_step(versions: Iterable[Version]) -> int | None:
    """Return the newest published step, or None."""
    return max((version.step for version in versions), default=None)


def full_files_of(versions: Iterable[Version]) -> list[Version]:
    """Return the full versions, oldest first."""
    return [version for version in versions if version.base is None]


def route(versions: Sequence[Version], have: int | None, want: int, where: str) -> list[Version]:
    """Return the files to apply for step `want`, from step `have` or a full file, with the fewest bytes.

    Args:
        versions: the published files.
        have: the step of the receiver, or None.
        want: the target step.
        where: the folder, for messages.

    Raises:
        MissingBaseError: no files lead to the step.
    """
    leading_on = defaultdict(list)
    for version in versions:
        leading_on[version.base].append(version)
    # Starting points are step `have`, and None, from which full files lead on.
    open_ends: list[tuple[int, int, int | None, tuple[Version, ...]]] = [(0, 0, have, ()), (0, 1, None, ())]
    seen: set[int | None] = set()
    n_pushed = len(open_ends)
    while open_ends:
        n_bytes, _, at, path = heapq.heappop(open_ends)
        if at == want:
            return list(path)
        if at in seen:
            continue
        seen.add(at)
        for version in leading_on[at]:
            heapq.heappush(open_ends, (n_bytes + version.n_bytes, n_pushed, version.step, (*path, version)))
            n_pushed += 1
    if all(version.step != want for version in versions):
        raise MissingBaseError(f"{where}: step {want} is not published here")
    start = "nothing" if have is None else f"step {have}"
    raise MissingBaseError(
        f"{where}: no files lead from {start} to step {want}, so one between them is missing; "
        "the next full file closes the gap"
    )
