"""Which steps are kept, and the way from there to the fewest files. Never rewrites a file.

A file that no rule keeps is deleted, unless a kept one is stored against it, at whatever distance: then
it is hidden, and goes when the last that needs it goes. Files are deleted from the newest step to the
oldest, so at no moment does one lack its base, and a prune that was killed is finished by the next.

How much stays: with `last` = N alone and chains of at most A files, at most N + A - 1 files of weights and
as many of state; every further step that `every` or `best` keeps adds at most A of each.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ckptz.errors import CkptzError, ConfigError
from ckptz.store.resolve import Path_
from ckptz.store.step_files import FileFacts, Listing, StepFile
from ckptz.store.steps import StepStore


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRules:
    """Which steps are kept: those that any of the rules names.

    Attributes:
        last: so many newest steps, at least 1; None keeps all.
        every: steps that are multiples of this, for ever.
        best: so many steps with the best metric, of those that were saved with one.
        lower_is_better: what "best" means.
    """

    last: int | None = 5
    every: int | None = None
    best: int = 0
    lower_is_better: bool = True

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise ConfigError(f"last must be at least 1, or None to keep all, got {self.last}")
        if self.every is not None and self.every < 1:
            raise ConfigError(f"every must be at least 1, got {self.every}")
        if self.best < 0:
            raise ConfigError(f"best must be 0 or more, got {self.best}")

    def kept(self, steps: Iterable[int], metrics: Mapping[int, float]) -> set[int]:
        """Those of `steps` that are kept.

        Args:
            steps: all that are there.
            metrics: of those that have one.
        """
        ascending = sorted(steps)
        if self.last is None:
            return set(ascending)
        kept = set(ascending[-self.last :])
        if self.every is not None:
            kept.update(step for step in ascending if step % self.every == 0)
        sign = 1 if self.lower_is_better else -1
        rated = [step for step in ascending if not math.isnan(metrics.get(step, math.nan))]
        kept.update(sorted(rated, key=lambda step: (sign * metrics[step], -step))[: self.best])
        return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepPolicy(KeepRules):
    """The rules for whole steps, and others for weights that stay without their state.

    Attributes:
        last: see `KeepRules`, which hold for steps that training can resume from.
        every: the same.
        best: the same.
        lower_is_better: the same.
        weights: rules for weights; by default they go with their state.

    Example:
        >>> from ckptz import KeepPolicy
        >>> KeepPolicy(last=2, every=1000).last
        2
    """

    weights: KeepRules | None = None


KEEP_ALL: Final = KeepPolicy(last=None)
KEEP_LAST: Final = KeepPolicy()


Rules = tuple[int | None, int | None, int | None]  # last, every, best


def keep_policy(*, steps: Rules, weights: Rules, lower_is_better: bool) -> KeepPolicy:
    """The policy of some rules, each of which may be None; without any for steps, all stay.

    Args:
        steps: for whole steps.
        weights: for weights that stay without their state.
        lower_is_better: what "best" means.
    """
    return KeepPolicy(
        last=_last(steps),
        every=steps[1],
        best=steps[2] or 0,
        lower_is_better=lower_is_better,
        weights=None
        if weights == (None, None, None)
        else KeepRules(
            last=_last(weights), every=weights[1], best=weights[2] or 0, lower_is_better=lower_is_better
        ),
    )


def _last(rules: Rules) -> int | None:
    # The newest stays whatever the other rules are; without any, everything does.
    return 1 if rules[0] is None and rules != (None, None, None) else rules[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What became of a folder.

    Attributes:
        folder: the folder.
        steps: that training can resume from.
        weights_only: steps of which the weights are left.
        hidden: names of files that stay only because kept ones are stored against them.
        removed: names of files that were deleted, newest first.
        kept_bytes: size of the files that stay, hidden ones included.
        removed_bytes: size of those deleted.
        dry_run: nothing was done.
        seconds: time taken.
        notes: what the user should know.
    """

    folder: str
    steps: tuple[int, ...]
    weights_only: tuple[int, ...]
    hidden: tuple[str, ...]
    removed: tuple[str, ...]
    kept_bytes: int
    removed_bytes: int
    dry_run: bool
    seconds: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Decision:
    """What shall become of each file."""

    kept: frozenset[StepFile]
    hidden: frozenset[StepFile]
    removed: frozenset[StepFile]


def prune(
    store: StepStore, policy: KeepPolicy, *, after: int | None = None, dry_run: bool = False
) -> PruneReport:
    """Delete and hide what a policy does not keep.

    Args:
        store: locked by the caller, unless nothing is done.
        policy: what is kept.
        after: remove every step after this one first.
        dry_run: only say what would be done.
    """
    start = time.perf_counter()
    listing = store.listing()
    later = {file for file in listing.sizes if after is not None and file.step > after}
    facts, notes = _facts_of(store, listing.without(later))
    decision = _decide(listing.without(later), facts, policy)
    removed = sorted({*later, *decision.removed}, key=_newest_first)
    if not dry_run:
        for file in sorted(decision.hidden - listing.hidden, reverse=True):
            store.hide(file)
        for file in removed:
            store.remove(file)
    states = {file.step for file in decision.kept if file.kind == "state"}
    weights = {file.step for file in decision.kept if file.kind == "weights"}
    removed_bytes = sum(listing.sizes[file] for file in removed)
    return PruneReport(
        folder=store.name,
        steps=tuple(sorted(weights & states)),
        weights_only=tuple(sorted(weights - states)),
        hidden=tuple(file.name for file in sorted(decision.hidden)),
        removed=tuple(file.name for file in removed),
        kept_bytes=sum(listing.sizes.values()) - removed_bytes,
        removed_bytes=removed_bytes,
        dry_run=dry_run,
        seconds=time.perf_counter() - start,
        notes=tuple(notes),
    )


def _facts_of(store: StepStore, listing: Listing) -> tuple[dict[StepFile, FileFacts], list[str]]:
    """What each file says of itself; one that cannot be read is noted and left alone."""
    facts, notes = {}, []
    for file, n_bytes in sorted(listing.sizes.items()):
        try:
            facts[file] = store.facts(file, n_bytes)
        except (CkptzError, OSError) as error:
            notes.append(f"{file.name} is left alone, because it cannot be read: {error}")
    return facts, notes


def _decide(listing: Listing, facts: Mapping[StepFile, FileFacts], policy: KeepPolicy) -> _Decision:
    metrics = {file.step: fact.metric for file, fact in facts.items() if fact.metric is not None}
    full = policy.kept(listing.full_steps, metrics)
    weights = full if policy.weights is None else full | policy.weights.kept(listing.weights_steps, metrics)
    kept = {StepFile(step, "state") for step in full} | {StepFile(step, "weights") for step in weights}
    kept |= set(listing.sizes) - set(facts)
    needed = _needed_by(kept, facts)
    return _Decision(frozenset(kept), frozenset(needed - kept), frozenset(set(listing.sizes) - kept - needed))


def _needed_by(kept: Iterable[StepFile], facts: Mapping[StepFile, FileFacts]) -> set[StepFile]:
    """The files that kept ones are stored against, through whole chains."""
    by_content = {(file.kind, fact.content_id): file for file, fact in facts.items()}
    needed: set[StepFile] = set()
    waiting = [file for file in kept if file in facts]
    while waiting:
        file = waiting.pop()
        fact = facts[file]
        if fact.base is None:
            continue
        named = StepFile.parse(fact.base)
        # A reader would also find the base under another name, by its content.
        base = named if named in facts else by_content.get((file.kind, fact.base_id or ""))
        if base is not None and base not in needed:
            needed.add(base)
            waiting.append(base)
    return needed


def _newest_first(file: StepFile) -> tuple[int, bool]:
    return -file.step, file.kind != "weights"


def prune_folder(
    folder_or_url: Path_, policy: KeepPolicy, *, after: int | None = None, dry_run: bool = False
) -> PruneReport:
    """`ckptz prune`: apply a policy to a folder that nobody writes to.

    Args:
        folder_or_url: the store.
        policy: what is kept.
        after: remove every step after this one first, to go on from there.
        dry_run: only say what would be done.

    Raises:
        ConfigError: it holds no steps, or somebody writes to it.
    """
    with contextlib.closing(StepStore(folder_or_url)) as store:
        if not store.listing().sizes:
            raise ConfigError(f"{store.name}: holds no steps of a Checkpointer; name the run's own folder")
        if not dry_run:
            store.lock()
        return prune(store, policy, after=after, dry_run=dry_run)
