"""`ckptz log` and `ckptz inspect`: what folders and files say of themselves, from headers and indexes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ckptz.api.describe import InspectReport, described
from ckptz.errors import CkptzError, ConfigError
from ckptz.foreign.inputs import PathLike, check_not_torch, to_paths
from ckptz.format.byte_source import is_folder, naming_urls, open_bytes, path_of
from ckptz.format.envelope import PlainFile
from ckptz.format.index import BaseRef, QualityRecord
from ckptz.format.reader import Container
from ckptz.format.sources import tensor_bytes
from ckptz.run.names import holds_state, is_base_name, resolve, run_files, step_of
from ckptz.run.step_files import EXACT_OF_KEY, FileFacts, StepFile
from ckptz.run.versions import Version, versions_in
from ckptz.state.roles import role_of
from ckptz.store.resolve import (
    PLAIN_SUFFIX,
    SUFFIX,
    check_reference,
    fits,
    folders_beside,
    missing_base,
    open_checkpoint,
    open_file,
)
from ckptz.words import Report


@naming_urls
def inspect(path: PathLike, *, search_path: Sequence[PathLike] = ()) -> InspectReport:
    """Describe a `.ckptz` file; no tensor is decoded, and bases may be missing.

    Args:
        path: the file, a folder for its newest checkpoint, or "DIR@STEP" for that of a step.
        search_path: folders to look for bases in, after the file's own.

    Raises:
        FileNotFoundError: no such file or step.
        FormatError: damaged.
        ConfigError: a file of another kind, or a folder without a `.ckptz` file.
    """
    path, checkpoint, broken = check_not_torch(resolve(path).newest_file()), None, None
    with contextlib.ExitStack() as held:
        try:
            checkpoint = held.enter_context(contextlib.closing(open_checkpoint(path, to_paths(search_path))))
            file = checkpoint.files[0]
        except CkptzError as error:  # its base is missing; a file that is damaged itself says so again
            file = held.enter_context(contextlib.closing(open_file(open_bytes(path))))
            broken = str(error)
        if not isinstance(file, Container):
            raise ConfigError(f"{path}: a plain safetensors file; inspect describes .ckptz files")
        return described(file, checkpoint, broken)


EntryKind = Literal["full", "delta", "exact", "rebased", "plain", "missing", "broken"]
Holds = Literal["weights", "state", "weights and state"]
Tell = Callable[[Exception], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One checkpoint of a folder, or a base of one."""

    file: str  # its name, with its folder where that is another one
    # a full file, a delta, what makes a lossy file exact, or a file that carries its bases within; a plain
    # safetensors file that deltas are stored against; a base that is not here; a file that cannot be read
    kind: EntryKind
    parent: str | None = None  # `file` of the entry that it is stored against, or None
    holds: Holds = "weights"  # what is in it, by its name or else by the names of its tensors
    level: int = 0  # how far it stands from the root of its tree
    step: int | None = None  # training step, if it is recorded or in a name
    content_id: str | None = None  # identity of the values, where it is known without reading them
    depth: int = 0  # deltas between it and its full file
    n_tensors: int = 0  # tensors in it
    n_lossy: int = 0  # those whose values are not those of the original
    tensor_bytes: int = 0  # decoded size
    stored_bytes: int = 0  # size of the file
    ratio: float | None = None  # decoded by stored size
    quality: tuple[QualityRecord, ...] = ()  # what was promised and measured when it was written
    metric: float | None = None  # of its step, as given to the `save` of a Checkpointer
    note: str | None = None  # what is wrong or uncertain, or None
    # whether only other files need it: no keep rule holds its step, or the whole step stands beside it
    is_hidden: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReport(Report):
    """All checkpoints of a folder, and their bases."""

    folder: str
    # every checkpoint behind the one it is stored against, by step and then by name
    entries: tuple[LogEntry, ...]
    n_files: int  # `.ckptz` files of the folder that can be read
    # what the steps decode to in all, each counted once: not what hidden files hold, nor what makes a lossy
    # file exact
    tensor_bytes: int
    stored_bytes: int  # size of all of these files
    ratio: float | None  # one by the other; None if there are none
    n_broken: int  # files that cannot be read
    n_missing: int  # bases that are not here


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoggedFile:
    """A file that was looked at: what is shown of it, and what its base must be."""

    path: Path
    entry: LogEntry
    ref: BaseRef | None = None


@naming_urls
def log(
    folder: PathLike = ".", *, search_path: Sequence[PathLike] = (), tell: Tell | None = None
) -> LogReport:
    """Describe the checkpoints of a folder; broken files and missing bases are told of and shown as such.

    Args:
        folder: where to look, and in its folders that are called after a step, as those of the Trainer.
        search_path: more folders that bases may be in.
        tell: is given the error of every file that cannot be read and of every base that is not found.

    Raises:
        FileNotFoundError: no such folder.
        ConfigError: it is a file.
    """
    folder, tell = path_of(folder), tell or (lambda error: None)
    if not is_folder(folder):
        folder.stat()  # says so where nothing is there
        raise ConfigError(f"{folder}: is a file; log describes a folder, inspect a file")
    files = run_files(folder)
    own = [_marked(_look(path, path.relative_to(folder).as_posix(), tell)) for path in files]
    elsewhere = _elsewhere(folder, files, to_paths(search_path))
    others = [_look(path, str(path)) for where in elsewhere for path in _files(where, SUFFIX)]
    plain = [path for where in (folder, *elsewhere) for path in _files(where, PLAIN_SUFFIX)]
    named = [_look(path, path.name if path.parent == folder else str(path)) for path in plain]
    others += [logged for logged in named if logged.entry.content_id is not None]  # .ckptz by another name
    return _report(folder, own, _BaseTree(folder, [*own, *others], plain, tell).of(own))


def _elsewhere(folder: Path, files: Iterable[Path], search_path: Iterable[Path]) -> list[Path]:
    """List the other folders that bases may be in: those named, and those of the targets of links."""
    todo = [*search_path, *(where for file in files for where in folders_beside(file)[1:])]
    seen, folders = {folder.resolve()}, list[Path]()
    while todo:
        where = todo.pop(0)
        if where.resolve() not in seen:
            seen.add(where.resolve())
            folders.append(where)
            links = [*_files(where, SUFFIX), *_files(where, PLAIN_SUFFIX)]
            todo += [target for link in links for target in folders_beside(link)[1:]]
    return folders


def _files(folder: Path, suffix: str) -> list[Path]:
    return [path for path in sorted(folder.glob(f"*{suffix}")) if path.is_file()]


def _report(folder: Path, own: Iterable[_LoggedFile], entries: tuple[LogEntry, ...]) -> LogReport:
    whole = [logged.entry for logged in own if logged.entry.kind != "broken"]
    n_bytes = sum(e.tensor_bytes for e in whole if e.kind != "exact" and not e.is_hidden)
    stored = sum(e.stored_bytes for e in whole)
    return LogReport(
        folder=str(folder),
        entries=entries,
        n_files=len(whole),
        tensor_bytes=n_bytes,
        stored_bytes=stored,
        ratio=n_bytes / stored if stored else None,
        n_broken=sum(entry.kind == "broken" for entry in entries),
        n_missing=sum(entry.kind == "missing" for entry in entries),
    )


# --- one file -----------------------------------------------------------------------------------


def _look(path: Path, name: str, tell: Tell = lambda error: None) -> _LoggedFile:
    try:
        with contextlib.closing(open_file(open_bytes(path))) as file:
            return _describe(path, name, file)
    except (CkptzError, OSError) as error:
        tell(error)
        note = str(error).removeprefix(f"{path}: ")
        return _LoggedFile(path=path, entry=LogEntry(file=name, kind="broken", note=note))


def _marked(logged: _LoggedFile) -> _LoggedFile:
    """Mark a file that only others need: by a marker, by its name, or as its whole step is beside it."""
    path, file = logged.path, StepFile.parse(logged.path.name)
    is_hidden = is_base_name(path) or (file is not None and (path.parent / file.marker).exists())
    for version in versions_in({path.name: 0}):  # a delta for followers of a step that is published whole
        is_hidden |= version.base is not None and (path.parent / Version(version.step, None).name).exists()
    return replace(logged, entry=replace(logged.entry, is_hidden=is_hidden))


def _describe(path: Path, name: str, file: Container | PlainFile) -> _LoggedFile:
    n_bytes, stored = tensor_bytes(file.tensors), file.stored_bytes
    sizes = LogEntry(
        file=name,
        kind="plain",
        n_tensors=len(file.tensors),
        tensor_bytes=n_bytes,
        stored_bytes=stored,
        ratio=n_bytes / stored,
    )
    if isinstance(file, PlainFile):
        return _LoggedFile(path=path, entry=sizes)
    index = file.index
    if index.base is not None:
        check_reference(file, index.base)
    facts = FileFacts.of(file)
    is_residual = EXACT_OF_KEY in facts.metadata
    alone: EntryKind = "rebased" if index.inline else "exact" if is_residual else "full"
    delta: EntryKind = "exact" if is_residual else "delta"
    metric = facts.metric
    entry = replace(
        sizes,
        kind=delta if index.base else alone,
        holds=_holds(path, file),
        step=step_of(path, facts.step, facts.metadata),
        content_id=index.content_id,
        depth=index.depth,
        n_lossy=sum(tensor.lossy is not None for tensor in index.tensors),
        quality=index.quality,
        metric=metric if metric is not None and math.isfinite(metric) else None,
    )
    return _LoggedFile(path=path, entry=entry, ref=index.base)


def _holds(path: Path, file: Container) -> Holds:
    if holds_state(path):
        return "state"
    tensors = file.tensors.items()
    roles = {role_of(name, tensor.shape, tensor.dtype.is_float).role for name, tensor in tensors}
    return "weights and state" if roles - {"weight", "other"} else "weights"


def _may_be_base(plain: Path, delta: Container) -> bool:
    """Return whether a plain file has the names, dtypes and shapes that the delta needs."""
    with contextlib.suppress(CkptzError, OSError), contextlib.closing(open_file(open_bytes(plain))) as file:
        return isinstance(file, PlainFile) and fits(file, delta)
    return False


# --- the tree -----------------------------------------------------------------------------------


class _BaseTree:
    """Orders checkpoints so that each comes after its base.

    Depths fall from a delta to its base, so that there are no circles.
    """

    def __init__(
        self, folder: Path, logged: Sequence[_LoggedFile], plain: Sequence[Path], tell: Tell
    ) -> None:
        self._folder, self._logged, self._plain, self._tell = folder, logged, plain, tell
        self._shown: dict[str, LogEntry] = {}
        self._children: dict[str | None, list[str]] = {}

    def of(self, wanted: Iterable[_LoggedFile]) -> tuple[LogEntry, ...]:
        """Return the wanted checkpoints and their bases, each after its own base."""
        for logged in wanted:
            self._show(logged)
        entries: list[LogEntry] = []
        waiting = [(name, 0) for name in self._sorted(None)]
        while waiting:
            name, level = waiting.pop()
            entries.append(replace(self._shown[name], level=level))
            waiting += [(child, level + 1) for child in self._sorted(name)]
        return tuple(entries)

    def _sorted(self, parent: str | None) -> list[str]:
        """Sort the entries of one parent by step and name, the last to be shown first."""

        def order(name: str) -> tuple[bool, int, str]:
            step = self._shown[name].step
            return step is None, step or 0, name

        return sorted(self._children.get(parent, ()), key=order, reverse=True)

    def _add(self, entry: LogEntry) -> str:
        self._shown[entry.file] = entry
        self._children.setdefault(entry.parent, []).append(entry.file)
        return entry.file

    def _show(self, logged: _LoggedFile) -> str:
        """Add a checkpoint and those that it is stored against; give its name."""
        name = logged.entry.file
        if name in self._shown:
            return name
        parent = None if logged.ref is None else self._base(logged, logged.ref)
        return self._add(replace(logged.entry, parent=parent))

    def _base(self, delta: _LoggedFile, ref: BaseRef) -> str:
        """Add what a delta is stored against, looked for as reading does; give its name."""
        usable = [
            logged
            for logged in self._logged
            if logged.entry.content_id == ref.content_id and logged.entry.depth < ref.depth
        ]
        if usable:
            return self._show(min(usable, key=lambda logged: logged.path.name != ref.file))
        with contextlib.closing(open_file(open_bytes(delta.path))) as file:
            assert isinstance(file, Container)
            fitting = [path for path in self._plain if _may_be_base(path, file)]
        named = [path for path in fitting if path.name == ref.file]
        return self._add_plain(named[0]) if named else self._add_unnamed(delta, ref, len(fitting))

    def _add_plain(self, path: Path) -> str:
        name = path.name if path.parent == self._folder else str(path)
        if name in self._shown:
            return name
        entry = _look(path, name, self._tell).entry
        return self._add(replace(entry, note="has this name; values are not read here"))

    def _add_unnamed(self, delta: _LoggedFile, ref: BaseRef, n_fitting: int) -> str:
        """Add a base of which no file is known, though `n_fitting` plain ones may be it."""
        name = f"{ref.file} ({ref.content_id[:16]})"
        if name in self._shown:
            return name
        if n_fitting:
            note = f"no file has this name; {n_fitting} plain files fit, and their values are not read here"
            return self._add(LogEntry(file=name, kind="plain", content_id=ref.content_id, note=note))
        self._tell(missing_base(str(delta.path), ref))
        return self._add(LogEntry(file=name, kind="missing", content_id=ref.content_id, note="is not here"))
