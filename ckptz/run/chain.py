"""Choice of the base for the next file of a run: least disk, and never more than plain files.

Every writer of runs uses this choice, whatever its files are called and whoever deletes them.

A delta is smaller than a full file, but its base must be kept as long as the delta. Which one takes less
disk depends on how long the keep rules keep files, on the size of deltas and on the chain length. So the next
saves are simulated under several policies (`ChainRule`): full files only, a shorter full-file interval,
deltas against the full file instead of a later file. Policies that would at some moment take more disk than
plain files are excluded; where the keep rules are unknown, so are those in which one file with its bases
would. The policy with the smallest mean wins.

The size of a file is unknown before it is encoded, so it is estimated from existing and earlier files: a
first delta is written where it may pay, and if it does not, the next file is a full file. This module reads
and writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final, Generic, TypeVar

from ckptz.run.step_files import ChainRule, FileFacts, FileKind, Kept, Listing, StepFile

N_REMEMBERED: Final = 64  # number of written files whose sizes are used
N_AHEAD: Final = 32  # number of simulated saves; more if full files are further apart
N_ALIKE: Final = 4  # the largest of so many newest files of a distance predicts the next
HOPED: Final = 1 / 4  # assumed size of a first delta, as a share of a full file
INTERVALS: Final = (2, 4, 8, 16, 32)
K = TypeVar("K")  # identity of a file

# (number of saves between a file and its base, 0 for a full file; size in bytes), oldest first
Sizes = Iterable[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ChainFile(Generic[K]):
    """An existing file, as far as the choice of a base depends on it."""

    n_bytes: int  # its size
    position: int  # number of files written since its full file; 0 for a full file
    base: K | None  # its base; None for a full file, or if the base is missing
    stays: int  # number of future saves until the keep rules delete it; 0 if it is kept only as a base


class Estimate:
    """Predicted sizes of files, in bytes.

    Args:
        sizes: sizes of existing and earlier files.
        plain: size of an uncompressed file, which predicts the first full file.
    """

    def __init__(self, sizes: Sizes, plain: int) -> None:
        self.plain = plain
        by_distance: dict[int, list[int]] = {}
        for distance, n_bytes in sizes:
            by_distance.setdefault(distance, []).append(n_bytes)
        largest = {distance: max(newest[-N_ALIKE:]) for distance, newest in sorted(by_distance.items())}
        self.full = largest.pop(0, plain)
        self._deltas = largest
        self._growth = 0.0  # bytes per doubling of the distance
        if len(largest) > 1:
            (near, least), *_, (far, most) = largest.items()
            self._growth = max(0.0, (most - least) / math.log2(far / near))

    def delta(self, distance: int) -> float:
        """Return the predicted bytes of a delta whose base is `distance` saves back."""
        if not self._deltas:
            return HOPED * self.full
        near = max((known for known in self._deltas if known <= distance), default=min(self._deltas))
        growth = self._growth * math.log2(max(1.0, distance / near))
        return min(self._deltas[near] + growth, max(self.full, self._deltas[near]))


def weighed(
    rule: ChainRule,
    existing: Mapping[K, ChainFile[K]],
    kept: Kept,
    steps: Sequence[int],
    estimate: Estimate,
    other_bytes: int = 0,
) -> ChainRule:
    """Return the chain rule that takes the least disk over the next saves.

    Args:
        rule: the user's rule; the interval of full files never becomes longer.
        existing: existing files, bases before their deltas; the last is the newest.
        kept: how long files are kept.
        steps: existing steps, ascending, which predict the next steps.
        estimate: predicted sizes.
        other_bytes: bytes of other files, which do not depend on the choice.

    Returns:
        The same rule, one with more frequent full files, or one with the full file as the base of all deltas.
    """
    if kept.last is None and estimate.delta(1) < estimate.full:
        return rule  # no file is ever deleted
    n_ahead = max(N_AHEAD, rule.full_every)
    past = _past(existing, n_ahead, other_bytes)
    alone = ChainRule(1, rule.is_forked)
    shapes = (rule, replace(rule, is_flat=True))
    intervals = [rule.full_every, *(n for n in INTERVALS if n < rule.full_every)]
    ways = [alone, *(replace(shape, full_every=n, kept=None) for n in intervals for shape in shapes)]
    best, limit = (alone, math.inf), 0.0
    for way in ways:
        stays = kept.stays_of(steps, n_ahead, way.full_every)
        mean, excess, largest = _outlook(way, past, stays, estimate)
        if way is alone:
            limit = max(0.0, excess)
        elif kept.best and largest > estimate.plain:
            continue
        if excess <= limit and mean < best[1]:
            best = way, mean
    return best[0]


def base_of_next(
    files: Mapping[K, ChainFile[K]],
    rule: ChainRule,
    kept: Kept | None,
    steps: Sequence[int],
    sizes: tuple[Sizes, int, int],
) -> K | None:
    """Choose the base of the next file.

    Args:
        files: existing files, bases before their deltas, the newest last.
        rule: the user's rule.
        kept: how long files are kept; None applies the rule unchanged.
        steps: existing steps, ascending, which predict the next steps.
        sizes: `Sizes` of files written before; size of an uncompressed file; bytes of other files.

    Returns:
        The newest file or one of its bases; None for a full file.
    """
    *_, newest = files
    if kept is not None:
        written, plain, other_bytes = sizes
        known = [
            (0 if file.base is None else file.position - files[file.base].position, file.n_bytes)
            for file in files.values()
            if file.base is not None or not file.position
        ]
        rule = weighed(rule, files, kept, steps, Estimate((*known, *written), plain), other_bytes)
    wanted = rule.base_of(files[newest].position + 1)
    if wanted is None:
        return None
    candidate: K | None = newest
    while candidate is not None and files[candidate].position > wanted:
        candidate = files[candidate].base
    return newest if candidate is None else candidate


def files_of_kind(
    kind: FileKind, kept: Kept, listing: Listing, facts: Mapping[StepFile, FileFacts | Exception]
) -> dict[StepFile, ChainFile[StepFile]]:
    """Describe the files of a kind, at least one; `facts` has their facts or the errors of reading them."""
    steps = listing.steps_of(kind)
    stays = dict(zip(steps, kept.stays(steps), strict=True))
    files: dict[StepFile, ChainFile[StepFile]] = {}
    for file, n_bytes in sorted(listing.sizes.items()):
        if file.kind != kind or file.is_residual or file.step > steps[-1]:
            continue
        result = facts.get(file)
        fact = result if isinstance(result, FileFacts) else None
        named = None if fact is None or fact.base is None else StepFile.parse(fact.base.file)
        base = named if named in files else None
        # A recorded position may be wrong: a base may be deleted, and files may be copied from other folders.
        # A delta to a file without a step, such as the pretrained weights, counts as a full file.
        position = 0 if fact is None else fact.position
        if named is not None:
            position = max(1 if base is None else files[base].position + 1, position)
        files[file] = ChainFile(n_bytes, position, base, stays.get(file.step, 0))
    return files


Past = tuple[list[tuple[int, int, int]], list[float], list[int]]  # see `_past`


def _past(existing: Mapping[K, ChainFile[K]], n_saves: int, other_bytes: int) -> Past:
    """Describe the existing files, as far as the simulation of the next saves depends on them.

    Returns:
        Files of the newest chain, full file first: (bytes, position, number of the save that deletes it); the
        change of the disk usage by all other files at each save, in bytes; and that of the number of kept
        files.
    """
    taken, plain = [0.0] * (n_saves + 1), [0] * (n_saves + 1)
    taken[0] = other_bytes
    gone = {key: file.stays for key, file in existing.items()}
    for key in reversed(gone):
        if (base := existing[key].base) is not None:
            gone[base] = max(gone[base], gone[key])
    chain: list[K] = []
    key_of_chain = next(reversed(gone), None)
    while key_of_chain is not None:
        chain.append(key_of_chain)
        key_of_chain = existing[key_of_chain].base
    for key, file in existing.items():
        _add(plain, 0, file.stays, 1)
        if key not in chain:
            _add(taken, 0, gone[key], file.n_bytes)
    of_chain = [(existing[key].n_bytes, existing[key].position, gone[key]) for key in reversed(chain)]
    return of_chain, taken, plain


def _add(changes: list[Any], born: int, gone: int, size: float) -> None:
    if gone > born:
        changes[born] += size
        changes[min(gone, len(changes) - 1)] -= size


def _outlook(
    rule: ChainRule, past: Past, stays: Sequence[int], estimate: Estimate
) -> tuple[float, float, float]:
    """Simulate the next saves under a rule.

    `stays` has the number of the save that deletes each future file; the next save is 0.

    Returns:
        The mean disk usage in bytes, the largest excess over uncompressed files, and the largest size of a
        new delta with all its bases.
    """
    largest = 0.0
    of_chain, taken, plain = past[0], [*past[1]], [*past[2]]
    # Files of the newest chain.
    chain: list[list[Any]] = [[size, position, 0, gone] for size, position, gone in of_chain]
    for i, until in enumerate(stays):
        position = chain[-1][1] + 1 if chain else 0
        wanted = rule.base_of(position)
        n_left = 0
        if wanted is not None:
            # 0 if the full file of the chain is deleted.
            n_left = next((n for n in range(len(chain), 0, -1) if chain[n - 1][1] <= wanted), 0)
        for size, _, born, gone in chain[n_left:]:  # these cannot be bases any more
            _add(taken, born, gone, size)
        del chain[n_left:]
        for file in chain:
            file[3] = max(file[3], until)
        size = estimate.delta(position - chain[-1][1]) if chain else estimate.full
        chain.append([size, position if n_left else 0, i, until])
        if n_left:
            largest = max(largest, sum(file[0] for file in chain))
        _add(plain, i, until, 1)
    for size, _, born, gone in chain:
        _add(taken, born, gone, size)
    bytes_taken = list(accumulate(taken[:-1]))
    whole = accumulate(plain[:-1])
    excess = max(a - estimate.plain * n for a, n in zip(bytes_taken, whole, strict=True))
    return sum(bytes_taken) / len(bytes_taken), excess, largest
