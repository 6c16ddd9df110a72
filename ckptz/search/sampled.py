"""Predicts size and time of a file from a sample of its tensors.

The sample is written to memory like a file. Of tensors of the same kind it contains some, and of a long
tensor blocks of rows from all parts. Stream sizes are scaled up; headers and tables of a frame are not.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.method import Method, Recipe
from ckptz.codec.restored import HELD_BYTES, CachedTensor
from ckptz.codec.tensor import NO_SIDE_INFORMATION, SideInformation
from ckptz.format.byte_source import MemoryBytes
from ckptz.format.caches import CachedChunks
from ckptz.format.dtypes import DType
from ckptz.format.reader import Container
from ckptz.format.sources import (
    CHUNK_VALUES,
    Patterns,
    Stored,
    TensorSource,
    n_chunks_of,
    n_rows_of,
    tensor_bytes,
)
from ckptz.format.written import Written
from ckptz.kernels.clock import working_seconds
from ckptz.parallel import Workers
from ckptz.write.frame_writer import FilePlan, matching_base
from ckptz.write.job import WriteJob, prepared
from ckptz.write.writer import write_container

SAMPLE: Final = 1 << 23  # values in the sample: 32 MB of fp32, a second or two
MIN_VALUES: Final = 1 << 18  # values of a tensor, so that it is planned like a long one
BLOCKS: Final = 64  # blocks of rows, because rows differ: embeddings are sorted by token frequency
MIN_OF_KIND: Final = 3  # tensors of each kind
CHUNK_BYTES: Final = 90  # record of a chunk, and lane states
Bounds = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Sample(TensorSource):
    """Blocks of rows of a tensor, in memory."""

    dtype: DType
    shape: tuple[int, ...]
    flat: Patterns
    flat_codes: NDArray[np.uint8] | None
    n_codes: int | None
    stored: Stored | None

    @classmethod
    def of(cls, source: TensorSource, bounds: Bounds) -> TensorSource:
        """Read blocks `bounds` of a tensor; returns the tensor itself if they cover it."""
        n_patterns = sum(end - begin for begin, end in bounds)
        if n_patterns == source.n_patterns:
            return source
        cached = CachedTensor(source, "sampled", CachedChunks(HELD_BYTES))  # a chunk may have several blocks
        pieces = [piece for part in bounds for piece in _within_chunks(*part)]
        codes = [] if source.n_codes is None else [cached.codes(*piece) for piece in pieces]
        row = source.n_patterns // n_rows_of(source.shape)
        return cls(
            dtype=source.dtype,
            shape=(n_patterns // row, *source.shape[1:]),
            flat=np.concatenate([cached.patterns(*piece) for piece in pieces]),
            flat_codes=np.concatenate([part for part in codes if part is not None]) if codes else None,
            n_codes=source.n_codes,
            stored=source.stored,
        )

    def patterns(self, begin: int, end: int) -> Patterns:
        return self.flat[begin:end]

    def codes(self, begin: int, end: int) -> NDArray[np.uint8] | None:
        return None if self.flat_codes is None else self.flat_codes[begin:end]


def predict(job: WriteJob, workers: Workers) -> tuple[Written, float]:
    """Predict size and time of writing a file.

    Returns:
        A report with estimated sizes and counts and no content id, and the seconds of writing, without
        those of compiling kernels.

    Raises:
        ConfigError: see `prepared`.
    """
    start = working_seconds()
    with prepared(job) as ready:
        seconds = working_seconds() - start
        # Not timed: loads the kernels, which takes equally long for any file.
        Sampler(ready, SAMPLE >> 4).written(job.config, workers)
        written, sample_seconds = Sampler(ready).written(job.config, workers)
        return written, seconds + sample_seconds


class Sampler:
    """Predicts file sizes of one job for any configuration from a sample of its tensors."""

    def __init__(self, ready: WriteJob, n_values: int = SAMPLE) -> None:
        self._ready = ready
        self._rate = min(1.0, n_values / max(sum(source.n_patterns for source in ready.tensors.values()), 1))
        self._min_values = min(MIN_VALUES, n_values // 4)
        stored = (base.stored for base in ready.bases.values())
        # A delta of a lossy base keeps the base's step of each row, which blocks of the base do not contain.
        self._needs_all = any(form is not None and form.method is not None for form in stored)

    def _bounds(self, source: TensorSource) -> Bounds:
        """Choose the blocks of a tensor, as pattern bounds; equal for tensors of one shape."""
        n, n_rows = source.n_patterns, n_rows_of(source.shape)
        n_sampled = max(self._min_values, round(n * self._rate))
        if self._needs_all or n <= n_sampled or n % n_rows or n_rows < 2 * BLOCKS:
            return [(0, n)]
        row = n // n_rows
        rows = max(n_sampled // row // BLOCKS, 1)
        starts = np.linspace(0, n_rows - rows, BLOCKS).astype(int)
        return [(int(at) * row, int(at + rows) * row) for at in starts]

    def _choose_tensors(self, recipes: Mapping[str, Recipe]) -> dict[str, float]:
        """Choose the tensors of the sample; returns the number of tensors that each represents, by name."""
        job, roles = self._ready, self._ready.roles or {}
        kinds: dict[Any, list[str]] = defaultdict(list)
        for name, source in job.tensors.items():
            has_base = matching_base(source, job.bases.get(name)) is not None
            kinds[source.dtype, source.shape, roles.get(name), recipes[name], has_base].append(name)
        weights = dict[str, float]()
        for names in kinds.values():
            n = sum(end - begin for begin, end in self._bounds(job.tensors[names[0]]))
            share = self._rate * len(names) * job.tensors[names[0]].n_patterns
            n_chosen = min(max(MIN_OF_KIND, round(share / max(n, 1))), len(names))
            chosen = {names[i] for i in np.linspace(0, len(names) - 1, n_chosen).astype(int)}
            weights |= dict.fromkeys(chosen, len(names) / len(chosen))
        return weights

    def written(self, config: Method, workers: Workers) -> tuple[Written, float]:
        """Predict the report on a configuration's file, and the seconds of writing it."""
        job = self._ready
        recipes = replace(job, config=config).recipes()
        weights = self._choose_tensors(recipes)
        needed = {name: recipes[name].context_tensor for name in weights}
        names = [name for name in job.tensors if name in weights or name in needed.values()]
        bounds = {name: self._bounds(job.tensors[name]) for name in names}
        tensors = {name: _Sample.of(job.tensors[name], bounds[name]) for name in names}
        bases = {
            name: _Sample.of(base, bounds[name])
            for name in names
            if (base := matching_base(job.tensors[name], job.bases.get(name))) is not None
        }
        all_guides = job.guides or {}
        guides = {
            name: _sampled(guide, bounds[name], is_whole=tensors[name] is job.tensors[name])
            for name in names
            if (guide := all_guides.get(name, NO_SIDE_INFORMATION)) is not NO_SIDE_INFORMATION
        }
        sampled = replace(job, tensors=tensors, bases=bases, guides=guides, momentum=None)
        plan = FilePlan(sampled, recipes)
        sink, start = io.BytesIO(), working_seconds()
        written = write_container(sink, plan, workers)
        share = tensor_bytes(job.tensors) / max(tensor_bytes(tensors), 1)
        seconds = (working_seconds() - start) * share
        frames = Container(MemoryBytes(sink.getbuffer())).tensors
        n_bytes = (written.stored_bytes - sum(f.entry.n_bytes for f in frames.values())) * (
            len(job.tensors) / max(len(names), 1)
        )
        n_deltas = 0.0
        for name, weight in weights.items():
            header, entry, n = frames[name].header, frames[name].entry, job.tensors[name].n_patterns
            scale = n / max(tensors[name].n_patterns, 1)
            n_more_chunks = n_chunks_of(n) - n_chunks_of(tensors[name].n_patterns)
            header_bytes = entry.n_bytes - header.payload_bytes + CHUNK_BYTES * n_more_chunks
            n_bytes += weight * (header_bytes + header.payload_bytes * scale)
            n_deltas += weight * header.plan.needs_base
        return replace(
            written,
            n_tensors=len(job.tensors),
            original_bytes=tensor_bytes(job.tensors),
            stored_bytes=round(n_bytes),
            content_id="",
            n_deltas=round(n_deltas),
            n_lossy=sum(recipe.is_lossy for recipe in recipes.values()),
        ), seconds


def _sampled(guide: SideInformation, bounds: Bounds, *, is_whole: bool) -> SideInformation:
    """Return the side information of the sampled blocks; inputs along the rows do not apply to blocks."""
    if is_whole:
        return guide
    gradient, second_moment = (
        None if source is None else _Sample.of(source, bounds)
        for source in (guide.gradient, guide.second_moment)
    )
    inputs = None if guide.inputs is None or guide.inputs.axis == 0 else guide.inputs
    return replace(guide, gradient=gradient, second_moment=second_moment, inputs=inputs)


def _within_chunks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Split patterns begin..end where chunks end."""
    while begin < end:
        after = min((begin // CHUNK_VALUES + 1) * CHUNK_VALUES, end)
        yield begin, after
        begin = after
