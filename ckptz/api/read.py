"""`safe_open`, lazy reading with the names and the behaviour of safetensors' own, and what decodes for it.

A plain safetensors file is handed to safetensors itself; a `.ckptz` file is read here, with its chain of
bases, straight into the memory of the tensors that callers get. Threads take one chunk each. Nothing is
allocated for a file's claims before they are held against the memory that is there.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from ckptz.format.sources import CHUNK_VALUES, TensorSource, chunk_bounds, n_chunks_of
from ckptz.kernels.floats import Patterns
from ckptz.kernels.interrupts import finalize
from ckptz.parallel import SILENT, SMALL_VALUES, Progress, Workers, jobs_of
from ckptz.state.arrays import Framework, Selection, WindowPart
from ckptz.state.frameworks import framework, parse_backend, parse_device, parse_framework
from ckptz.store.resolve import Checkpoint, open_checkpoint

try:
    import resource as _resource
except ImportError:  # Windows
    resource: ModuleType | None = None
else:
    resource = _resource

_ToFill: TypeAlias = tuple[int, Callable[[], Any]]  # patterns that take more than Python, and what fills them
Group = tuple[int, list[WindowPart]]  # a chunk, and what is wanted of it

CHECKED_BYTES: Final = 1 << 26  # smaller requests need no look at the machine's memory
_CGROUP: Final = Path("/sys/fs/cgroup")


def available_memory() -> int | None:
    """Count the bytes that this process may still take, where the system tells: Linux, and its containers."""
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
    """Return the bytes that `ulimit -v` leaves; None without a limit."""
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
    """Refuse to decode more than the caller, or else the machine, allows.

    Raises:
        LimitError: it would not fit.
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
    """Read whole tensors by name, in order, on `jobs` threads: yields (name, tensor)."""
    made: dict[str, Any] = {}

    def allocate(name: str) -> Patterns:
        source = sources[name]
        check_empty(source)  # nobody else would look at the frame of one without chunks
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
    """List the tasks that fill a tensor, or its group, when the first of them is asked for."""
    if isinstance(source, GroupMember):
        parts = [(part, allocate(part.entry.name)) for part in members[source.group]]
        yield 0, functools.partial(_fill_group, source.group, parts)
    else:
        patterns = allocate(source.entry.name)
        for index, (begin, end) in enumerate(chunk_bounds(len(patterns))):
            yield end - begin, functools.partial(source.fill, index, patterns[begin:end])


def _n_tasks(source: FrameSource, members: Mapping[GroupFrame, Sequence[GroupMember]]) -> int:
    """Count the tasks that fill a tensor; that of a group is its first member's."""
    if isinstance(source, GroupMember):
        return int(members[source.group][0] is source)
    return n_chunks_of(source.n_patterns)


def _members_of(sources: Mapping[str, FrameSource]) -> dict[GroupFrame, list[GroupMember]]:
    """List the members among some tensors of each group that has any."""
    members: dict[GroupFrame, list[GroupMember]] = {}
    for source in sources.values():
        if isinstance(source, GroupMember):
            members.setdefault(source.group, []).append(source)
    return members


def _fill_group(group: GroupFrame, parts: Sequence[tuple[GroupMember, Patterns]]) -> None:
    """Decode a group into the memory of its tensors; mostly Python."""
    patterns = group.chunk(0)
    for part, out in parts:
        part.copy(patterns, out)


def _allocated(framework: Framework, dtype: DType, shape: tuple[int, ...], name: str) -> tuple[Any, Patterns]:
    try:
        return framework.allocate(dtype, framework.shape_of(dtype, shape))
    except MemoryError:
        raise LimitError(f"tensor {name!r}: does not fit into memory; read less at a time") from None


def decoded_chunks(
    tensors: Mapping[str, TensorSource], workers: Workers, progress: Progress = SILENT
) -> Iterator[Patterns]:
    """Decode all tensors on threads: patterns in order, unsigned [at most 2^20], a few chunks in flight."""

    def chunks() -> Iterator[Callable[[], Patterns]]:
        for source in tensors.values():
            check_empty(source)
            for begin, end in source.chunk_bounds():
                yield functools.partial(source.patterns, begin, end)

    for patterns in workers.map(lambda decode: decode(), chunks()):
        yield patterns
        progress.advance(patterns.nbytes)


def read_selection(source: FrameSource, selection: Selection, framework: Framework, jobs: int | None) -> Any:
    """Read the tensor that `selection` picks from `source`; only the chunks it touches are decoded."""
    groups = [
        (chunk, list(pieces)) for chunk, pieces in groupby(selection.window.pieces(), lambda p: p.chunk)
    ]
    tensor, patterns = framework.allocate(source.dtype, selection.shape)

    def fill(group: Group) -> None:
        _fill(source, *group, patterns)

    with _workers(jobs, len(groups)) as workers:
        for _ in workers.map(fill, groups):
            pass
    return framework.finish(tensor if selection.then is None else selection.then(tensor))


def _fill(source: FrameSource, chunk: int, pieces: Iterable[WindowPart], out: Patterns) -> None:
    """Copy the patterns of one chunk to their places."""
    first, *more = pieces
    n_patterns = min(CHUNK_VALUES, source.n_patterns - chunk * CHUNK_VALUES)
    if not more and first.is_run and first.n_patterns == n_patterns:
        # All of it, in order: decoded in place, and not kept.
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


class _Opened:
    """An open checkpoint."""

    __slots__ = ("checkpoint", "framework", "jobs", "max_decoded_bytes", "sources")

    def __init__(
        self, checkpoint: Checkpoint, made_by: Framework, max_decoded_bytes: int | None, jobs: int | None
    ) -> None:
        assert checkpoint.container is not None
        self.checkpoint = checkpoint
        self.sources = checkpoint.container.tensors
        self.framework = made_by
        self.max_decoded_bytes = max_decoded_bytes
        self.jobs = jobs

    def source(self, name: str) -> FrameSource:
        """Find a tensor by name."""
        if not isinstance(name, str):
            raise TypeError(f"a tensor name is a str, got {type(name).__name__}")
        if name not in self.sources:
            raise CkptzError(f"File does not contain tensor {name} ({self.checkpoint.name})")
        return self.sources[name]

    def read(self, names: Sequence[str]) -> dict[str, Any]:
        """Read whole tensors by name."""
        sources = {name: self.source(name) for name in names}
        n_bytes = sum(source.n_bytes for source in sources.values())
        check_limit(n_bytes, self.max_decoded_bytes, self.checkpoint.name)
        return dict(read_tensors(sources, self.framework, self.jobs))


class _Shared(_Opened):
    """An open checkpoint, shared by a handle and its slices; closed when the last of them lets go."""

    __slots__ = ()

    def __del__(self) -> None:
        if hasattr(self, "checkpoint"):
            finalize(self.checkpoint.close)


class SafeSlice:
    """A tensor that is read when it is indexed, and only where; made by `safe_open.get_slice`.

    Ints, slices, None and an ellipsis decode what they pick; for lists, arrays, tensors and booleans PyTorch
    indexes the whole tensor. It reads on after its handle was closed. Chunks that an index touches in part
    are kept for the next index, up to 64 MiB for one open file.

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
        """Return the shape of the whole tensor."""
        return list(self._source.shape)

    def get_dtype(self) -> str:
        """Return the dtype's code in safetensors, such as "BF16"."""
        return self._source.dtype.name

    def __getitem__(self, index: Any) -> Any:
        """Read the elements that `index` picks into a tensor of their own."""
        opened, source = self._opened, self._source
        selection = opened.framework.select(index, source.dtype, source.shape)
        n_bytes = selection.window.n_patterns * source.dtype.pattern_bytes
        check_limit(n_bytes, opened.max_decoded_bytes, f"{opened.checkpoint.name}: {source.entry.name!r}")
        return read_selection(source, selection, opened.framework, opened.jobs)


class safe_open:
    """Opens a `.ckptz` or a `.safetensors` file; reads tensors, or parts of them, when asked.

    Everything up to `backend` is as in safetensors. For a plain safetensors file the result *is*
    safetensors' own handle. Threads may share a handle.

    Args:
        filename: the file; a delta finds its bases beside it and in `search_path`.
        framework: "pt" or "np", or a longer spelling.
        device: where PyTorch tensors go.
        backend: "mmap" or "pread". A `.ckptz` file is read by position under both; as in safetensors,
            "pread" restricts PyTorch slices to ints, slices and an ellipsis.
        search_path: more folders with bases.
        max_decoded_bytes: most bytes that one call may decode to; by default, the memory that is free.
        jobs: threads for one call, all cores by default.

    Raises:
        FileNotFoundError: no such file.
        SafetensorError: an unknown framework, device or backend, or a damaged file (`FormatError`).
        MissingBaseError: a base of a delta is not found.

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
        """Show in a notebook how the file is stored, without decoding it; nothing of a closed file."""
        if self._opened is None:
            return None
        checkpoint = self._opened.checkpoint
        assert checkpoint.container is not None
        return described(checkpoint.container, checkpoint, None)._repr_html_()

    def keys(self) -> list[str]:
        """Name the tensors, sorted."""
        return sorted(self._open.sources)

    def offset_keys(self) -> list[str]:
        """Name the tensors in the order in which they are stored."""
        return list(self._open.sources)

    def metadata(self) -> dict[str, str] | None:
        """Return the metadata that was saved with the tensors, or None."""
        metadata = self._open.checkpoint.metadata
        return None if metadata is None else dict(metadata)

    def get_tensor(self, name: str) -> Any:
        """Read a whole tensor, into memory of its own."""
        return self._open.read([name])[name]

    def get_tensors(self) -> dict[str, Any]:
        """Read all tensors by name, in the order in which they are stored."""
        opened = self._open
        return opened.read(list(opened.sources))

    def get_slice(self, name: str) -> SafeSlice:
        """Return a tensor to be indexed; only the indexed chunks are decoded."""
        opened = self._open
        return SafeSlice(opened, opened.source(name))


class open_whole(safe_open):
    """Opens a file as `safe_open` does, to be read in one `with`, which closes it: slices end with it.

    A handle that shares its file closes it in `__del__`, where Python swallows Ctrl-C.
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
    handle = object.__new__(cls)
    handle._opened = cls._kind(checkpoint, made_by, max_decoded_bytes, jobs)
    return handle


def checked_path(filename: PathLike) -> str:
    """Return the path as text; bytes and file descriptors are refused, as by safetensors."""
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
    """Load all tensors of a `.ckptz` file in memory; None if the bytes are a plain safetensors file."""
    if not isinstance(data, bytes):
        raise TypeError(f"data must be bytes, got {type(data).__name__}")
    checkpoint = open_checkpoint(MemoryBytes(data), search_path)
    if checkpoint.container is None:
        return None
    with _handle(open_whole, checkpoint, (framework_name, "cpu", "mmap"), max_decoded_bytes, jobs) as file:
        tensors: dict[str, Any] = file.get_tensors()
    return tensors
