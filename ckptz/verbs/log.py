"""`ckptz log` and `ckptz inspect`: describe folders and files from their headers and indexes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ckptz.api.describe import InspectReport, described
from ckptz.errors import CkptzError, ConfigError
from ckptz.foreign.inputs import check_not_torch
from ckptz.format.byte_source import is_folder, naming_urls, path_of
from ckptz.format.envelope import PlainFile
from ckptz.format.index import BaseRef, QualityRecord
from ckptz.format.reader import Container
from ckptz.format.sources import tensor_bytes
from ckptz.format.suffixes import PLAIN_SUFFIX, SUFFIX
from ckptz.run.names import holds_state, is_base_name, resolve, run_files, step_of
from ckptz.run.step_files import EXACT_OF_KEY, FileFacts, StepFile
from ckptz.run.versions import Version, versions_in
from ckptz.state.roles import role_of
from ckptz.store.resolve import (
    check_reference,
    fits,
    folders_beside,
    missing_base,
    open_checkpoint,
    open_file,
)
from ckptz.verbs.paths import PathLike, to_paths
from ckptz.words import Report


@naming_urls
def inspect(path: PathLike, *, search_path: Sequence[PathLike] = ()) -> InspectReport:
    """Describe a `.ckptz` file without decoding tensors; bases may be missing.

    Args:
        path: the file, a folder for its newest checkpoint, or "DIR@STEP" for the checkpoint of a step.
        search_path: more folders to search for bases, after the folder of the file.

    Returns:
        Sizes, chain, quality and the storage of each tensor.

    Raises:
        FileNotFoundError: no such file or step.
        FormatError: the file is damaged.
        ConfigError: not a `.ckptz` file, or a folder without one.
    """
    path, checkpoint, broken = check_not_torch(resolve(path).newest_file()), None, None
    with contextlib.ExitStack() as stack:
        try:
            checkpoint = stack.enter_context(contextlib.closing(open_checkpoint(path, to_paths(search_path))))
            file = checkpoint.files[0]
        except (
            CkptzError
        ) as error:  # a base is missing; if the file itself is damaged, open_file raises again
            file = stack.enter_context(contextlib.closing(open_file(path)))
            broken = str(error)
        if not isinstance(file, Container):
            raise ConfigError(f"{path}: a plain safetensors file; inspect describes .ckptz files")
        return described(file, checkpoint, broken)


EntryKind = Literal["full", "delta", "exact", "rebased", "plain", "missing", "broken"]
Holds = Literal["weights", "state", "weights and state"]
OnError = Callable[[Exception], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One checkpoint of a folder, or a base of one."""

    file: str  # name, with the folder if it is in another one
    # "exact": a residual file, which makes a lossy file exact; "rebased": a file with inline bases; "plain":
    # a safetensors file that is a base; "missing": a base that is not found; "broken": an unreadable file
    kind: EntryKind
    parent: str | None = None  # `file` of the entry of its base
    holds: Holds = "weights"  # contents, according to the file name or the tensor names
    level: int = 0  # distance from the root of its tree
    step: int | None = None  # training step, if recorded or in a name
    content_id: str | None = None  # identity of the values, if known without decoding them
    depth: int = 0  # chain length: deltas between it and its full file
    n_tensors: int = 0
    n_lossy: int = 0  # lossy tensors
    tensor_bytes: int = 0  # decoded size
    stored_bytes: int = 0  # size of the file
    ratio: float | None = None  # decoded size / stored size
    quality: tuple[QualityRecord, ...] = ()  # limits and measured values from when it was written
    metric: float | None = None  # metric of its step, as passed to `Checkpointer.save`
    note: str | None = None  # a problem or an uncertainty
    # True if the file is kept only as a base of others: no keep rule selects its step, or a full file of the
    # step exists too
    is_hidden: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReport(Report):
    """All checkpoints of a folder, and their bases."""

    folder: str
    entries: tuple[LogEntry, ...]  # each after its base, sorted by step and name
    n_files: int  # readable `.ckptz` files of the folder
    tensor_bytes: int  # decoded size of all steps, without hidden files and residual files
    stored_bytes: int  # size of all readable files
    ratio: float | None  # tensor_bytes / stored_bytes
    n_broken: int  # unreadable files
    n_missing: int  # missing bases


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoggedFile:
    """A file, its entry in the log, and the reference to its base."""

    path: Path
    entry: LogEntry
    ref: BaseRef | None = None


@naming_urls
def log(
    folder: PathLike = ".", *, search_path: Sequence[PathLike] = (), on_error: OnError | None = None
) -> LogReport:
    """Describe the checkpoints of a folder; unreadable files and missing bases are listed too.

    Args:
        folder: folder of a run; its subfolders named after a step, as the Trainer writes them, are included.
        search_path: more folders to search for bases.
        on_error: called with the error of every unreadable file and every missing base.

    Returns:
        The checkpoints as a tree of bases and deltas, and total sizes.

    Raises:
        FileNotFoundError: no such folder.
        ConfigError: `folder` is a file.
    """
    folder, report_error = path_of(folder), on_error or (lambda error: None)
    if not is_folder(folder):
        folder.stat()  # raises FileNotFoundError if nothing exists
        raise ConfigError(f"{folder}: is a file; name a folder, or use ckptz inspect")
    files = run_files(folder)
    logged = [_mark_hidden(_read(path, path.relative_to(folder).as_posix(), report_error)) for path in files]
    base_folders = _base_folders(folder, files, to_paths(search_path))
    bases = [_read(path, str(path)) for place in base_folders for path in _files(place, SUFFIX)]
    plain = [path for place in (folder, *base_folders) for path in _files(place, PLAIN_SUFFIX)]
    # A .ckptz file may be named *.safetensors.
    renamed = [_read(path, path.name if path.parent == folder else str(path)) for path in plain]
    bases += [file for file in renamed if file.entry.content_id is not None]
    tree = _BaseTree(folder, [*logged, *bases], plain, report_error)
    for file in logged:
        tree.show(file)
    entries = tree.entries()
    readable = [file.entry for file in logged if file.entry.kind != "broken"]
    n_bytes = sum(e.tensor_bytes for e in readable if e.kind != "exact" and not e.is_hidden)
    stored = sum(e.stored_bytes for e in readable)
    return LogReport(
        folder=str(folder),
        entries=entries,
        n_files=len(readable),
        tensor_bytes=n_bytes,
        stored_bytes=stored,
        ratio=n_bytes / stored if stored else None,
        n_broken=sum(entry.kind == "broken" for entry in entries),
        n_missing=sum(entry.kind == "missing" for entry in entries),
    )


def _base_folders(folder: Path, files: Iterable[Path], search_path: Iterable[Path]) -> list[Path]:
    """List the other folders to search for bases: the search path, and the folders of link targets."""
    queue = [*search_path, *(target for file in files for target in folders_beside(file)[1:])]
    seen, folders = {folder.resolve()}, list[Path]()
    while queue:
        candidate = queue.pop(0)
        if candidate.resolve() not in seen:
            seen.add(candidate.resolve())
            folders.append(candidate)
            links = [*_files(candidate, SUFFIX), *_files(candidate, PLAIN_SUFFIX)]
            queue += [target for link in links for target in folders_beside(link)[1:]]
    return folders


def _files(folder: Path, suffix: str) -> list[Path]:
    return [path for path in sorted(folder.glob(f"*{suffix}")) if path.is_file()]


# --- one file -----------------------------------------------------------------------------------


def _read(path: Path, name: str, on_error: OnError = lambda error: None) -> _LoggedFile:
    try:
        with contextlib.closing(open_file(path)) as file:
            return _describe(path, name, file)
    except (CkptzError, OSError) as error:
        on_error(error)
        note = str(error).removeprefix(f"{path}: ")
        return _LoggedFile(path=path, entry=LogEntry(file=name, kind="broken", note=note))


def _mark_hidden(logged: _LoggedFile) -> _LoggedFile:
    """Set `is_hidden`: for a marker file, for a base's name, or if a full file of the step exists."""
    path, file = logged.path, StepFile.parse(logged.path.name)
    is_hidden = is_base_name(path) or (file is not None and (path.parent / file.marker).exists())
    for version in versions_in({path.name: 0}):  # weight sync: the delta of a step that has a full file
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
    kind: EntryKind = "delta" if index.base else "full"
    if index.inline and not index.base:
        kind = "rebased"
    elif EXACT_OF_KEY in facts.metadata:
        kind = "exact"
    metric = facts.metric
    entry = replace(
        sizes,
        kind=kind,
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
    """Return whether a plain file has the names, dtypes and shapes of the delta's base."""
    with contextlib.suppress(CkptzError, OSError), contextlib.closing(open_file(plain)) as file:
        return isinstance(file, PlainFile) and fits(file, delta)
    return False


# --- the tree -----------------------------------------------------------------------------------


class _BaseTree:
    """Orders checkpoints so that each comes after its base.

    The chain length decreases from a delta to its base, which excludes cycles.
    """

    def __init__(
        self, folder: Path, logged: Sequence[_LoggedFile], plain: Sequence[Path], on_error: OnError
    ) -> None:
        self._folder, self._logged, self._plain, self._on_error = folder, logged, plain, on_error
        self._shown: dict[str, LogEntry] = {}

    def entries(self) -> tuple[LogEntry, ...]:
        """Return the entries that are shown, each after its base; siblings by step and name."""

        def order(entry: LogEntry) -> tuple[bool, int, str]:
            return entry.step is None, entry.step or 0, entry.file

        children: dict[str | None, list[LogEntry]] = {}
        for entry in sorted(self._shown.values(), key=order, reverse=True):
            children.setdefault(entry.parent, []).append(entry)
        entries: list[LogEntry] = []
        waiting = children.get(None, [])
        while waiting:
            entry = waiting.pop()
            entries.append(entry)
            below = children.get(entry.file, [])
            waiting += [replace(child, level=entry.level + 1) for child in below]
        return tuple(entries)

    def show(self, logged: _LoggedFile) -> str:
        """Add a checkpoint and its bases, and return its name."""
        name = logged.entry.file
        if name not in self._shown:
            parent = None if logged.ref is None else self._base(logged, logged.ref)
            self._shown[name] = replace(logged.entry, parent=parent)
        return name

    def _base(self, delta: _LoggedFile, ref: BaseRef) -> str:
        """Add the base of a delta, chosen as a reader chooses it, and return its name."""
        usable = [
            logged
            for logged in self._logged
            if logged.entry.content_id == ref.content_id and logged.entry.depth < ref.depth
        ]
        if usable:
            return self.show(min(usable, key=lambda logged: logged.path.name != ref.file))
        with contextlib.closing(open_file(delta.path)) as file:
            assert isinstance(file, Container)
            fitting = [path for path in self._plain if _may_be_base(path, file)]
        named = [path for path in fitting if path.name == ref.file]
        if named:
            path = named[0]
            name = path.name if path.parent == self._folder else str(path)
            if name not in self._shown:
                entry = _read(path, name, self._on_error).entry
                note = "chosen by name; its values were not compared"
                self._shown[name] = replace(entry, note=note)
            return name
        name = f"{ref.file} ({ref.content_id[:16]})"
        if name not in self._shown:
            kind: EntryKind = "plain" if fitting else "missing"
            note = (
                f"no file has this name; {len(fitting)} plain files fit, but their values were not compared"
            )
            if not fitting:
                note = "not found"
                self._on_error(missing_base(str(delta.path), ref))
            self._shown[name] = LogEntry(file=name, kind=kind, content_id=ref.content_id, note=note)
        return name
