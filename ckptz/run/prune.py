"""Deletes the steps of a run that no keep rule selects. No file is rewritten.

A file that no rule keeps is deleted unless it is a direct or indirect base of a kept file. Such a base is
hidden in the folder of a Checkpointer, and deleted with the last file that needs it. Files are deleted from
the newest step to the oldest, so no file ever lacks its base, and the next prune finishes one that was
killed. The newest weights are always kept, with or without state. If a file of a step is unreadable or its
base is missing, all older steps are kept; in runs of frameworks, whose files may need any other file, all
steps are. See keep.py.

The residual of a lossy file is never hidden, and residuals are deleted before other files.

With `last` = N alone and chains of at most A files, at most N + A - 1 files of weights and of state are kept;
every further step that `every` or `best` keeps adds at most A of each.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptz.errors import CkptzError, ConfigError, CorruptionError, MissingBaseError
from ckptz.format.byte_source import open_bytes
from ckptz.format.index import BaseRef
from ckptz.format.publish import abandoned
from ckptz.format.suffixes import SUFFIX
from ckptz.run.deletion import drop_unneeded, finish_removals, remove_step
from ckptz.run.folder import StepStore
from ckptz.run.keep import KeepPolicy, retention_of
from ckptz.run.links import BASE_PREFIX
from ckptz.run.names import Inode, inode_of, is_base_name, is_of_state, run_files, step_of, step_of_folder
from ckptz.run.step_files import (
    LAST_FILES,
    STATE_KEY,
    TRAINER_STATE,
    FileFacts,
    FileKind,
    Listing,
    StepFile,
    is_residual_name,
    is_written,
)
from ckptz.store.resolve import Path_
from ckptz.words import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport(Report):
    """Files of a folder that a prune deleted, hid and kept.

    Attributes:
        folder: the folder.
        steps: steps that training can resume from.
        weights_only: steps with weights and without state.
        exact: those of `steps` that are exact by residual files.
        hidden: names of files that are kept only as bases.
        removed: names of deleted files, newest first.
        kept_bytes: size of all kept files, including hidden ones.
        removed_bytes: size of the deleted files.
        dry_run: nothing was deleted.
        seconds: time taken.
        notes: warnings for the user.
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


# --- the rule -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class PruneItem:
    """A file of a run, or the folder of a step, which is kept or deleted as a whole."""

    name: str  # path relative to the run
    step: int | None  # its step, or None
    kind: FileKind | None = None  # its part of the step; None for all of it
    is_linked: bool = False  # part of a framework's run, where any file may need any other
    is_residual: bool = False  # a residual file
    is_auxiliary: bool = False  # kept only for others: hidden, or a link to a base
    sizes: Mapping[Any, int] = field(default_factory=dict)  # size of each file, by its identity
    ids: frozenset[str] = frozenset()  # content ids of its files
    bases: tuple[BaseRef, ...] = ()  # references to bases that it does not contain
    paths: frozenset[Path] = frozenset()  # resolved paths of its files
    metric: float | None = None  # recorded metric, or None
    error: Exception | None = None  # the reason if it is unreadable, or None
    is_unfinished: bool = False  # being written, or interrupted while it was written: not a step


PruneItems = Sequence[PruneItem]
Decision = tuple[set[PruneItem], PruneItems, PruneItems, tuple[str, ...]]  # see `decide`


def decide(
    name: str,
    items: PruneItems,
    policy: KeepPolicy,
    last_step: int | None = None,
    always_kept: Collection[str] = (),
) -> Decision:
    """Decide which items of a run are kept.

    Args:
        name: name of the folder, for messages.
        items: all items.
        policy: the keep rules.
        last_step: delete all steps after this one.
        always_kept: names of items that are kept whatever the rules say.

    Returns:
        The items that the rules keep; those kept only as bases, by step; those to delete, in this order; and
        notes on unreadable items.

    Raises:
        ConfigError: no readable step would be left up to `last_step`.
    """
    later = {
        item for item in items if last_step is not None and item.step is not None and item.step > last_step
    }
    remaining = [item for item in items if item not in later]
    checkpoints = [
        item for item in remaining if not (item.is_residual or item.is_auxiliary or item.is_unfinished)
    ]
    state_steps = {item.step for item in checkpoints if item.kind != "weights"}
    weights_steps = {item.step for item in checkpoints if item.kind != "state" and item.step is not None}
    if later:
        _check_goes_back(name, remaining, weights_steps)
    kept_weights, kept_states, exact = _steps_to_keep(policy, checkpoints, weights_steps, state_steps)

    def is_kept(item: PruneItem) -> bool:
        if item.is_auxiliary or item.is_unfinished:
            return False
        steps = exact if item.is_residual else kept_states if item.kind == "state" else kept_weights
        return item.step is None or item.step in steps

    kept = set(filter(is_kept, remaining))
    kept.update(item for item in checkpoints if policy.keeps_all or item.name in always_kept)
    may_go, doubtful, notes = retention_of(
        items,
        # Residuals are deleted unread, so an unreadable one keeps nothing else.
        {*kept, *(item for item in remaining if item.error and not item.is_residual)},
        _Bases(items).of,
        lambda item: _possible_bases(item, remaining),
    )
    kept |= {item for item in doubtful if not item.is_auxiliary}

    def deletion_order(item: PruneItem) -> tuple[bool, bool, int, bool, bool, bool, str]:
        # Steps after `last_step` are deleted whole, newest first, so that the newest remaining step is always
        # exact. Of each step the weights are deleted first, because the state alone is not a step. By rules,
        # residuals are deleted before all other files.
        is_later, step = item in later, item.step or 0
        by_step = -step, item.is_residual, item.kind != "weights", item.is_auxiliary, item.name
        return not is_later, not is_later and not item.is_residual, *by_step

    needed = {*items} - kept - may_go
    return (
        kept,
        sorted(needed, key=lambda item: (item.step or 0, item.kind or "", item.name)),
        sorted(may_go, key=deletion_order),
        notes,
    )


def _steps_to_keep(
    policy: KeepPolicy, checkpoints: PruneItems, weights_steps: set[int], state_steps: set[int | None]
) -> tuple[set[int], set[int], set[int]]:
    """Return the steps whose weights, whose states and whose residual files the rules keep."""
    metrics = {c.step: c.metric for c in checkpoints if c.step is not None and c.metric is not None}
    full_steps = weights_steps & state_steps
    full = policy.kept(full_steps, metrics)
    # Without rules for weights, weights after the newest whole step are steps of their own: a folder without
    # any state, files that `compress` added to a run, or half of a killed save.
    newest = -1 if policy.weights is not None or policy.keeps_all else max(full_steps, default=-1)
    weights_alone = (step for step in weights_steps if step > newest)
    weights = full | (policy.weights or policy).kept(weights_alone, metrics)
    return weights, full, policy.heads(full if full and policy.exact is not None else weights)


def _possible_bases(item: PruneItem, remaining: PruneItems) -> PruneItems:
    """Return the possible bases of an unreadable item: its metric and base are unknown."""
    if item.is_linked:  # unfinished files have no paths
        return [other for other in remaining if other.paths]
    return [other for other in remaining if item.step is None or (other.step or 0) <= item.step]


def _check_goes_back(name: str, remaining: Collection[PruneItem], steps: Collection[int]) -> None:
    """Refuse to delete later steps unless a readable step is left."""
    if not steps:
        raise ConfigError(f"{name}: no step would be left to go on from; name one that is there")
    newest = max(steps)
    for item in remaining:
        if item.error is not None and item.step == newest and not item.is_residual:
            raise ConfigError(
                f"{name}: {item.name} cannot be read, so the steps after {newest} stay; try again, or go "
                f"back further: {item.error}"
            )


class _Bases:
    """Finds the bases of items."""

    def __init__(self, items: PruneItems) -> None:
        self._names = {item.name: item for item in items}
        self._is_any_unread = any(item.error for item in items)
        self._holders: dict[str, list[PruneItem]] = {}
        self._at_path: dict[Path, list[PruneItem]] = {}
        for item in items:
            for content_id in item.ids:
                self._holders.setdefault(content_id, []).append(item)
            for path in item.paths:
                self._at_path.setdefault(path, []).append(item)

    def of(self, item: PruneItem) -> list[PruneItem]:
        """Return the items that share a file with an item, and those that hold the values of its bases.

        Raises an exception if a base is not found or the item is unreadable.
        """
        if item.error is not None:
            raise item.error
        needed = [other for path in item.paths for other in self._at_path[path]]
        for base in item.bases:
            named = self._names.get(base.file)
            # Like readers: first by name, then by content id under any name.
            has_values = named is not None and base.content_id in named.ids
            if named is not None and has_values and all(own.depth < base.depth for own in named.bases):
                needed.append(named)
                continue
            holders = [other for other in self._holders.get(base.content_id, ()) if other is not item]
            if named is not None and named.error:  # readers may take the base or another file of its values
                holders.append(named)
            # Bases of frameworks' files may be elsewhere; pretrained weights are not a step.
            is_of_origin = base.file.startswith(BASE_PREFIX)
            is_elsewhere = not self._is_any_unread if item.is_linked else is_of_origin
            if not holders and not is_elsewhere:
                raise MissingBaseError(f"its base {base.file} is not here")
            needed += holders
        return [other for other in needed if other is not item]


def _check_best(name: str, policy: KeepPolicy, items: PruneItems) -> None:
    """Refuse to keep the best steps if no step records a metric, which would delete all."""
    if policy.best and all(item.metric is None for item in items):
        raise ConfigError(f"{name}: no step here records a metric, so none is the best; keep steps otherwise")


def _report(name: str, decision: Decision, start: float, *, dry_run: bool) -> PruneReport:
    """Describe what a decision keeps and deletes; `start` is when the prune began, by `time.perf_counter`."""
    kept, needed, removed, notes = decision
    with_step = [(item, item.step) for item in kept if item.step is not None and not item.is_unfinished]
    exact = {step for item, step in with_step if item.is_residual}
    states, weights = (
        {step for item, step in with_step if item.kind in (kind, None) and not item.is_residual}
        for kind in ("state", "weights")
    )
    kept_sizes = {file: n for item in (*kept, *needed) for file, n in item.sizes.items()}
    removed_sizes = {file: n for item in removed for file, n in item.sizes.items() if file not in kept_sizes}
    return PruneReport(
        folder=name,
        steps=tuple(sorted(weights & states)),
        weights_only=tuple(sorted(weights - states)),
        exact=tuple(sorted(exact & weights & states)),
        hidden=tuple(item.name for item in needed),
        removed=tuple(item.name for item in removed),
        kept_bytes=sum(kept_sizes.values()),
        removed_bytes=sum(removed_sizes.values()),
        dry_run=dry_run,
        seconds=time.perf_counter() - start,
        notes=notes,
    )


# --- the folder of a Checkpointer ---------------------------------------------------------------


def prune(
    store: StepStore, policy: KeepPolicy, *, last_step: int | None = None, dry_run: bool = False
) -> PruneReport:
    """Delete and hide the files of a Checkpointer that a policy does not keep.

    Args:
        store: the folder, locked by the caller except for a dry run.
        policy: the keep rules.
        last_step: delete all steps after this one.
        dry_run: only report what would be deleted.

    Raises:
        ConfigError: no readable step would be left before those after `last_step`.
        OSError: the folder cannot be listed, or a file cannot be deleted; older files are unchanged.
    """
    start, listing = time.perf_counter(), store.listing()
    files = {file.name: file for file in listing.sizes}
    items = _items_of(store, listing, last_step)
    if last_step is None:
        # A file that a user has stored against a step has no step itself, so it is kept with its bases.
        for name, facts in store.other_facts().items():
            if isinstance(facts, Exception):
                items.append(PruneItem(name=name, step=None, error=facts))
            elif facts.base is not None:
                items.append(PruneItem(name=name, step=None, is_linked=True, bases=(facts.base,)))
    decision = _, needed, removed, _ = decide(store.name, items, policy, last_step)
    if not dry_run:
        store.check_lock()
        for item in removed:
            store.remove(files[item.name])
        for item in [one for one in reversed(needed) if not one.is_auxiliary]:
            store.hide(files[item.name])
    return _report(store.name, decision, start, dry_run=dry_run)


def _items_of(store: StepStore, listing: Listing, last_step: int | None) -> list[PruneItem]:
    """Describe each file by its facts or the error of reading them; files of later steps are not read."""
    results = store.read_facts(
        {f: n for f, n in listing.sizes.items() if last_step is None or f.step <= last_step}
    )
    return [
        item_of(file, n_bytes, results.get(file), is_hidden=file in listing.hidden)
        for file, n_bytes in sorted(listing.sizes.items())
    ]


def item_of(
    file: StepFile, n_bytes: int, result: FileFacts | Exception | None, *, is_hidden: bool
) -> PruneItem:
    """Describe a file of a step by its facts, or by the error of reading them."""
    facts = result if isinstance(result, FileFacts) else None
    return PruneItem(
        name=file.name,
        step=file.step,
        kind=file.kind,
        is_residual=file.is_residual,
        is_auxiliary=is_hidden,
        sizes={file.name: n_bytes},
        # A residual is never a base, but other files may have the same values.
        ids=frozenset() if facts is None or file.is_residual else frozenset({facts.content_id}),
        bases=() if facts is None or facts.base is None else (facts.base,),
        metric=None if facts is None else facts.metric,
        error=result if isinstance(result, Exception) else None,
    )


def prune_folder(
    folder_or_url: Path_, policy: KeepPolicy, *, last_step: int | None = None, dry_run: bool = False
) -> PruneReport:
    """Apply a policy to the folder of a Checkpointer that no process writes to; see `prune`.

    Raises:
        ConfigError: the folder has no steps, or none with a metric for `best`, or is locked.
    """
    with contextlib.closing(StepStore(folder_or_url)) as store:
        listing = store.listing()
        if not listing.sizes:
            raise ConfigError(f"{store.name}: holds no steps of a Checkpointer; name the run's own folder")
        if not dry_run:
            store.lock()
        _check_best(store.name, policy, _items_of(store, listing, None))
        return prune(store, policy, last_step=last_step, dry_run=dry_run)


# --- runs of frameworks, and of `compress` ------------------------------------------------------


def prune_run(folder: Path, policy: KeepPolicy, *, last_step: int | None, dry_run: bool) -> PruneReport:
    """Apply a policy to a run of the Trainer, Lightning or accelerate, or to files of `ckptz compress`.

    Raises:
        ConfigError: the folder has no steps, or none with a metric for `best`, or none would be left; or the
            policy has rules for weights and no step has its optimizer state in a separate file.
    """
    start = time.perf_counter()
    items = _items_in(folder, is_split=policy.weights is not None)
    if policy.weights is not None and not any(item.kind == "state" for item in items):
        raise ConfigError(f"{folder}: its files are whole checkpoints; leave out the rules for weights alone")
    if not any(item.step is not None and not item.is_residual and not item.is_auxiliary for item in items):
        raise ConfigError(f"{folder}: holds no steps; name the run's own folder")
    _check_best(
        str(folder), policy, [item for item in items if last_step is None or (item.step or 0) <= last_step]
    )
    decision = decide(str(folder), items, policy, last_step)
    if not dry_run:
        finish_removals(folder)
        _remove(folder, decision[2])
    return _report(str(folder), decision, start, dry_run=dry_run)


def prune_saved(folder: Path, policy: KeepPolicy, always_kept: Collection[str] = ()) -> tuple[str, ...]:
    """Apply a policy to a framework's run whose newest step is complete.

    Args:
        folder: folder of the run.
        policy: the keep rules.
        always_kept: names of files and of folders of steps that are kept whatever the rules say; of a folder,
            its weights.

    Returns:
        Notes on unreadable files.

    Raises:
        ConfigError: a folder's name and its files name different steps.
        OSError: a file cannot be deleted.
    """
    finish_removals(folder)
    items = _items_in(folder, is_split=policy.weights is not None)
    _, _, removed, notes = decide(str(folder), items, policy, always_kept=always_kept)
    _remove(folder, removed)
    return notes


def _remove(folder: Path, removed: PruneItems) -> None:
    for item in removed:
        path = folder / item.name
        remove_step(path)
        if path.parent != folder:  # the state of a step whose weights stay
            drop_unneeded(path.parent)


def _items_in(folder: Path, *, is_split: bool) -> list[PruneItem]:
    """Describe the checkpoints of a folder; `is_split` describes weights and state of a step separately."""
    files: dict[Path, list[Path]] = {}
    for path in run_files(folder, with_links=True):
        files.setdefault(path if path.parent == folder else path.parent, []).append(path)
    items = [_item_at(path, inside) for path, inside in files.items()]
    steps = {path.name: path for path, inside in files.items() if path != inside[0]}
    unfinished = _unfinished(steps)
    # An unfinished folder is not a step, and its bases are unknown.
    items = [
        replace(item, is_unfinished=True, error=CorruptionError(unfinished[item.name]))
        if item.name in unfinished
        else item
        for item in items
    ]
    has_state = {
        name: any(is_of_state(path.name) for path in folder.iterdir()) for name, folder in steps.items()
    }
    if is_split:
        items = [part for item in items for part in _parts_of(item, folder / item.name)]
    elif any(has_state.values()):  # a folder without state is not a step to resume from if others have one
        items = [item if has_state.get(item.name, True) else replace(item, kind="weights") for item in items]
    left = [path for where in (folder, *steps.values()) for path in abandoned(where)]
    names = {path: path.relative_to(folder).as_posix() for path in left}
    return items + [
        PruneItem(name=names[path], step=None, is_auxiliary=True, sizes=_sizes([path])) for path in left
    ]


def _parts_of(item: PruneItem, path: Path) -> list[PruneItem]:
    """Split the folder of a step into its weights and the files that only a resume needs."""
    if item.error is not None or not path.is_dir():
        return [item]
    states = [file for file in sorted(path.iterdir()) if is_of_state(file.name)]
    sizes, paths = _sizes(states), frozenset(file.resolve() for file in states)
    return [
        replace(
            item,
            kind="weights",
            sizes={file: n for file, n in item.sizes.items() if file not in sizes},
            paths=item.paths - paths,
        ),
        *(
            PruneItem(
                name=f"{item.name}/{file.name}",
                step=item.step,
                kind="state",
                is_linked=True,
                sizes=_sizes([file]),
            )
            for file in states
        ),
    ]


def _sizes(files: Sequence[Path]) -> dict[Inode, int]:
    return {inode_of(file): file.stat().st_size for file in files}


def _unfinished(steps: Mapping[str, Path]) -> dict[str, str]:
    """Return the folders of steps that were not written to their end, with the reason.

    A folder is whole if it has the file that its writer writes last. In runs without such files, which older
    versions and `compress` write, a folder is whole if it has all that the whole folders before it have.

    Args:
        steps: folders by name.
    """
    own = {name: _own_names(path) for name, path in steps.items()}
    has_last = {name: any(is_written(path / last) for last in LAST_FILES) for name, path in steps.items()}
    reasons, common = {}, None
    for name in sorted(steps, key=lambda name: step_of_folder(steps[name]) or 0):
        if not own[name]:
            reasons[name] = "holds no checkpoint of its own, only bases"
        elif any(has_last.values()):
            if not has_last[name]:
                reasons[name] = f"has none of {', '.join(LAST_FILES)}, as of a save that was cut off"
        elif common is not None and (lacking := common - own[name]):
            reasons[name] = f"has no {min(lacking)}, which every step before it has"
        else:
            common = own[name] if common is None else common & own[name]
    return reasons


def why_unfinished(folder: Path) -> str | None:
    """Return why the folder of a step is unfinished, compared with the other steps of its run, or None."""
    folder = folder.absolute()
    if step_of_folder(folder) is None:
        return None
    try:
        steps = [path for path in folder.parent.iterdir() if step_of_folder(path) is not None]
        reasons = _unfinished({path.name: path for path in steps if any(path.glob(f"*{SUFFIX}"))})
        return reasons.get(folder.name)
    except OSError:  # a folder beside it that this user may not read
        return None


def _own_names(folder: Path) -> set[str]:
    """Return the names of a step's own files: no bases of other steps, residuals or temporary files."""
    files = [path for path in folder.iterdir() if not path.name.startswith(".")]
    names = {path.name for path in files if not (is_base_name(path) or is_residual_name(path.name))}
    return names if any(Path(name).suffix == SUFFIX for name in names) else set()


def _check_steps_agree(path: Path, recorded: Mapping[str, int]) -> None:
    """Refuse to prune a run in which a folder's name and its files have different steps.

    Args:
        path: the folder.
        recorded: the step that each of its files records, by file name.

    Raises:
        ConfigError: names the folder and two of the steps.
    """
    named = step_of_folder(path)
    steps = {"its name": named} if named is not None else {}
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        steps[TRAINER_STATE] = int(json.loads((path / TRAINER_STATE).read_bytes())["global_step"])
    steps |= recorded
    if len(set(steps.values())) > 1:
        sources = ", ".join(f"{where} says {step}" for where, step in steps.items())
        raise ConfigError(
            f"{path}: its step is not certain, as {sources}; nothing was removed: rename the folder after "
            "its step, or move it away"
        )


def _item_at(path: Path, files: Sequence[Path]) -> PruneItem:
    """Describe a file, or a folder by its files; links to bases in it belong to other steps.

    Raises:
        ConfigError: the folder's name and its files have different steps.
    """
    is_folder = path != files[0]
    item = PruneItem(
        name=path.name,
        step=step_of_folder(path) if is_folder else step_of(path),
        is_linked=True,
        is_residual=is_residual_name(path.name),
        is_auxiliary=is_base_name(path),
        sizes=_sizes(files),
        paths=frozenset(file.resolve() for file in files),
    )
    try:
        facts = [(file, fact) for file in files if (fact := FileFacts.read(open_bytes(file))) is not None]
    except (CkptzError, OSError) as error:
        return replace(item, error=error)
    ids = frozenset(fact.content_id for _, fact in facts)
    own = [(file, fact) for file, fact in facts if not (is_folder and is_base_name(file))]
    steps = {file.name: step_of(file, fact.step, fact.metadata) for file, fact in own}
    if is_folder:
        _check_steps_agree(path, {name: step for name, step in steps.items() if step is not None})
    is_split = any(STATE_KEY in fact.metadata for _, fact in own)
    return replace(
        item,
        kind="state" if is_of_state(path.name) else "weights" if is_split else None,
        step=next((step for step in steps.values() if step is not None), item.step),
        ids=ids,
        bases=tuple(
            f.base
            for file, f in own
            # A file with the values of its base does not replace that base.
            if f.base is not None
            and all(other == file or fact.content_id != f.base.content_id for other, fact in facts)
        ),
        metric=next((fact.metric for _, fact in own if fact.metric is not None), None),
    )
