"""`safe_open`: lazy reading with the interface and behaviour of safetensors.

Plain safetensors files are opened by safetensors itself. Tensors of a `.ckptz` file and its bases are decoded
in parallel, one chunk per thread, directly into the memory of the returned tensors. Sizes that a file
declares are compared with the available memory before anything is allocated.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Final, NoReturn, Self, TypeAlias

import safetensors

from ckptz.api.describe import described
from ckptz.errors import CkptzError, LimitError, check_float
from ckptz.format.byte_source import MemoryBytes
from ckptz.format.dtypes import DType
from ckptz.format.reader import FrameSource, GroupFrame, GroupMember, check_empty
from ckptz.format.sources import CHUNK_VALUES, TensorSource, chunk_bounds, n_chunks_of, tensor_bytes
from ckptz.kernels.floats import Patterns
from ckptz.kernels.interrupts import finalize
from ckptz.parallel import SILENT, SMALL_VALUES, Progress, Workers, jobs_of
from ckptz.state.arrays import Framework, Selection, WindowPart
from ckptz.state.flatten import NO_BUFFERS, Chunks, read_chunk
from ckptz.state.frameworks import framework, parse_backend, parse_device, parse_framework
from ckptz.store.resolve import Checkpoint, open_checkpoint

try:
    import resource as _resource
except ImportError:  # Windows
    resource: ModuleType | None = None
else:
    resource = _resource

_ToFill: TypeAlias = tuple[int, Callable[[], Any]]  # number of patterns, and a function that decodes them

CHECKED_BYTES: Final = 1 << 26  # smaller requests are not compared with the machine's memory
_CGROUP: Final = Path("/sys/fs/cgroup")


def available_memory() -> int | None:
    """Return the bytes that this process may still allocate; None if unknown (outside of Linux)."""
    limits = [n for n in (_meminfo_available(), _cgroup_available(), _limit_available()) if n is not None]
    return min(limits, default=None)


def _meminfo_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return None


def _limit_available() -> int | None:
    """Return the bytes that remain under `ulimit -v`; None without a limit."""
    if resource is None:
        return None
    try:
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        return None if limit == resource.RLIM_INFINITY else max(limit - used, 0)
    except (OSError, ValueError):
        return None


def _cgroup_available() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return None if limit == "max" else int(limit) - used + int(statistics.get("inactive_file", 0))
    except (OSError, ValueError):
        return None


def check_limit(n_bytes: int, max_decoded_bytes: int | None, what: str) -> None:
    """Check that `n_bytes` to decode are within the caller's limit or, by default, the available memory.

    Raises:
        LimitError: they are not.
    """
    limit = None if max_decoded_bytes is None else check_float("max_decoded_bytes", max_decoded_bytes)
    if limit is None and n_bytes >= CHECKED_BYTES:
        limit = available_memory()
    if limit is not None and n_bytes > limit:
        allowed = "free" if max_decoded_bytes is None else "allowed by max_decoded_bytes"
        raise LimitError(
            f"{what}: decodes to {n_bytes} bytes, and only {limit} are {allowed}; "
            "raise max_decoded_bytes, or read less at a time with safe_open"
        )


def read_tensors(
    sources: Mapping[str, FrameSource], framework: Framework, jobs: int | None = None
) -> Iterator[tuple[str, Any]]:
    """Decode tensors on `jobs` threads and yield (name, tensor) in order."""
    made: dict[str, Any] = {}

    def allocate(name: str) -> Patterns:
        source = sources[name]
        check_empty(source)  # frames without chunks are not checked elsewhere
        made[name], patterns = _allocated(framework, source.dtype, source.shape, name)
        return patterns

    members = _members_of(sources)
    n_tasks = {name: _n_tasks(source, members) for name, source in sources.items()}

    with _workers(jobs, sum(n_tasks.values())) as workers:
        tasks = (
            task for name, n in n_tasks.items() if n for task in _tasks_of(sources[name], members, allocate)
        )
        done = workers.map(lambda task: task[1](), tasks, lambda task: task[0] < SMALL_VALUES)
        for name, n in n_tasks.items():
            for _ in range(n):
                next(done)
            if name not in made:  # empty
                allocate(name)
            yield name, framework.finish(made.pop(name))


def _tasks_of(
    source: FrameSource,
    members: Mapping[GroupFrame, Sequence[GroupMember]],
    allocate: Callable[[str], Patterns],
) -> Iterator[_ToFill]:
    """Yield the tasks that decode a tensor; for a group, one task at its first member."""
    if isinstance(source, GroupMember):
        parts = [(part, allocate(part.entry.name)) for part in members[source.group]]
        yield 0, functools.partial(_fill_group, source.group, parts)
    else:
        patterns = allocate(source.entry.name)
        for begin, end in chunk_bounds(len(patterns)):
            yield end - begin, functools.partial(source.fill, begin, patterns[begin:end])


def _n_tasks(source: FrameSource, members: Mapping[GroupFrame, Sequence[GroupMember]]) -> int:
    """Count the tasks that `_tasks_of` yields for a tensor."""
    if isinstance(source, GroupMember):
        return int(members[source.group][0] is source)
    return n_chunks_of(source.n_patterns)


def _members_of(sources: Mapping[str, FrameSource]) -> dict[GroupFrame, list[GroupMember]]:
    """Return the members of each group among some tensors."""
    members: dict[GroupFrame, list[GroupMember]] = {}
    for source in sources.values():
        if isinstance(source, GroupMember):
            members.setdefault(source.group, []).append(source)
    return members


def _fill_group(group: GroupFrame, parts: Sequence[tuple[GroupMember, Patterns]]) -> None:
    """Decode a group into the memory of its tensors, patterns [n] each."""
    patterns = group.chunk(0)
    for part, out in parts:
        out[:] = part.slice_of(patterns)


def _allocated(framework: Framework, dtype: DType, shape: tuple[int, ...], name: str) -> tuple[Any, Patterns]:
    try:
        return framework.allocate(dtype, framework.shape_of(dtype, shape))
    except MemoryError:
        raise LimitError(f"tensor {name!r}: does not fit into memory; read less at a time") from None


def decoded_chunks(workers: Workers, progress: Progress = SILENT) -> Chunks:
    """Return a function that decodes tensors on threads; see `Chunks`."""

    def decoded(
        tensors: Mapping[str, TensorSource], buffers: Mapping[str, Patterns] = NO_BUFFERS
    ) -> Iterator[Patterns]:
        def chunks() -> Iterator[tuple[TensorSource, int, int, Patterns | None]]:
            for name, source in tensors.items():
                check_empty(source)
                for begin, end in source.chunk_bounds():
                    yield source, begin, end, buffers.get(name)

        for patterns in workers.map(lambda chunk: read_chunk(*chunk), chunks()):
            yield patterns
            progress.advance(patterns.nbytes)

    return decoded


def read_selection(source: FrameSource, selection: Selection, framework: Framework, jobs: int | None) -> Any:
    """Read the selected elements of a tensor; only chunks that contain some of them are decoded."""
    groups = [
        (chunk, list(pieces)) for chunk, pieces in groupby(selection.window.pieces(), lambda p: p.chunk)
    ]
    tensor, patterns = framework.allocate(source.dtype, selection.shape)

    with _workers(jobs, len(groups)) as workers:
        for _ in workers.map(lambda group: _fill(source, *group, patterns), groups):
            pass
    return framework.finish(tensor if selection.then is None else selection.then(tensor))


def _fill(source: FrameSource, chunk: int, pieces: Iterable[WindowPart], out: Patterns) -> None:
    """Decode one chunk and copy the selected patterns to their positions in `out` [n]."""
    first, *more = pieces
    n_patterns = min(CHUNK_VALUES, source.n_patterns - chunk * CHUNK_VALUES)
    if not more and first.is_run and first.n_patterns == n_patterns:
        # The complete chunk is selected in order: decode it in place, without caching.
        source.decode_chunk(chunk, out[first.at : first.at + first.n_patterns])
        return
    patterns = source.chunk(chunk)
    for piece in (first, *more):
        piece.copy(patterns, out)


def _workers(jobs: int | None, n_tasks: int) -> Workers:
    return Workers(max(1, min(jobs_of(jobs), n_tasks)), with_caller=True)


# --- the handle ---------------------------------------------------------------------------------

PathLike: TypeAlias = str | os.PathLike[str]


class _NoSuchFile(FileNotFoundError):
    """A missing file, with the message of safetensors."""

    def __str__(self) -> str:
        return f"{self.strerror}: {self.filename}"


@dataclass(slots=True, eq=False)
class _Opened:
    """An open checkpoint, its tensors, and how they are read."""

    checkpoint: Checkpoint
    sources: Mapping[str, FrameSource]
    framework: Framework
    max_decoded_bytes: int | None
    jobs: int | None

    def source(self, name: str) -> FrameSource:
        """Return the source of a tensor by name.

        Raises:
            TypeError: the name is not a str.
            CkptzError: there is no such tensor.
        """
        if not isinstance(name, str):
            raise TypeError(f"a tensor name must be a str, got {type(name).__name__}")
        if name not in self.sources:
            raise CkptzError(f"File does not contain tensor {name} ({self.checkpoint.name})")
        return self.sources[name]

    def read(self, names: Sequence[str]) -> dict[str, Any]:
        """Return complete tensors by name."""
        sources = {name: self.source(name) for name in names}
        check_limit(tensor_bytes(sources), self.max_decoded_bytes, self.checkpoint.name)
        return dict(read_tensors(sources, self.framework, self.jobs))


class _Shared(_Opened):
    """An open checkpoint, shared by a handle and its slices; the last one that is deleted closes it."""

    __slots__ = ()

    def __del__(self) -> None:
        if hasattr(self, "checkpoint"):
            finalize(self.checkpoint.close)


class SafeSlice:
    """A lazy tensor that decodes the chunks it is indexed in; returned by `safe_open.get_slice`.

    Indexing with ints, slices, None and ellipsis decodes only the chunks that it needs; with lists, arrays,
    tensors and booleans, the complete tensor is decoded and indexed by PyTorch. It can be used after its
    handle was closed. Partially used chunks are cached for the next access, up to 64 MiB per open file.

    Example:
        >>> import numpy as np, ckptz
        >>> from ckptz.numpy import save_file
        >>> save_file({"weight": np.arange(6.0).reshape(2, 3)}, "model.ckptz")
        >>> with ckptz.safe_open("model.ckptz", framework="np") as f:
        ...     part = f.get_slice("weight")
        >>> part.get_shape(), part.get_dtype(), part[:, 1]
        ([2, 3], 'F64', array([1., 4.]))
    """

    __slots__ = ("_opened", "_source")

    def __init__(self, opened: _Opened, source: FrameSource) -> None:
        self._opened = opened
        self._source = source

    def get_shape(self) -> list[int]:
        """Return the shape of the complete tensor."""
        return list(self._source.shape)

    def get_dtype(self) -> str:
        """Return the safetensors name of the dtype, such as "BF16"."""
        return self._source.dtype.name

    def __getitem__(self, index: Any) -> Any:
        """Return a new tensor with the elements that `index` selects."""
        opened, source = self._opened, self._source
        selection = opened.framework.select(index, source.dtype, source.shape)
        n_bytes = selection.window.n_patterns * source.dtype.pattern_bytes
        check_limit(n_bytes, opened.max_decoded_bytes, f"{opened.checkpoint.name}: {source.entry.name!r}")
        return read_selection(source, selection, opened.framework, opened.jobs)


class safe_open:
    """Opens a `.ckptz` or `.safetensors` file for lazy reading of tensors or parts of them.

    The arguments up to `backend` are those of safetensors. For a plain safetensors file the result *is*
    safetensors' own handle. Threads may share a handle.

    Args:
        filename: the file; bases of a delta are found in the same folder and in `search_path`.
        framework: "pt" or "np", or a longer spelling.
        device: device of PyTorch tensors.
        backend: "mmap" or "pread". A `.ckptz` file is read with pread in both cases; as in safetensors,
            "pread" restricts PyTorch slices to ints, slices and an ellipsis.
        search_path: further folders with bases.
        max_decoded_bytes: maximum number of bytes that one call may decode; by default the free memory.
        jobs: number of threads, by default all cores.

    Raises:
        FileNotFoundError: the file does not exist.
        SafetensorError: an unknown framework, device or backend, or a damaged file (`FormatError`).
        MissingBaseError: a base of the delta was not found.

    Example:
        >>> import numpy as np, ckptz
        >>> from ckptz.numpy import save_file
        >>> save_file({"weight": np.arange(6.0).reshape(2, 3)}, "model.ckptz")
        >>> with ckptz.safe_open("model.ckptz", framework="np") as f:
        ...     f.keys(), f.get_tensor("weight"), f.get_slice("weight")[0, 1:]
        (['weight'], array([[0., 1., 2.],
               [3., 4., 5.]]), array([1., 2.]))
    """

    __slots__ = ("_opened",)
    _opened: _Opened | None
    _kind: ClassVar[type[_Opened]] = _Shared

    def __new__(
        cls,
        filename: PathLike,
        framework: str,
        device: str | int | None = "cpu",
        *,
        backend: str = "mmap",
        search_path: Sequence[PathLike] = (),
        max_decoded_bytes: int | None = None,
        jobs: int | None = None,
    ) -> Any:
        path = checked_path(filename)
        name, place, served_by = parse_framework(framework), parse_device(device), parse_backend(backend)
        try:
            checkpoint = open_checkpoint(path, search_path)
        except FileNotFoundError as error:
            raise _NoSuchFile(*error.args[:2], error.filename) from None
        if checkpoint.container is None:
            checkpoint.close()
            return safetensors.safe_open(path, framework, device, backend=backend)
        return _handle(cls, checkpoint, (name, place, served_by), max_decoded_bytes, jobs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._opened = None

    def __reduce__(self) -> NoReturn:
        raise TypeError("cannot pickle a safe_open handle; open the file where it is needed")

    @property
    def _open(self) -> _Opened:
        if self._opened is None:
            raise CkptzError("File is closed")
        return self._opened

    def _repr_html_(self) -> str | None:
        """Return the description of the file for notebooks, without decoding; None if it is closed."""
        if self._opened is None:
            return None
        checkpoint = self._opened.checkpoint
        assert checkpoint.container is not None
        return described(checkpoint.container, checkpoint, None)._repr_html_()

    def keys(self) -> list[str]:
        """Return the names of the tensors, sorted."""
        return sorted(self._open.sources)

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors in stored order."""
        return list(self._open.sources)

    def metadata(self) -> dict[str, str] | None:
        """Return the metadata that was saved with the tensors, or None."""
        metadata = self._open.checkpoint.metadata
        return None if metadata is None else dict(metadata)

    def get_tensor(self, name: str) -> Any:
        """Return a complete tensor in new memory."""
        return self._open.read([name])[name]

    def get_tensors(self) -> dict[str, Any]:
        """Return all tensors by name, in stored order."""
        opened = self._open
        return opened.read(list(opened.sources))

    def get_slice(self, name: str) -> SafeSlice:
        """Return a lazy tensor; indexing it decodes only the chunks that it needs."""
        opened = self._open
        return SafeSlice(opened, opened.source(name))


class open_whole(safe_open):
    """Opens a file like `safe_open`; leaving the `with` block closes it for slices as well.

    A shared file is closed in `__del__`, where Python swallows Ctrl-C.
    """

    __slots__ = ()
    _kind = _Opened

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._open.checkpoint.close()
        super().__exit__(kind, error, trace)


def _handle(
    cls: type[safe_open],
    checkpoint: Checkpoint,
    wanted: tuple[str, str | int, str],
    max_decoded_bytes: int | None,
    jobs: int | None,
) -> Any:
    try:
        made_by = framework(*wanted)
    except BaseException:
        checkpoint.close()
        raise
    assert checkpoint.container is not None
    handle = object.__new__(cls)
    handle._opened = cls._kind(checkpoint, checkpoint.container.tensors, made_by, max_decoded_bytes, jobs)
    return handle


def checked_path(filename: PathLike) -> str:
    """Return a path as str, rejecting bytes and file descriptors as safetensors does."""
    path = os.fspath(filename)
    if not isinstance(path, str):
        raise TypeError(f"filename must be a str or a path of str, got {type(path).__name__}")
    return path


def load_bytes(
    data: bytes,
    framework_name: str,
    search_path: Sequence[PathLike],
    max_decoded_bytes: int | None,
    jobs: int | None,
) -> dict[str, Any] | None:
    """Load all tensors from the bytes of a `.ckptz` file; None if they are a plain safetensors file."""
    if not isinstance(data, bytes):
        raise TypeError(f"data must be bytes, got {type(data).__name__}")
    checkpoint = open_checkpoint(MemoryBytes(data), search_path)
    if checkpoint.container is None:
        return None
    with _handle(open_whole, checkpoint, (framework_name, "cpu", "mmap"), max_decoded_bytes, jobs) as file:
        tensors: dict[str, Any] = file.get_tensors()
    return tensors
