"""`ckptz prune`: removes the checkpoints of a folder that no rule keeps, whoever wrote them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

from ckptz.errors import CkptzError, ConfigError, CorruptionError, MissingBaseError, whole
from ckptz.format.byte_source import open_bytes
from ckptz.format.publish import abandoned
from ckptz.kernels.clock import working_seconds
from ckptz.run.keep import KEEP_ALL, KeepPolicy, what_stays
from ckptz.run.names import EXACT, inode_of, is_base_name, run_files, step_of
from ckptz.run.prune import PruneReport, check_best, prune_folder
from ckptz.run.step_files import FileFacts, StepFile
from ckptz.store.resolve import Path_
from ckptz.store.storage import LocalFolder, place_of

# Files that are written into a step's folder last: without them it was not written to its end.
LAST_FILES: Final = ("ckptz-index.json", "trainer_state.json")


def prune(
    folder: Path_, keep: KeepPolicy = KEEP_ALL, *, after: int | None = None, dry_run: bool = False
) -> PruneReport:
    """Remove the steps of a run that no rule keeps, and unfinished files; bases of those that stay are left.

    Args:
        folder: a run of a `Checkpointer`, also behind an fsspec URL, of the Trainer or Lightning, or what
            `compress` made of several files. Nobody writes to it meanwhile.
        keep: the rules. Those for weights alone are for runs of a `Checkpointer`.
        after: remove every step after this one first, to go on from there.
        dry_run: only say what would be done.

    Raises:
        FileNotFoundError: no such folder.
        ConfigError: there are no steps, none would be left, the best are asked for and no step records a
            metric, or somebody writes to the folder.

    Example:
        >>> import numpy as np, ckptz
        >>> from ckptz.numpy import save_file
        >>> for step in (1, 2, 3):
        ...     save_file({"weight": np.ones(2)}, f"step-{step}.ckptz")
        >>> ckptz.prune(".", ckptz.KeepPolicy(last=2)).removed
        ('step-1.ckptz',)
    """
    if not isinstance(keep, KeepPolicy):
        raise ConfigError(f"keep must be a ckptz.KeepPolicy, got {keep!r}")
    after = None if after is None else whole("after", after)
    place = place_of(str(folder))
    local = Path(place.name) if isinstance(place, LocalFolder) else None
    if local is not None and not local.is_dir():
        local.stat()  # says so where nothing is there
        raise ConfigError(f"{folder}: is a file; prune takes the folder of a run")
    if local is None or any(StepFile.parse(path.name) for path in local.iterdir()):
        return prune_folder(str(folder), keep, after=after, dry_run=dry_run)
    return _prune_run(local, keep, after, dry_run)


@dataclass(frozen=True, eq=False)
class _Unit:
    """A file, or a folder that is called after a step: it stays or goes as a whole."""

    name: str  # within the run
    path: Path  # where it is
    files: tuple[Path, ...]  # the checkpoint files in it
    step: int | None  # its step, or None
    ids: frozenset[str] = frozenset()  # content ids of what it holds
    base_ids: frozenset[str] = frozenset()  # those of what it is stored against and does not hold itself
    metric: float | None = None  # as it was recorded, or None
    error: Exception | None = None  # why it cannot be read, or None

    @cached_property
    def places(self) -> frozenset[Path]:
        """Where its files are, whatever links lead there."""
        return frozenset(file.resolve() for file in self.files)

    @property
    def is_checkpoint(self) -> bool:
        """Whether it is there for itself: no second name of a base, nor what makes another file exact."""
        return not (is_base_name(self.path) or self.is_residual)

    @property
    def is_residual(self) -> bool:
        """Whether it makes another file exact."""
        return EXACT in self.path.name

    def remove(self) -> None:
        """Delete it; of a link to it, the link."""
        if self.path.is_dir() and not self.path.is_symlink():
            shutil.rmtree(self.path)
        else:
            self.path.unlink(missing_ok=True)


def _units_of(folder: Path) -> list[_Unit]:
    """The checkpoints of a folder, and what is there for their sake."""
    files: dict[Path, list[Path]] = {}
    for path in run_files(folder, with_links=True):
        files.setdefault(path if path.parent == folder else path.parent, []).append(path)
    units = [_unit(path.name, path, tuple(found)) for path, found in files.items()]
    steps = [unit for unit in units if unit.path != unit.files[0]]
    for name in LAST_FILES:
        ends = {unit.path: (unit.path / name).exists() for unit in steps}
        if any(ends.values()):  # as other steps of the run have it
            error = CorruptionError(f"has no {name}, as of a save that was cut off")
            units = [unit if ends.get(unit.path, True) else replace(unit, error=error) for unit in units]
    return units


def _unit(name: str, path: Path, files: tuple[Path, ...]) -> _Unit:
    step, metric, ids, base_ids = None, None, set(), set()
    try:
        for file in files:
            if (facts := FileFacts.read(open_bytes(file))) is not None:
                ids.add(facts.content_id)
                base_ids |= set() if facts.base is None else {facts.base.content_id}
                step = step_of(file, facts.step, facts.metadata) if step is None else step
                metric = facts.metric if metric is None else metric
    except (CkptzError, OSError) as error:
        return _Unit(name, path, files, step_of(files[0]), error=error)
    return _Unit(name, path, files, step, frozenset(ids), frozenset(base_ids - ids), metric)


def _bases_of(unit: _Unit, units: Sequence[_Unit]) -> list[_Unit]:
    """List the bases of a unit, by second names where there are some, and what it is a link to.

    Raises if that cannot be told.
    """
    if unit.error is not None:
        raise unit.error
    found = [other for other in units if other is not unit and not unit.places.isdisjoint(other.places)]
    for base_id in unit.base_ids:
        bases = [other for other in units if base_id in other.ids and other is not unit]
        if not bases and any(other.error for other in units):
            raise MissingBaseError("its base is not here, or cannot be read")
        found += [base for base in bases if is_base_name(base.path)] or bases
    return found


def _prune_run(folder: Path, keep: KeepPolicy, after: int | None, dry_run: bool) -> PruneReport:
    start, units = working_seconds(), _units_of(folder)
    if keep.weights is not None:
        raise ConfigError(f"{folder}: its files are whole checkpoints; leave out the rules for weights alone")
    steps = {u.step for u in units if u.step is not None and u.is_checkpoint}
    if not steps:
        raise ConfigError(f"{folder}: holds no steps; name the run's own folder")
    kept = _kept(folder, units, keep, steps, after)
    gone = {u for u in units if after is not None and u.step is not None and u.step > after}
    rest = [u for u in units if u not in gone]
    roots = {*kept, *(u for u in rest if u.error)}
    stays = what_stays(units, roots, lambda unit: _bases_of(unit, units), lambda _: rest)
    hidden = {*units} - kept - stays.may_go
    removed = sorted(stays.may_go, key=lambda u: (not u.is_residual, -(u.step or 0), is_base_name(u.path)))
    folders = {folder, *(u.path for u in units if u.path.is_dir() and u not in removed)}
    left = [path for where in sorted(folders) for path in abandoned(where)]
    staying = {inode_of(file): file for u in units if u not in removed for file in u.files}
    going = {inode_of(file): file for file in (*left, *(file for u in removed for file in u.files))}
    sizes = [
        sum(file.stat().st_size for file in files)
        for files in (staying.values(), (file for inode, file in going.items() if inode not in staying))
    ]
    if not dry_run:
        for unit in removed:
            unit.remove()
        for path in left:
            path.unlink(missing_ok=True)
    return PruneReport(
        folder=str(folder),
        steps=tuple(sorted({u.step for u in kept if u.step is not None and u.is_checkpoint})),
        weights_only=(),
        exact=tuple(sorted({u.step for u in kept if u.step is not None and u.is_residual})),
        hidden=tuple(sorted(u.name for u in hidden)),
        removed=(*(u.name for u in removed), *(path.relative_to(folder).as_posix() for path in left)),
        kept_bytes=sizes[0],
        removed_bytes=sizes[1],
        dry_run=dry_run,
        seconds=working_seconds() - start,
        notes=stays.notes,
    )


def _kept(
    folder: Path, units: Sequence[_Unit], keep: KeepPolicy, steps: AbstractSet[int], after: int | None
) -> set[_Unit]:
    """List the units that the rules keep, and those that have no step."""
    left = {step for step in steps if after is None or step <= after}
    if not left:
        raise ConfigError(f"{folder}: no step would be left to go on from; name one that is there")
    metrics = {u.step: u.metric for u in units if u.step in left and u.metric is not None}
    check_best(str(folder), keep, metrics)
    chosen = keep.kept(left, metrics)
    heads = keep.heads(chosen)
    return {
        u
        for u in units
        if not is_base_name(u.path) and (u.step is None or u.step in (heads if u.is_residual else chosen))
    }
