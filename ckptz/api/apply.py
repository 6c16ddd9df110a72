"""`apply_`: writes a checkpoint into live PyTorch tensors in place, completely or not at all.

The tensors may be on any device and keep their memory, so models, optimizers and CUDA graphs that refer to
them see the new values.

First every chunk is read, decoded and compared with its checksum, before anything is written. A chunk that is
stored as changes is checked on a copy of the current values with the changes applied: its checksum then
verifies both old and new values. Then all changes are written; if that fails, the old values are written
back.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch

from ckptz.api.read import PathLike, check_limit
from ckptz.errors import CkptzError, ConfigError, CorruptionError, FormatError, MissingBaseError
from ckptz.format.byte_source import FileBytes, MemoryBytes
from ckptz.format.decode import Changes, Positions
from ckptz.format.dtypes import DType
from ckptz.format.index import content_id_of
from ckptz.format.reader import Container, FrameSource
from ckptz.format.sources import PATTERN_TYPES, Patterns, TensorSource, chunk_bounds
from ckptz.format.streams import CoderId
from ckptz.kernels.torch import bytes_of
from ckptz.parallel import Workers
from ckptz.state.torch import stored_type
from ckptz.store.resolve import open_file

Check = Literal["base", "stored"]
CHECKS: Final = ("base", "stored")


class LiveTensor(TensorSource):
    """Base class of a live tensor whose patterns can be read and written in place."""

    def take(self, positions: Positions) -> Patterns:
        """Return a copy of the patterns at positions of the flat tensor."""
        raise NotImplementedError

    def put(self, where: Positions | slice, patterns: Patterns) -> None:
        """Write bit patterns at positions of the flat tensor, or in a slice of it with two bounds."""
        raise NotImplementedError

    def forget(self) -> None:
        """Discard cached values, since the memory may have been changed through another tensor."""


@dataclass(frozen=True, slots=True)
class Patched:
    """Report of a patch.

    Attributes:
        content_id: content id of the new values.
        base: content id of the old values, or None for a full file.
        step: the file's step, or None.
        n_tensors: number of tensors in the file.
        n_changed_tensors: number of tensors with changes.
        n_written: number of elements written.
    """

    content_id: str
    base: str | None
    step: int | None
    n_tensors: int
    n_changed_tensors: int
    n_written: int


@dataclass(slots=True)
class _Edit:
    """New patterns of one chunk of a tensor: at positions, or in a slice, whose old ones are read later."""

    name: str
    target: LiveTensor
    where: Positions | slice
    n_patterns: int
    new: Patterns | None
    old: Patterns | None = None

    def apply(self) -> None:
        """Write the new patterns, and keep the old ones for `undo` instead."""
        assert self.new is not None
        if isinstance(self.where, slice):
            self.old = self.target.patterns(self.where.start, self.where.stop).copy()
        self.target.put(self.where, self.new)
        self.new = None

    def undo(self) -> None:
        """Write the old patterns back if they were read."""
        if self.old is not None:
            self.target.put(self.where, self.old)


@dataclass(frozen=True, slots=True)
class _ChunkToEdit:
    """One chunk to compare with the live tensor."""

    source: FrameSource
    target: LiveTensor
    index: int
    begin: int
    end: int


def patch(
    container: Container,
    live: Mapping[str, LiveTensor],
    *,
    check: Check,
    workers: Workers,
    max_decoded_bytes: int | None = None,
    before_write: Callable[[], None] = lambda: None,
) -> Patched:
    """Write the checkpoint in `container` into `live`.

    Args:
        container: an open file; if it is a delta, its base are the values of `live`.
        live: tensors by name; tensors that are not in the file stay unchanged.
        check: "base" compares all current values with checksums; "stored" trusts them, and reads and writes
            changed elements only.
        workers: threads.
        max_decoded_bytes: limit of additional memory; by default the free memory.
        before_write: called after everything is decoded and checked, before the first write.

    Raises:
        ConfigError: `live` lacks a tensor, or one has another dtype or shape.
        MissingBaseError: `live` is not the base of the delta.
        FormatError: the file is damaged.
        LimitError: it needs more memory than allowed.
    """
    for tensor in live.values():
        tensor.forget()
    _check_fit(container, live)
    if container.outer_base is not None:
        container.bases = live
    prepare, index = _edit_of_checked if check == "base" else _edit_of_trusted, container.index
    self_contained: list[str] = []
    try:
        tasks = _tasks(container, live, self_contained, max_decoded_bytes)
        edits = [edit for edit in workers.map(prepare, tasks) if edit is not None]
        # Tensors stored without base decode with any base, so they do not show that this is the right one.
        if check == "base" and self_contained and _is_applied(container, live):
            raise MissingBaseError("")
    except MissingBaseError as error:
        raise _wrong_base(container, live, error) from None
    before_write()
    _commit(edits)
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
            f"{container.name}: the state lacks tensor {missing[0]!r}{more}; pass the state of the same model"
        )
    for name, source in container.tensors.items():
        live_type = live[name].dtype.name, list(live[name].shape)
        wanted = source.dtype.name, list(source.shape)
        if live_type != wanted:
            raise ConfigError(
                f"{container.name}: tensor {name!r} is {wanted[0]} {wanted[1]}, and in the state "
                f"{live_type[0]} {live_type[1]}; convert it to the dtype and shape in the file"
            )


def _tasks(
    container: Container,
    live: Mapping[str, LiveTensor],
    self_contained: list[str],
    max_decoded_bytes: int | None,
) -> Iterator[_ChunkToEdit]:
    """Yield every chunk, and append the names of tensors that are stored without base to `self_contained`."""
    spare_bytes = 0
    for name, source in container.tensors.items():
        header = source.header
        if header.plan.reads_base_codes and source.needs_other_file:
            raise ConfigError(
                f"{container.name}: decoding tensor {name!r} needs the codes of its base file, which live "
                "tensors do not have; load the checkpoint with load_file instead"
            )
        with source.naming():
            is_alone = source.base is None or not source.needs_other_file  # raises if there is no base
        if is_alone and header.n_patterns:
            self_contained.append(name)
        for index, (begin, end) in enumerate(chunk_bounds(header.n_patterns)):
            # Chunks that are not stored as changes are decoded completely, into additional memory.
            is_by_changes = source.coders(index) <= {CoderId.CONSTANT, CoderId.SPARSE}
            if not source.needs_other_file or not is_by_changes:
                spare_bytes += (end - begin) * header.dtype.pattern_bytes
                check_limit(spare_bytes, max_decoded_bytes, container.name)
            yield _ChunkToEdit(source, live[name], index, begin, end)


def _changes(task: _ChunkToEdit) -> Changes | None:
    """Return the changes of the chunk; None if it must be decoded completely."""
    return task.source.changes(task.index) if task.source.needs_other_file else None


def _edit_of_checked(task: _ChunkToEdit) -> _Edit | None:
    changes = _changes(task)
    if changes is None:
        is_alone = not task.source.needs_other_file
        if is_alone and task.source.holds(task.index, task.target.patterns(task.begin, task.end)):
            return None
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
    changes = _changes(task)
    if changes is None:
        return _dense_edit(task)  # checks the decoded chunk
    task.source.checked_payload(task.index)
    if not len(changes):
        return None
    old = task.target.take(changes.positions + task.begin)
    return _sparse_edit(task, changes, old, changes.patterns(old))


def _sparse_edit(task: _ChunkToEdit, changes: Changes, old: Patterns, new: Patterns) -> _Edit:
    positions = changes.positions + task.begin
    return _Edit(task.source.entry.name, task.target, positions, len(new), new, old)


def _dense_edit(task: _ChunkToEdit) -> _Edit:
    n_patterns = task.end - task.begin
    new = np.empty(n_patterns, PATTERN_TYPES[task.source.dtype.pattern_bytes])
    try:
        task.source.decode_chunk(task.index, new)
    except (MissingBaseError, CorruptionError):
        if not task.source.needs_other_file:
            raise
        raise _other_values(task) from None
    return _Edit(task.source.entry.name, task.target, slice(task.begin, task.end), n_patterns, new)


_local = threading.local()


def _scratch(patterns: Patterns) -> Patterns:
    """Copy patterns [n] to memory that this thread reuses for its next chunk."""
    buffers: dict[int, Patterns] = _local.__dict__.setdefault("buffers", {})
    if len(buffers.get(patterns.itemsize, ())) < len(patterns):
        buffers[patterns.itemsize] = np.empty(len(patterns), patterns.dtype)
    copy = buffers[patterns.itemsize][: len(patterns)]
    copy[:] = patterns
    return copy


def _require_checksum(task: _ChunkToEdit, patterns: Patterns) -> None:
    if not task.source.holds(task.index, patterns):
        raise _other_values(task)


def _other_values(task: _ChunkToEdit) -> MissingBaseError:
    """Return the error for a live tensor that is not the base, if the stored bytes are intact."""
    task.source.checked_payload(task.index)
    return MissingBaseError(f"tensor {task.source.entry.name!r} holds other values")


def _is_applied(container: Container, live: Mapping[str, LiveTensor]) -> bool:
    """Return whether the live tensors already have the values of a delta."""
    base, new_id = container.index.base, container.index.content_id
    is_change = base is not None and base.content_id != new_id
    return is_change and content_id_of({name: live[name] for name in container.tensors}) == new_id


def _wrong_base(container: Container, live: Mapping[str, LiveTensor], error: MissingBaseError) -> CkptzError:
    base = container.index.base
    if base is None:
        return error
    if _is_applied(container, live):
        return MissingBaseError(
            f"{container.name}: its values are in the state already; it was applied before"
        )
    return MissingBaseError(
        f"{container.name}: the state is not the checkpoint that this delta was made from, {base.title}: "
        f"{error}; apply the deltas in order, or a full file first"
    )


def _commit(edits: Sequence[_Edit]) -> None:
    """Write all new values; on an error, write the old ones back.

    Raises:
        CkptzError: writing back failed; it names the tensor that may be changed.
    """
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


State = Mapping[str, torch.Tensor]

# PyTorch cannot index all unsigned dtypes, so patterns are viewed as signed ones of the same size.
_SIGNED: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def apply_(
    state_dict: State,
    delta: PathLike | bytes,
    *,
    check: Check = "base",
    max_decoded_bytes: int | None = None,
    jobs: int | None = None,
) -> Patched:
    """Apply a delta to the tensors that are its base, in place and bit for bit.

    Either all tensors get the delta's values or none is changed: everything is decoded and checked before the
    first write, and an interrupted write is undone. Other threads must not write to the tensors meanwhile. A
    full file overwrites any values.

    Args:
        state_dict: tensors by name, on any device; tensors that are not in the delta stay unchanged.
        delta: a `.ckptz` file or its bytes. Its base is `state_dict`; no other file is read.
        check: "base" compares all current values of the tensors in the delta with checksums. "stored" checks
            only the delta's own bytes and trusts the tensors: it reads and writes changed elements only.
        max_decoded_bytes: limit of memory for tensors that are not stored as changes; by default the free
            memory.
        jobs: number of threads, by default all cores.

    Returns:
        A report with the counts of tensors and elements written.

    Raises:
        MissingBaseError: the tensors are not the base of the delta, or already have its values.
        ConfigError: a tensor is missing, or has another dtype or shape.
        FormatError: the delta is damaged.

    Example:
        >>> import torch
        >>> from ckptz.torch import apply_, save_file
        >>> trained, live = {"weight": torch.ones(2)}, {"weight": torch.ones(2)}
        >>> save_file(trained, "step-1.ckptz")
        >>> trained["weight"][0] = 1.5
        >>> save_file(trained, "step-2.ckptz", base="step-1.ckptz")
        >>> report = apply_(live, "step-2.ckptz")
        >>> live
        {'weight': tensor([1.5000, 1.0000])}
    """
    if check not in CHECKS:
        raise ConfigError(f"check must be one of {CHECKS}, got {check!r}")
    live = live_tensors(state_dict)
    source = MemoryBytes(delta) if isinstance(delta, bytes) else FileBytes(Path(delta))
    with contextlib.closing(open_file(source)) as file:
        if not isinstance(file, Container):
            raise FormatError(f"{file.name}: not a .ckptz file; use load_file")
        with Workers(jobs) as workers:
            return patch(file, live, check=check, workers=workers, max_decoded_bytes=max_decoded_bytes)


def live_tensors(state_dict: State) -> dict[str, LiveTensor]:
    """Return writable sources for the tensors of a state.

    Raises:
        ConfigError: the state is not a mapping of names to dense tensors.
        DTypeError: a dtype is not supported by the format.
    """
    if not isinstance(state_dict, Mapping):
        raise ConfigError(f"a state is a dict of PyTorch tensors by name, got {type(state_dict).__name__}")
    return {name: _live(name, tensor) for name, tensor in state_dict.items()}


def _live(name: str, tensor: Any) -> LiveTensor:
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"tensor {name!r} is a {type(tensor).__name__}, not a PyTorch tensor")
    if hasattr(tensor, "__tensor_flatten__"):  # consists of other tensors, like a DTensor
        raise ConfigError(
            f"tensor {name!r} is a {type(tensor).__name__}; pass the plain tensors that it consists of"
        )
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise ConfigError(f"tensor {name!r} is {tensor.layout} on {tensor.device}; pass a dense tensor")
    dtype, shape = stored_type(name, tensor)
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        raise ConfigError(f"tensor {name!r} is a conjugate or negative view; pass the original tensor")
    if tensor.is_contiguous():
        return _contiguous(dtype, shape, tensor)
    if _overlaps(tensor):
        raise ConfigError(f"tensor {name!r} has elements that share memory (expand); pass a contiguous copy")
    return _StridedTensor(dtype, shape, tensor)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Return whether elements may share memory, as after `expand`."""
    reach = 0  # largest offset within the dimensions with smaller strides
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1 and stride <= reach:
            return True
        reach += (n - 1) * stride
    return False


def _contiguous(dtype: DType, shape: tuple[int, ...], tensor: torch.Tensor) -> LiveTensor:
    flat = bytes_of(tensor).view(_SIGNED[dtype.pattern_bytes])
    return _HostTensor(dtype, shape, flat) if tensor.device.type == "cpu" else _FlatTensor(dtype, shape, flat)


class _FlatTensor(LiveTensor):
    """A contiguous tensor on any device; `flat` is a view of its patterns as signed integers."""

    dtype: DType
    shape: tuple[int, ...]

    def __init__(self, dtype: DType, shape: tuple[int, ...], flat: Any) -> None:
        self.dtype, self.shape, self._flat = dtype, shape, flat

    def patterns(self, begin: int, end: int) -> Patterns:
        return _patterns_of(self._flat[begin:end])

    def take(self, positions: Positions) -> Patterns:
        return _patterns_of(self._flat[self._moved(positions)])

    def put(self, where: Positions | slice, patterns: Patterns) -> None:
        signed = patterns.view(np.uint8 if patterns.itemsize == 1 else f"<i{patterns.itemsize}")
        self._flat[where if isinstance(where, slice) else self._moved(where)] = self._moved(signed)

    def _moved(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(self._flat.device)


class _HostTensor(_FlatTensor):
    """A contiguous tensor in host memory, viewed as a numpy array."""

    def __init__(self, dtype: DType, shape: tuple[int, ...], flat: torch.Tensor) -> None:
        super().__init__(dtype, shape, _patterns_of(flat))

    def patterns(self, begin: int, end: int) -> Patterns:
        return np.require(self._flat[begin:end], requirements=["A"])

    def take(self, positions: Positions) -> Patterns:
        taken: Patterns = self._flat[positions]
        return taken

    def put(self, where: Positions | slice, patterns: Patterns) -> None:
        self._flat[where] = patterns


class _StridedTensor(LiveTensor):
    """A tensor whose elements are not in order in memory, such as one in channels_last format.

    A contiguous copy is made on first access, once for each file.
    """

    dtype: DType
    shape: tuple[int, ...]

    def __init__(self, dtype: DType, shape: tuple[int, ...], tensor: torch.Tensor) -> None:
        self.dtype, self.shape, self._tensor = dtype, shape, tensor
        span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self._memory = _contiguous(dtype, (span,), tensor.as_strided((span,), (1,)))
        self._n_parts = tensor.element_size() // dtype.pattern_bytes
        self._read: LiveTensor | None = None

    @property
    def _ordered(self) -> LiveTensor:
        if self._read is None:
            self._read = _contiguous(self.dtype, self.shape, self._tensor.contiguous())
        return self._read

    def patterns(self, begin: int, end: int) -> Patterns:
        return self._ordered.patterns(begin, end)

    def take(self, positions: Positions) -> Patterns:
        return self._ordered.take(positions)

    def put(self, where: Positions | slice, patterns: Patterns) -> None:
        positions = np.arange(where.start, where.stop) if isinstance(where, slice) else where
        element, part = np.divmod(positions, self._n_parts)
        indices = np.unravel_index(element, tuple(self._tensor.shape))
        offset = sum(i * stride for i, stride in zip(indices, self._tensor.stride(), strict=True))
        self._memory.put(offset * self._n_parts + part, patterns)
        if self._read is not None:
            self._read.put(where, patterns)

    def forget(self) -> None:
        self._read = None


def _patterns_of(flat: torch.Tensor) -> Patterns:
    array = flat.cpu().numpy()
    return array.view(PATTERN_TYPES[array.itemsize])
