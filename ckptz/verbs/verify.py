"""`ckptz verify`: check every stored byte and every decoded value, and compare with an original."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckptz.errors import ConfigError, CorruptionError
from ckptz.foreign.inputs import Input, check_not_torch, open_input
from ckptz.format.byte_source import naming_urls, path_of
from ckptz.format.index import Sharding
from ckptz.format.reader import Container, FrameSource, check_empty, frames_of
from ckptz.format.sources import TensorSource, tensor_bytes
from ckptz.format.values import FLOAT_KINDS
from ckptz.kernels import cpu
from ckptz.kernels.clock import working_seconds
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
    start, located, folders = working_seconds(), resolve(path), to_paths(search_path)
    with contextlib.ExitStack() as stack, Workers(jobs) as workers:
        merged: Input | None = None
        originals: Tensors = {}
        if located.shards is not None:  # raises unless the files of all ranks are there
            merged = stack.enter_context(contextlib.closing(open_input(located.shards, folders)))
            checkpoints: Sequence[Checkpoint] = merged.shards
        else:
            weights = located.weights
            file = check_not_torch(located.path) if weights is None else residual_or_file(weights)
            checkpoints = [stack.enter_context(contextlib.closing(open_checkpoint(file, folders)))]
        first, whole = checkpoints[0], merged or checkpoints[0]
        if against is not None:
            original = stack.enter_context(contextlib.closing(open_input(path_of(against), folders)))
            differs = f"{whole.name}: differs from {original.name}"
            _check_same_tensors(whole.tensors, original.tensors, differs)
            if merged is None:
                _check_same_layout(first, original, differs)
                originals = original.tensors  # compared while the file is verified
            else:
                _check_values(merged.name, merged.tensors, original.tensors, workers, SILENT)
        elif first.container is None:
            raise ConfigError(
                f"{path}: a plain safetensors file has no checksums; compare it with --against ORIGINAL"
            )
        n_chunks = 0
        for checkpoint in checkpoints:
            progress.start(checkpoint.name, tensor_bytes(checkpoint.tensors))
            n_chunks += check_stored_bytes(checkpoint, workers)
            _check_values(checkpoint.name, checkpoint.tensors, originals, workers, progress)
        sources = [source for checkpoint in checkpoints for source in checkpoint.tensors.values()]
        return VerifyReport(
            file=first.name if merged is None else str(path),
            chain=tuple(file.name for checkpoint in checkpoints for file in checkpoint.files)[1:],
            n_tensors=len(whole.tensors),
            n_chunks=n_chunks,
            tensor_bytes=sum(source.n_bytes for source in sources),
            content_id=first.content_id(),
            against=None if against is None else str(against),
            n_lossy=sum(_recorded_error(source) is not None for source in sources),
            seconds=working_seconds() - start,
        )


def check_stored_bytes(checkpoint: Checkpoint, workers: Workers) -> int:
    """Check the stored bytes of every chunk of all files of a chain, and count the chunks."""

    def check(frame: FrameSource) -> int:
        n_chunks = len(frame.header.chunks)
        for index in range(n_chunks):
            frame.checked_payload(index)
        return n_chunks

    levels = (level for file in checkpoint.files if isinstance(file, Container) for level in file.levels)
    return sum(workers.map(check, (frame for level in levels for frame in frames_of(level.tensors))))


def _check_values(
    file: str, tensors: Tensors, originals: Tensors, workers: Workers, progress: Progress
) -> None:
    """Decode all chunks of tensors, and compare them with the originals of the same names."""
    for source in tensors.values():
        check_empty(source)
    checks = (
        (f"{file}: tensor {name!r}", source, originals.get(name), begin, end)
        for name, source in tensors.items()
        for begin, end in source.chunk_bounds()
    )
    for n_bytes in workers.map(lambda check: _decode_and_compare(*check), checks):
        progress.advance(n_bytes)


def _recorded_error(source: TensorSource) -> float | None:
    """Return the recorded largest absolute error of a lossy tensor; None for others."""
    lossy = source.entry.lossy if isinstance(source, FrameSource) else None
    return None if lossy is None else lossy.max_abs_error


def _decode_and_compare(
    where: str, source: TensorSource, original: TensorSource | None, begin: int, end: int
) -> int:
    """Decode one chunk, compare it with the original if there is one, and return its bytes."""
    patterns = source.patterns(begin, end)
    if original is not None and not np.array_equal(patterns, wanted := original.patterns(begin, end)):
        recorded = _recorded_error(source)
        if recorded is None:
            first = begin + int(np.flatnonzero(patterns != wanted)[0])
            raise CorruptionError(f"{where} differs from the original, first at element {first}")
        differs, kind = patterns != wanted, FLOAT_KINDS[source.dtype.name]
        exact, restored = (cpu().to_f32(u[differs], kind).view(np.float32) for u in (wanted, patterns))
        largest, squares, _ = map(float, cpu().deviation(exact, restored))
        deviation = (
            largest if math.isfinite(squares) else squares
        )  # the maximum ignores NaN, the sum does not
        if not deviation <= recorded:
            raise CorruptionError(
                f"{where} is {deviation:.6g} from the original; the file records {recorded:.6g}"
            )
    return patterns.nbytes


def _check_same_layout(checkpoint: Checkpoint, original: Input, differs: str) -> None:
    """Check that metadata, nesting and shards are those of the original; `differs` begins the message."""
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
    kinds, wanted = (
        {name: f"{source.dtype.name} {list(source.shape)}" for name, source in tensors.items()}
        for tensors in (stored, original)
    )
    for name, kind in wanted.items():
        if name not in kinds:
            raise CorruptionError(f"{differs}: tensor {name!r} is missing")
        if kinds[name] != kind:
            raise CorruptionError(f"{differs}: tensor {name!r} is {kinds[name]}, not {kind}")
    for name in kinds:
        if name not in wanted:
            raise CorruptionError(f"{differs}: tensor {name!r} is not in the original")
