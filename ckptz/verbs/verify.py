"""`ckptz verify`: check every stored byte and every decoded value, and compare with an original."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ckptz.errors import ConfigError, CorruptionError
from ckptz.foreign.inputs import Input, check_not_torch, open_input
from ckptz.format.byte_source import naming_urls, path_of
from ckptz.format.index import Sharding
from ckptz.format.reader import Container, FrameSource, check_empty, frames_of
from ckptz.format.sources import TensorSource
from ckptz.format.values import FLOAT_KINDS
from ckptz.kernels import cpu
from ckptz.kernels.clock import working_seconds
from ckptz.kernels.floats import Patterns
from ckptz.parallel import SILENT, Progress, Workers
from ckptz.run.names import resolve
from ckptz.run.residuals import residual_or_file
from ckptz.store.resolve import Checkpoint, open_checkpoint
from ckptz.verbs.paths import PathLike, to_paths
from ckptz.words import Report

Tensors = Mapping[str, TensorSource]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport(Report):
    """Counts of what `verify` checked."""

    file: str
    chain: tuple[str, ...]  # the files that its tensors depend on, nearest first
    n_tensors: int  # tensors decoded
    n_chunks: int  # chunks whose stored bytes were checked, in all files of the chain
    tensor_bytes: int  # bytes decoded
    content_id: str  # identity of the values
    against: str | None  # the checkpoint compared with
    n_lossy: int  # tensors compared within their recorded error instead of bit for bit
    seconds: float  # time taken, without compiling kernels


@naming_urls
def verify(
    path: PathLike,
    *,
    against: PathLike | None = None,
    jobs: int | None = None,
    search_path: Sequence[PathLike] = (),
    progress: Progress = SILENT,
) -> VerifyReport:
    """Check the stored bytes of every chunk of a file and its chain, and decode every tensor of the file.

    Args:
        path: a `.ckptz` file, or "DIR@STEP" for the weights of a step, exact if the step has a residual file;
            with `against` also a `.safetensors` file.
        against: a checkpoint that must have the same names, dtypes, shapes, metadata and bits.
        jobs: number of threads, by default one for each core.
        search_path: more folders to search for bases, of `against` too, after the folder of the file.
        progress: receives the number of bytes decoded.

    Returns:
        Counts of the tensors, chunks and bytes that were checked.

    Raises:
        ConfigError: not a `.ckptz` file, or a plain safetensors file without `against`.
        ChecksumError: stored bytes are damaged.
        CorruptionError: decoded values are not those that were written, or differ from the original.
        MissingBaseError: the chain is incomplete.
    """
    start, located = working_seconds(), resolve(path)
    if located.shards is not None:
        return _verify_shards(path, located.shards, against, jobs, search_path, progress)
    file = check_not_torch(located.path) if located.weights is None else residual_or_file(located.weights)
    with contextlib.ExitStack() as opened, Workers(jobs) as workers:
        checkpoint = opened.enter_context(contextlib.closing(open_checkpoint(file, to_paths(search_path))))
        if checkpoint.container is None and against is None:
            raise ConfigError(
                f"{path}: a plain safetensors file has no checksums; compare it with --against ORIGINAL"
            )
        originals: Tensors = {}
        if against is not None:
            original = open_input(path_of(against), to_paths(search_path))
            opened.callback(original.close)
            check_same_layout(checkpoint, original)
            originals = original.tensors
        n_bytes = sum(t.n_bytes for t in checkpoint.tensors.values())
        progress.start(checkpoint.name, n_bytes)
        n_chunks = check_stored_bytes(checkpoint, workers)
        for done in workers.map(
            lambda check: check(), _checks(checkpoint.name, checkpoint.tensors, originals)
        ):
            progress.advance(done)
        return VerifyReport(
            file=checkpoint.name,
            chain=tuple(file.name for file in checkpoint.files[1:]),
            n_tensors=len(checkpoint.tensors),
            n_chunks=n_chunks,
            tensor_bytes=n_bytes,
            content_id=checkpoint.content_id(),
            against=None if against is None else str(against),
            n_lossy=sum(_recorded_error(source) is not None for source in checkpoint.tensors.values()),
            seconds=working_seconds() - start,
        )


def _verify_shards(
    path: PathLike,
    step: Path,
    against: PathLike | None,
    jobs: int | None,
    search_path: Sequence[PathLike],
    progress: Progress,
) -> VerifyReport:
    """Verify the files of all ranks of a step, and compare the merged tensors with an original."""
    start = working_seconds()
    with contextlib.closing(
        open_input(step, to_paths(search_path))
    ) as opened:  # raises unless all ranks are there
        files = [shard.paths[0] for shard in opened.shards]
        if against is not None:
            with contextlib.closing(open_input(path_of(against), to_paths(search_path))) as original:
                _check_same_tensors(
                    opened.tensors, original.tensors, f"{opened.name}: differs from {original.name}"
                )
                with Workers(jobs) as workers:
                    checks = _checks(opened.name, opened.tensors, original.tensors)
                    for _ in workers.map(lambda check: check(), checks):
                        pass
        reports = [verify(file, jobs=jobs, search_path=search_path, progress=progress) for file in files]
        return VerifyReport(
            file=str(path),
            chain=tuple(name for report in reports for name in (report.file, *report.chain))[1:],
            n_tensors=len(opened.tensors),
            n_chunks=sum(report.n_chunks for report in reports),
            tensor_bytes=sum(report.tensor_bytes for report in reports),
            content_id=reports[0].content_id,
            against=None if against is None else str(against),
            n_lossy=sum(report.n_lossy for report in reports),
            seconds=working_seconds() - start,
        )


def check_stored_bytes(checkpoint: Checkpoint, workers: Workers) -> int:
    """Check the stored bytes of every chunk of all files of a chain, and count the chunks."""
    levels = (level for file in checkpoint.files if isinstance(file, Container) for level in file.levels)
    return sum(workers.map(_check_stored, (frame for level in levels for frame in frames_of(level.tensors))))


def _check_stored(frame: FrameSource) -> int:
    n_chunks = len(frame.header.chunks)
    for index in range(n_chunks):
        frame.check_chunk(index)
    return n_chunks


def _checks(file: str, tensors: Tensors, originals: Tensors) -> Iterator[Callable[[], int]]:
    """Yield a function for each chunk that decodes and compares it and returns its bytes."""
    for name, source in tensors.items():
        check_empty(source)
        where = f"{file}: tensor {name!r}"
        for begin, end in source.chunk_bounds():
            yield partial(_decode_and_compare, where, source, originals.get(name), begin, end)


def _recorded_error(source: TensorSource) -> float | None:
    """Return the recorded largest absolute error of a lossy tensor; None for others."""
    lossy = source.entry.lossy if isinstance(source, FrameSource) else None
    return None if lossy is None else lossy.max_abs_error


def _decode_and_compare(
    where: str, source: TensorSource, original: TensorSource | None, begin: int, end: int
) -> int:
    patterns = source.patterns(begin, end)
    if original is not None and not np.array_equal(patterns, wanted := original.patterns(begin, end)):
        recorded = _recorded_error(source)
        if recorded is None:
            first = begin + int(np.flatnonzero(patterns != wanted)[0])
            raise CorruptionError(f"{where} differs from the original, first at element {first}")
        _check_deviation(where, FLOAT_KINDS[source.dtype.name], patterns, wanted, recorded)
    return patterns.nbytes


def _check_deviation(where: str, kind: int, patterns: Patterns, original: Patterns, recorded: float) -> None:
    differs = patterns != original
    exact, restored = (cpu().to_f32(u[differs], kind).view(np.float32) for u in (original, patterns))
    largest, squares, _ = map(float, cpu().deviation(exact, restored))
    deviation = largest if math.isfinite(squares) else squares  # the maximum ignores NaN, the sum does not
    if not deviation <= recorded:
        raise CorruptionError(
            f"{where} is {deviation:.6g} from the original; the file records {recorded:.6g}"
        )


def check_same_layout(checkpoint: Checkpoint, original: Input) -> None:
    """Check that names, dtypes, shapes, metadata, nesting and shards are those of the original.

    Raises:
        CorruptionError: they differ; the message names the first difference.
    """
    differs = f"{checkpoint.name}: differs from {original.name}"
    _check_same_tensors(checkpoint.tensors, original.tensors, differs)
    if dict(checkpoint.metadata or {}) != dict(original.metadata or {}):
        raise CorruptionError(f"{differs}: the metadata differ")
    index = None if checkpoint.container is None else checkpoint.container.index
    if index is None or original.kind == "safetensors":
        return  # a safetensors file has neither nesting nor shards
    if index.tree != original.tree:
        raise CorruptionError(f"{differs}: the nesting or plain values differ")
    if _shards(index.sharding) != _shards(original.sharding):
        raise CorruptionError(f"{differs}: the shards differ")


def _shards(sharding: Sharding | None) -> tuple[object, ...]:
    return (sharding.shards, sharding.index_file, sharding.index_text) if sharding else ()


def _check_same_tensors(stored: Tensors, original: Tensors, differs: str) -> None:
    for name, source in original.items():
        if name not in stored:
            raise CorruptionError(f"{differs}: tensor {name!r} is missing")
        if _kind(stored[name]) != _kind(source):
            raise CorruptionError(f"{differs}: tensor {name!r} is {_kind(stored[name])}, not {_kind(source)}")
    for name in stored:
        if name not in original:
            raise CorruptionError(f"{differs}: tensor {name!r} is not in the original")


def _kind(source: TensorSource) -> str:
    return f"{source.dtype.name} {list(source.shape)}"
