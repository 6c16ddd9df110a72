"""Writes a checkpoint over tensors that are in use, whole or not at all.

First every chunk is read, decoded and held against its checksum, while nothing is written. A chunk that
is stored by its changes is checked on a copy of the present values with the changes put in: the checksum
then vouches for both, what was there and what comes. Only then are the changes written; if that fails on
the way, what was written is taken back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from ckptz.errors import CkptzError, ConfigError, CorruptionError, MissingBaseError
from ckptz.format.bits import xxh64
from ckptz.format.decode import Changes, Positions
from ckptz.format.index import content_id_of
from ckptz.format.reader import Container, FrameSource
from ckptz.format.sources import PATTERN_TYPES, Patterns, TensorSource, chunk_bounds
from ckptz.format.streams import CoderId
from ckptz.parallel import Workers

Check = Literal["base", "stored"]
CHECKS: Final = ("base", "stored")


class LiveTensor(TensorSource):
    """A tensor in use: its patterns may be read and written in place; subclasses say how."""

    def take(self, positions: Positions) -> Patterns:
        """Read patterns at positions of the whole tensor, in memory of their own."""
        raise NotImplementedError

    def put(self, positions: Positions, patterns: Patterns) -> None:
        """Write patterns at positions."""
        raise NotImplementedError

    def write(self, begin: int, patterns: Patterns) -> None:
        """Write patterns one after another from `begin`."""
        raise NotImplementedError

    def forget(self) -> None:
        """Let go of what was read before: the memory may have been written to under another name."""


@dataclass(frozen=True, slots=True)
class Patched:
    """Identity of the tensors after a patch, and counts of what it wrote.

    Attributes:
        content_id: identity of the values that the tensors have now.
        base: identity of those they had, or None if the file stands alone.
        step: the file's step, or None.
        n_tensors: tensors of the file.
        n_changed_tensors: those that were written to.
        n_written: patterns written.
    """

    content_id: str
    base: str | None
    step: int | None
    n_tensors: int
    n_changed_tensors: int
    n_written: int


@dataclass(slots=True)
class _Edit:
    """What one chunk of a tensor becomes: patterns at positions, or a run of them from `begin`."""

    name: str
    target: LiveTensor
    begin: int
    n_patterns: int
    new: Patterns | None
    positions: Positions | None = None
    old: Patterns | None = None

    def apply(self) -> None:
        """Write the new patterns; from then on the edit holds the old ones only."""
        assert self.new is not None
        if self.old is None:
            self.old = self.target.patterns(self.begin, self.begin + self.n_patterns).copy()
        self._write(self.new)
        self.new = None

    def undo(self) -> None:
        """Write the old patterns, if they were read."""
        if self.old is not None:
            self._write(self.old)

    def _write(self, patterns: Patterns) -> None:
        if self.positions is None:
            self.target.write(self.begin, patterns)
        else:
            self.target.put(self.positions, patterns)


@dataclass(frozen=True, slots=True)
class _ChunkToEdit:
    """One chunk to prepare."""

    source: FrameSource
    target: LiveTensor
    index: int
    begin: int
    end: int
    checksum: int


def patch(
    container: Container,
    live: Mapping[str, LiveTensor],
    *,
    check: Check = "base",
    workers: Workers,
    allow: Callable[[int], None] = lambda n_bytes: None,
) -> Patched:
    """Write the checkpoint in `container` over `live`.

    Args:
        container: an open file; for a delta, `live` stands for its base.
        live: tensors by name; those that the file does not hold are left alone.
        check: "base" holds every present value against checksums; "stored" trusts them, and reads and
            writes only what changes.
        workers: threads.
        allow: is told how many bytes beside the tensors are needed so far; raises if that is too much.

    Raises:
        ConfigError: `live` lacks a tensor, or has another dtype or shape.
        MissingBaseError: `live` is not the checkpoint that the delta was made from.
        FormatError: the file is damaged.
    """
    for tensor in live.values():
        tensor.forget()
    _check_fit(container, live)
    if container.outer_base is not None:
        container.bases = live
    try:
        edits = _prepare(container, live, check, workers, allow)
    except MissingBaseError as error:
        raise _wrong_base(container, live, error) from None
    _commit(edits)
    index = container.index
    return Patched(
        content_id=index.content_id,
        base=None if index.base is None else index.base.content_id,
        step=index.step,
        n_tensors=len(container.tensors),
        n_changed_tensors=len({edit.name for edit in edits}),
        n_written=sum(edit.n_patterns for edit in edits),
    )


def _check_fit(container: Container, live: Mapping[str, LiveTensor]) -> None:
    missing = [name for name in container.tensors if name not in live]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(
            f"{container.name}: the state lacks tensor {missing[0]!r}{more}; it is another model"
        )
    for name, source in container.tensors.items():
        found = live[name].dtype.name, list(live[name].shape)
        wanted = source.dtype.name, list(source.shape)
        if found != wanted:
            raise ConfigError(
                f"{container.name}: tensor {name!r} is {wanted[0]} {wanted[1]}, and in the state "
                f"{found[0]} {found[1]}; give it the dtype and shape that were published"
            )


def _prepare(
    container: Container,
    live: Mapping[str, LiveTensor],
    check: Check,
    workers: Workers,
    allow: Callable[[int], None],
) -> list[_Edit]:
    prepare = _edit_of_checked if check == "base" else _edit_of_trusted
    stand_alone: list[str] = []
    tasks = _tasks(container, live, stand_alone, allow)
    edits = [edit for edit in workers.map(prepare, tasks) if edit is not None]
    base = container.index.base
    new_id = container.index.content_id
    # Tensors that are stored whole restore from any base, so they say nothing of this one.
    is_in_doubt = check == "base" and base is not None and stand_alone and base.content_id != new_id
    if is_in_doubt and _live_content_id(container, live) == new_id:
        raise _wrong_base(container, live, MissingBaseError(""))
    return edits


def _tasks(
    container: Container,
    live: Mapping[str, LiveTensor],
    stand_alone: list[str],
    allow: Callable[[int], None],
) -> Iterator[_ChunkToEdit]:
    """Every chunk; the names of tensors that need no base are appended to `stand_alone`."""
    spare_bytes = 0
    for name, source in container.tensors.items():
        header = source.header
        if header.plan.reads_base_codes and source.needs_other_file:
            raise ConfigError(
                f"{container.name}: tensor {name!r} is grouped by the codes of its base file, which live "
                "tensors do not have; restore the checkpoint and load that"
            )
        with container.naming(name):
            is_alone = source.base is None or not source.needs_other_file  # raises if there is no base
        if is_alone and header.n_patterns:
            stand_alone.append(name)
        for index, (begin, end) in enumerate(chunk_bounds(header.n_patterns)):
            if _is_dense(source, index):
                spare_bytes += (end - begin) * header.dtype.pattern_bytes
                allow(spare_bytes)
            yield _ChunkToEdit(source, live[name], index, begin, end, header.chunks[index].decoded)


def _is_dense(source: FrameSource, index: int) -> bool:
    """Whether the chunk is decoded as a whole; an exotic sparse one may pass for one that is not."""
    coders = {stream.coder for stream in source.header.chunks[index].streams}
    return not source.needs_other_file or not coders <= {CoderId.CONSTANT, CoderId.SPARSE}


def _changes(task: _ChunkToEdit) -> Changes | None:
    """Where the chunk differs from the live tensor; None if it must be decoded."""
    return task.source.changes(task.index) if task.source.needs_other_file else None


def _edit_of_checked(task: _ChunkToEdit) -> _Edit | None:
    changes = _changes(task)
    if changes is None:
        is_alone = not task.source.needs_other_file
        if is_alone and xxh64(task.target.patterns(task.begin, task.end)) == task.checksum:
            return None  # which is quicker to see than to decode
        return _dense_edit(task)
    patterns = task.target.patterns(task.begin, task.end)
    if not len(changes):
        _require_checksum(task, patterns)
        return None
    patched = _scratch(patterns)
    old = patched[changes.positions]
    new = changes.patterns(old)
    patched[changes.positions] = new
    _require_checksum(task, patched)
    return _sparse_edit(task, changes, old, new)


def _edit_of_trusted(task: _ChunkToEdit) -> _Edit | None:
    task.source.check_chunk(task.index)
    changes = _changes(task)
    if changes is None:
        return _dense_edit(task)
    if not len(changes):
        return None
    old = task.target.take(changes.positions + task.begin)
    return _sparse_edit(task, changes, old, changes.patterns(old))


def _sparse_edit(task: _ChunkToEdit, changes: Changes, old: Patterns, new: Patterns) -> _Edit:
    positions = changes.positions + task.begin
    return _Edit(task.source.entry.name, task.target, task.begin, len(new), new, positions, old)


def _dense_edit(task: _ChunkToEdit) -> _Edit:
    n_patterns = task.end - task.begin
    new = np.empty(n_patterns, PATTERN_TYPES[task.source.dtype.pattern_bytes])
    try:
        task.source.decode_chunk(task.index, new)
    except (MissingBaseError, CorruptionError):
        if not task.source.needs_other_file:
            raise
        # Whole bytes that do not decode either were grouped by another base.
        task.source.check_chunk(task.index)
        raise other_values(task.source) from None
    return _Edit(task.source.entry.name, task.target, task.begin, n_patterns, new)


_local = threading.local()


def _scratch(patterns: Patterns) -> Patterns:
    """A copy of `patterns` in memory that the thread uses again for its next chunk."""
    buffers: dict[int, Patterns] = _local.__dict__.setdefault("buffers", {})
    if len(buffers.get(patterns.itemsize, ())) < len(patterns):
        buffers[patterns.itemsize] = np.empty(len(patterns), patterns.dtype)
    copy = buffers[patterns.itemsize][: len(patterns)]
    copy[:] = patterns
    return copy


def _require_checksum(task: _ChunkToEdit, patterns: Patterns) -> None:
    if xxh64(patterns) != task.checksum:
        task.source.check_chunk(task.index)
        raise other_values(task.source)


def other_values(source: FrameSource) -> MissingBaseError:
    """Make the error of a tensor that is not the one that a file's was made from."""
    return MissingBaseError(f"tensor {source.entry.name!r} holds other values")


def _live_content_id(container: Container, live: Mapping[str, LiveTensor]) -> str:
    return content_id_of({name: live[name] for name in container.tensors})


def _wrong_base(container: Container, live: Mapping[str, LiveTensor], error: MissingBaseError) -> CkptzError:
    base = container.index.base
    if base is None:
        return error
    if _live_content_id(container, live) == container.index.content_id:
        return MissingBaseError(
            f"{container.name}: its values are in the state already; it was applied before"
        )
    return MissingBaseError(
        f"{container.name}: the state is not the checkpoint that this delta was made from, {base.title}: "
        f"{error}; apply the deltas in order, or a full file first"
    )


def _commit(edits: Sequence[_Edit]) -> None:
    """Write all new values, or the old ones again; where even that fails, say which may be changed."""
    begun: list[_Edit] = []
    try:
        for edit in edits:
            begun.append(edit)
            edit.apply()
    except BaseException as cause:
        try:
            for edit in reversed(begun):
                edit.undo()
        except BaseException as error:
            what = f"tensors {sorted({edit.name for edit in begun})} may hold some new values ({cause})"
            raise CkptzError(f"{what}; load a full file over them") from error
        raise
