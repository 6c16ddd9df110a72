"""Prunes the folder of a Checkpointer: from the steps that are kept to the fewest files. Rewrites none.

A file that no rule keeps is deleted, unless a kept one is stored against it, at whatever distance: then
it is hidden, and goes when the last that needs it goes. Files are deleted from the newest step to the
oldest, so at no moment does one lack its base, and a prune that was killed is finished by the next. The
newest weights stay under every rule, whether they have a state or not, and without rules all do. A step
of which a file cannot be read, or its base not be found, keeps every older step as it is; see keep.py.

A residual makes a lossy file of a kept step exact. It is never hidden, and goes before all others.

How much stays: with `last` = N alone and chains of at most A files, at most N + A - 1 files of weights and
as many of state; every further step that `every` or `best` keeps adds at most A of each.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass

from ckptz.errors import ConfigError, MissingBaseError
from ckptz.pages.words import Report
from ckptz.run.folder import StepStore
from ckptz.run.keep import KeepPolicy, what_stays
from ckptz.run.links import BASE_PREFIX
from ckptz.run.step_files import FileFacts, Listing, StepFile
from ckptz.store.resolve import Path_


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport(Report):
    """Files of a folder that a prune deleted, hid and kept.

    Attributes:
        folder: the folder.
        steps: that training can resume from.
        weights_only: steps of which the weights are left.
        exact: of `steps`, those that come back bit for bit though their files are lossy.
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
    exact: tuple[int, ...]
    hidden: tuple[str, ...]
    removed: tuple[str, ...]
    kept_bytes: int
    removed_bytes: int
    dry_run: bool
    seconds: float
    notes: tuple[str, ...] = ()


def prune(
    store: StepStore, policy: KeepPolicy, *, after: int | None = None, dry_run: bool = False
) -> PruneReport:
    """Delete and hide what a policy does not keep.

    Args:
        store: locked by the caller, unless nothing is done.
        policy: what is kept.
        after: remove every step after this one first.
        dry_run: only say what would be done.

    Raises:
        ConfigError: no step that can be read would be left before those after `after`.
        OSError: the folder cannot be listed, or a file not be deleted; what is older than that stays.
    """
    start = time.perf_counter()
    listing = store.listing()
    later = {file for file in listing.sizes if after is not None and file.step > after}
    rest = listing.without(later)
    facts, unread = _facts_of(store, rest)
    if later:
        _check_goes_back(store.name, rest, unread)
    kept, hidden, notes = _decide(rest, facts, unread, policy)
    unneeded = {*later, *rest.sizes} - kept - hidden
    # Later steps go whole, the newest first, so that the newest that is left is exact at any moment. Of each
    # step its weights go first, so that half of it is no step; and before all that go by rules, residuals.
    removed = sorted(later, key=lambda file: (-file.step, file.is_exact, file.kind != "weights"))
    removed += sorted(
        unneeded - later, key=lambda file: (not file.is_exact, -file.step, file.kind != "weights")
    )
    if not dry_run:
        _carry_out(store, removed, hidden - listing.hidden, len(later))
    states = {file.step for file in kept if file.kind == "state" and not file.is_exact}
    weights = {file.step for file in kept if file.kind == "weights" and not file.is_exact}
    removed_bytes = sum(listing.sizes[file] for file in removed)
    return PruneReport(
        folder=store.name,
        steps=tuple(sorted(weights & states)),
        weights_only=tuple(sorted(weights - states)),
        exact=tuple(sorted({file.step for file in kept if file.is_exact} & weights & states)),
        hidden=tuple(file.name for file in sorted(hidden)),
        removed=tuple(file.name for file in removed),
        kept_bytes=sum(listing.sizes.values()) - removed_bytes,
        removed_bytes=removed_bytes,
        dry_run=dry_run,
        seconds=time.perf_counter() - start,
        notes=notes,
    )


def _carry_out(
    store: StepStore, removed: Sequence[StepFile], newly_hidden: Set[StepFile], n_later: int
) -> None:
    store.check_lock()
    n_before = n_later + sum(file.is_exact for file in removed[n_later:])
    for file in removed[:n_before]:
        store.remove(file)
    for file in sorted(newly_hidden, reverse=True):
        store.hide(file)
    for file in removed[n_before:]:
        store.remove(file)


Facts = Mapping[StepFile, FileFacts]
Unread = Mapping[StepFile, Exception]


def _facts_of(store: StepStore, listing: Listing) -> tuple[Facts, Unread]:
    """Read what each file says of itself, or why it cannot be read."""
    facts: dict[StepFile, FileFacts] = {}
    unread: dict[StepFile, Exception] = {}
    for file, n_bytes in sorted(listing.sizes.items()):
        try:
            facts[file] = store.facts(file, n_bytes)
        except Exception as error:  # stores behind URLs have errors of their own
            unread[file] = error
    return facts, unread


def _check_goes_back(name: str, rest: Listing, unread: Unread) -> None:
    """Refuse to remove later steps unless there is one to go on from, which can be read."""
    if not rest.weights_steps:
        raise ConfigError(f"{name}: no step would be left to go on from; name one that is there")
    newest = rest.weights_steps[-1]
    for file, error in unread.items():
        if file.step == newest and not file.is_exact:
            raise ConfigError(
                f"{name}: {file.name} cannot be read, so the steps after {newest} stay; try again, or go "
                f"back further: {error}"
            )


def _decide(
    listing: Listing, facts: Facts, unread: Unread, policy: KeepPolicy
) -> tuple[set[StepFile], set[StepFile], tuple[str, ...]]:
    """(files that stay, files that stay only because those need them, notes)."""
    metrics = {file.step: fact.metric for file, fact in facts.items() if fact.metric is not None}
    full = policy.kept(listing.full_steps, metrics)
    weights = full | _weights_kept(listing, metrics, policy)
    kept = {StepFile(step, "state") for step in full} | {StepFile(step, "weights") for step in weights}
    if policy.keeps_all:
        kept |= {file for file in listing.sizes if not file.is_exact} - listing.hidden
    heads = policy.heads(full if full and policy.exact is not None else weights)
    kept |= {file for file in listing.sizes if file.is_exact and file.step in heads}
    holders: dict[str, list[StepFile]] = {}
    for file, fact in facts.items():
        if not file.is_exact:
            holders.setdefault(fact.content_id, []).append(file)
    stays = what_stays(
        listing.sizes,
        {*kept, *(file for file in unread if not file.is_exact)},  # residuals are dropped unread
        lambda file: _bases_of(file, facts, holders, unread),
        # Without a step's metric or base, no older one may go.
        lambda file: {other for other in listing.sizes if other.step <= file.step},
    )
    kept |= stays.doubtful - listing.hidden
    return kept, set(listing.sizes) - kept - stays.may_go, stays.notes


def _weights_kept(listing: Listing, metrics: Mapping[int, float], policy: KeepPolicy) -> set[int]:
    """Steps of which the weights stay, state or not.

    Without rules for weights, those that go on after the newest whole step are steps of their own: all of a
    folder that holds no state, what `compress` added to a run, or half of a save that was killed.
    """
    if policy.weights is not None:
        return policy.weights.kept(listing.weights_steps, metrics)
    newest = -1 if policy.keeps_all else max(listing.full_steps, default=-1)
    return policy.kept((step for step in listing.weights_steps if step > newest), metrics)


def _bases_of(
    file: StepFile, facts: Facts, holders: Mapping[str, list[StepFile]], unread: Unread
) -> list[StepFile]:
    """List the files that one may be stored against: all holders of the content that its base has."""
    if file in unread:
        raise unread[file]
    fact = facts[file]
    if fact.base is None or fact.base.file.startswith(BASE_PREFIX):  # what the run began from is no step
        return []
    named = StepFile.parse(fact.base.file)
    if named is not None and named in unread:
        return [named]
    # Readers, too, look first for the name, and then for the content under any other.
    found = [other for other in holders.get(fact.base.content_id, ()) if other != file]
    if not found:
        raise MissingBaseError(f"its base {fact.base.file} is not here")
    return [named] if named is not None and named in found else found


def check_best(name: str, policy: KeepPolicy, metrics: Collection[object]) -> None:
    """Refuse to keep the best of steps that say nothing of it, as that would remove them all.

    Raises:
        ConfigError: names the folder.
    """
    if policy.best and not metrics:
        raise ConfigError(f"{name}: no step here records a metric, so none is the best; keep steps otherwise")


def prune_folder(
    folder_or_url: Path_, policy: KeepPolicy, *, after: int | None = None, dry_run: bool = False
) -> PruneReport:
    """Apply a policy to a folder that nobody writes to, as `ckptz prune` does; see `prune`.

    Raises:
        ConfigError: it holds no steps, or none with a metric for `best`, or somebody writes to it.
    """
    with contextlib.closing(StepStore(folder_or_url)) as store:
        listing = store.listing()
        if not listing.sizes:
            raise ConfigError(f"{store.name}: holds no steps of a Checkpointer; name the run's own folder")
        if not dry_run:
            store.lock()
        if policy.best:
            facts, _ = _facts_of(store, listing)
            check_best(store.name, policy, {fact.metric for fact in facts.values()} - {None})
        return prune(store, policy, after=after, dry_run=dry_run)
