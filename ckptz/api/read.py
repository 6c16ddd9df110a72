"""Decodes tensors, or parts of them, straight into the memory of the tensors that callers get.

Threads take one chunk each. Nothing is allocated for a file's claims before they are held against the
memory that is there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from ckptz.errors import LimitError, real
from ckptz.format.dtypes import DType
from ckptz.format.reader import FrameSource, check_empty
from ckptz.format.sources import CHUNK_VALUES, TensorSource, chunk_bounds, n_chunks_of
from ckptz.kernels.floats import Patterns
from ckptz.parallel import SMALL_VALUES, Workers, jobs_of
from ckptz.progress import SILENT, Progress
from ckptz.state.arrays import Framework, Selection
from ckptz.state.window import WindowPart

try:
    import resource as _resource
except ImportError:  # Windows
    resource: ModuleType | None = None
else:
    resource = _resource

Group = tuple[int, list[WindowPart]]  # a chunk, and what is wanted of it

CHECKED_BYTES: Final = 1 << 26  # smaller requests need no look at the machine's memory
_CGROUP: Final = Path("/sys/fs/cgroup")


def available_memory() -> int | None:
    """Count the bytes that this process may still take, where the system tells: Linux, and its containers."""
    found = [n for n in (_meminfo_available(), _cgroup_available(), _limit_available()) if n is not None]
    return min(found, default=None)


def _meminfo_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return None


def _limit_available() -> int | None:
    """Give the bytes that `ulimit -v` leaves; None without a limit."""
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
    limit = None if max_decoded_bytes is None else real("max_decoded_bytes", max_decoded_bytes)
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
        dtype = sources[name].dtype
        made[name], patterns = _allocated(framework, dtype, sources[name].shape, name)
        return patterns

    def tasks() -> Iterator[tuple[FrameSource, int, Patterns]]:
        for name, n in n_chunks.items():
            patterns = allocate(name)
            for index, (begin, end) in enumerate(chunk_bounds(len(patterns)) if n else ()):
                yield sources[name], index, patterns[begin:end]

    n_chunks = {name: _n_chunks(source) for name, source in sources.items()}
    with _workers(jobs, sum(n_chunks.values())) as workers:
        done = workers.map(lambda t: t[0].fill(t[1], t[2]), tasks(), lambda t: len(t[2]) < SMALL_VALUES)
        for name, n in n_chunks.items():
            for _ in range(n):
                next(done)
            if name not in made:  # empty, and the tasks have not come to it
                allocate(name)
            yield name, framework.finish(made.pop(name))


def _allocated(framework: Framework, dtype: DType, shape: tuple[int, ...], name: str) -> tuple[Any, Patterns]:
    try:
        return framework.allocate(dtype, framework.shape_of(dtype, shape))
    except MemoryError:
        raise LimitError(f"tensor {name!r}: does not fit into memory; read less at a time") from None


def _n_chunks(source: FrameSource) -> int:
    """Count the chunks of a tensor; where there are none, check its frame at once."""
    check_empty(source)
    return n_chunks_of(source.n_patterns)


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
    """Bring the patterns of one chunk to their places."""
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
