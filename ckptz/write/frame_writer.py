"""Streams frames into a file: plans and encodes on threads, writes in order, a few chunks in memory."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import BinaryIO, Final, Self

import msgspec

from ckptz.codec.chunk import Deviation, EncodedChunk, encode_chunk
from ckptz.codec.effort import Effort, effort_of
from ckptz.codec.method import Recipe, Setting
from ckptz.codec.moved import MovedSource
from ckptz.codec.restored import HELD_BYTES, CachedTensor, RestoredTensor
from ckptz.codec.tensor import NO_SIDE_INFORMATION, Bounds, MapFunction, TensorStatistics, TensorToEncode
from ckptz.codec.tensor_plan import TensorPlan
from ckptz.format.bits import xxh64
from ckptz.format.caches import CachedChunks, LRUCache
from ckptz.format.dtypes import DType
from ckptz.format.frame import ChunkRecord, FrameHeader, header_bytes, pack_plan
from ckptz.format.index import LossyRecord, TensorEntry
from ckptz.format.plan import exact_plan
from ckptz.format.reader import FrameSource, GroupMember
from ckptz.format.sources import (
    CHUNK_VALUES,
    ChunkSources,
    TensorSource,
    chunk_bounds,
)
from ckptz.guidance.momentum import Momentum
from ckptz.parallel import SMALL_VALUES, Workers
from ckptz.write.job import WriteJob

Tensors = Mapping[str, TensorSource]
NO_TENSORS: Final[Tensors] = MappingProxyType({})
Progress = Callable[[int], None]
LEAST_BATCH: Final = CHUNK_VALUES // 4  # patterns
BATCHES: Final = 4  # minimum number per thread, so that no thread runs out of work early
SMALL_VALUES_TOGETHER: Final = 1 << 13  # like `SMALL_VALUES`, for chunks that are encoded in one batch
MOVED: Final = "moved"  # key in records: the applied share of the momentum correction
MAX_PLANS: Final = 32  # twice the default number of threads, as each may plan a pair of tensors
MOST_IN_BATCH: Final = 64  # tensors in a batch at most, since each has a header


@dataclass(frozen=True, slots=True)
class Earlier:
    """A file with the same tensors, bases and side information, written with another configuration."""

    tensors: Mapping[str, FrameSource]  # its frames by name, open while the next file is written
    recipes: Mapping[str, Recipe]  # recipe of each tensor
    notes: Mapping[str, str]  # the writer's notes on tensors

    def reusable(self, recipes: Mapping[str, Recipe]) -> dict[str, FrameSource]:
        """Return the frames that other recipes would encode to the same bytes, by name.

        A frame depends on the recipe of its tensor, and on that of the tensor of its contexts.
        """
        kept = {name for name, frame in self.tensors.items() if not isinstance(frame, GroupMember)}
        same = {name for name in kept & recipes.keys() if self.recipes[name] == recipes[name]}
        return {
            name: self.tensors[name]
            for name in same
            if (context_tensor := recipes[name].context_tensor) is None or context_tensor in same
        }


# A chunk to encode: name of its tensor, the tensor's plan if there is one already, bounds and base.
_Chunk = tuple[str, TensorPlan | None, ChunkSources]


def matching_base(source: TensorSource, base: TensorSource | None) -> TensorSource | None:
    """Return the base if it has the dtype and shape of the tensor, else None."""
    fits = base is not None and (base.dtype, base.shape) == (source.dtype, source.shape)
    return base if fits else None


@dataclass(slots=True)
class FilePlan:
    """The recipes of all tensors of a file and the state that their plans share, for writing it once.

    Attributes:
        job: the file to write, with roles and side information (see `prepared`).
        recipes: recipe of each tensor by name.
        earlier: a file of the same job from which unchanged frames are copied.
        draw: number that varies the dither seeds; if it is not 0, no lossy frame is copied.
        tensors: tensors by name, in stored order, with momentum correction.
        effort: the effort, which the earlier file was also written with.
        notes: notes on the momentum correction by tensor.
    """

    job: WriteJob
    recipes: Mapping[str, Recipe]
    earlier: Earlier | None = None
    draw: int = 0
    tensors: dict[str, TensorSource] = field(init=False)
    effort: Effort = field(init=False)
    notes: dict[str, str] = field(default_factory=dict, init=False)
    _chunks: CachedChunks = field(init=False)
    needed: frozenset[str] = field(init=False)  # names of the tensors that contexts of others depend on
    # Their plans. A thread waits only while another one plans the same tensor. No deadlock is possible,
    # because these tensors depend on no others.
    _plans: LRUCache[TensorPlan] = field(init=False)
    # Plans of first moments, which the momentum correction needs: small, as they are few vectors.
    _preplanned: dict[str, TensorPlan] = field(default_factory=dict, init=False)
    _movement: float | None = field(default=None, init=False)  # mean over all tensors with joint recipes
    _measured: dict[str, dict[Bounds, TensorStatistics]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.tensors, self.effort = dict(self.job.tensors), effort_of(self.job.effort)
        self._chunks = CachedChunks(HELD_BYTES)
        sources = (self.recipes[name].context_tensor for name in self.tensors)
        self.needed = frozenset(name for name in sources if name is not None)
        self._plans = LRUCache(MAX_PLANS, lambda _: 1)

    @classmethod
    def of(cls, job: WriteJob, earlier: Earlier | None = None, draw: int = 0) -> Self:
        """Create the plan of a prepared job, with the recipes of its method."""
        return cls(job, job.recipes(), earlier, draw)

    def prepare(self, run: MapFunction) -> dict[str, FrameSource]:
        """Apply the momentum correction and measure movement; return the frames to copy, by name."""
        reusable = {} if self.earlier is None else self.earlier.reusable(self.recipes)
        if self.draw:
            reusable = {name: frame for name, frame in reusable.items() if not self.recipes[name].is_lossy}
        if self.job.momentum is not None:
            self._correct(self.job.momentum, run)
        self._measure(run)
        return reusable

    def _measure(self, run: MapFunction) -> None:
        """Measure the mean movement of all tensors whose recipes depend on it."""
        recipes = self.recipes
        joint = [
            name for name, source in self.tensors.items() if recipes[name].is_joint and source.n_patterns
        ]
        moves = run(self._movement_of, joint)
        sizes = (self.tensors[name].n_patterns for name in joint)
        pairs = [(moved, n) for moved, n in zip(moves, sizes, strict=True) if moved is not None]
        n_patterns = sum(n for _, n in pairs)
        self._movement = sum(moved * n for moved, n in pairs) / n_patterns if n_patterns else None

    def _movement_of(self, name: str) -> float | None:
        """Return the movement of a tensor since the newest file of the run, by its recipe."""
        tensor = self._tensor_to_encode(name, self.base(name))
        if tensor.newest is not None:
            tensor = replace(tensor, base=tensor.newest, measured={})
        return self.recipes[name].movement(tensor)

    def _correct(self, momentum: Momentum, run: MapFunction) -> None:
        """Apply the momentum correction to weights, after planning the first moments that it depends on."""
        recipes = self.recipes
        names = [name for name in momentum.moments() if recipes[name].is_lossy]

        def plan(name: str) -> TensorPlan:
            return self._planned(name, self.base(name), self.context_tensors(name), map)

        self._preplanned = dict(zip(names, run(plan, names), strict=True))
        restored = {
            name: RestoredTensor(self.tensors[name], None, encoding)
            for name, encoding in self._preplanned.items()
        }
        moved, notes = momentum.moved(restored)
        self.tensors |= {name: source for name, source in moved.items() if recipes[name].is_lossy}
        self.notes = {name: note for name, note in notes.items() if recipes[name].is_lossy}

    def base(self, name: str) -> TensorSource | None:
        """Return the base of a tensor, with a cache if it is read several times."""
        base = matching_base(self.tensors[name], self.job.bases.get(name))
        recipe = self.recipes[name]
        is_read_once = recipe.is_batched and base is not None and base.n_patterns <= CHUNK_VALUES
        if base is None or is_read_once or (not recipe.is_lossy and base.n_bytes > HELD_BYTES // 2):
            return base
        return CachedTensor(base, f"base of {name}", self._chunks)

    def batch_key(self, chunk: _Chunk) -> tuple[Recipe, DType, bool] | None:
        """Return the key of the batch that a tensor can be encoded in, or None if it is encoded alone."""
        name, encoding, sources = chunk
        recipe = self.recipes[name]
        is_alone = encoding is not None or not recipe.is_batched
        return None if is_alone else (recipe, self.tensors[name].dtype, sources.base is not None)

    def encoding(
        self, name: str, base: TensorSource | None, context_tensors: Tensors, run: MapFunction = map
    ) -> TensorPlan:
        """Plan a tensor."""
        if name in self._preplanned:
            return self._preplanned[name]
        make = functools.partial(self._planned, name, base, context_tensors, run)
        return self._plans.get(name, make) if name in self.needed else make()

    def _planned(
        self, name: str, base: TensorSource | None, context_tensors: Tensors, run: MapFunction
    ) -> TensorPlan:
        recipe = self.recipes[name]
        encoding = recipe.plan(self._tensor_to_encode(name, base, context_tensors, run))
        prunes = recipe.partitions is not None and recipe.partitions.prune > 0
        return replace(encoding, huffman_margin=self.effort.huffman_margin, counts_zeros=prunes)

    def _tensor_to_encode(
        self,
        name: str,
        base: TensorSource | None,
        context_tensors: Tensors = NO_TENSORS,
        run: MapFunction = map,
    ) -> TensorToEncode:
        guide, against = (self.job.guides or {}).get(name, NO_SIDE_INFORMATION), self.job.base
        key = f"{'' if against is None else against.content_id}\n{name}{self.draw or ''}"
        seed = xxh64(key.encode()) & 0xFFFFFFFF
        return TensorToEncode(
            source=self.tensors[name],
            base=base,
            newest=matching_base(self.tensors[name], self.job.newest.get(name)),
            was_restored=self.job.was_restored,
            guide=guide,
            context_tensors=context_tensors,
            run=run,
            effort=self.effort,
            seed=seed,
            movement=self._movement,
            measured=self._measured.setdefault(name, {}),
        )

    def context_tensors(self, name: str, run: MapFunction = map) -> Tensors:
        """Return the tensors that a tensor's contexts depend on, as the file restores them."""
        wanted = self.recipes[name].context_tensor
        if wanted is None:
            return {}
        base = self.base(wanted)
        return {wanted: self.restored(wanted, base, self.encoding(wanted, base, {}, run))}

    def restored(self, name: str, base: TensorSource | None, encoding: TensorPlan) -> CachedTensor:
        """Return a planned tensor as the file restores it, with a cache."""
        return CachedTensor(RestoredTensor(self.tensors[name], base, encoding), name, self._chunks)


def _chunks(plan: FilePlan, names: Iterable[str], workers: Workers) -> Iterator[_Chunk]:
    """Yield the chunks to encode; tensors with one chunk are planned by the thread that encodes them."""
    for name in names:
        n_patterns = plan.tensors[name].n_patterns
        base, encoding, context_tensors = plan.base(name), None, NO_TENSORS
        if n_patterns > CHUNK_VALUES:
            context_tensors = plan.context_tensors(name, workers.map)
            encoding = plan.encoding(name, base, context_tensors, workers.map)
        for begin, end in chunk_bounds(n_patterns):
            yield name, encoding, ChunkSources(begin, end, base, context_tensors)


def _batches(chunks: Iterable[_Chunk], most: int) -> Iterator[list[_Chunk]]:
    """Group small chunks into batches of up to `most` patterns, which saves calls and thread switches."""
    batch, total = list[_Chunk](), 0
    for chunk in chunks:
        n_patterns = chunk[-1].end - chunk[-1].begin
        if batch and (total + n_patterns > most or len(batch) == MOST_IN_BATCH):
            yield batch
            batch, total = [], 0
        batch.append(chunk)
        total += n_patterns
    yield batch  # empty only where there are no chunks


def _is_small(plan: FilePlan, batch: Sequence[_Chunk]) -> bool:
    """Return whether the chunks of a batch are so small that Python's overhead dominates."""
    is_together = all(plan.batch_key(chunk) for chunk in batch)
    n_patterns = sum(sources.end - sources.begin for *_, sources in batch)
    return n_patterns < len(batch) * (SMALL_VALUES_TOGETHER if is_together else SMALL_VALUES)


def _encode_all(plan: FilePlan, batch: Sequence[_Chunk]) -> list[tuple[TensorPlan, EncodedChunk]]:
    keys, encoded = [plan.batch_key(chunk) for chunk in batch], dict[int, tuple[TensorPlan, EncodedChunk]]()
    for key in dict.fromkeys(keys):
        which = [k for k, other in enumerate(keys) if other == key]
        chunks = [batch[k] for k in which]
        if key is None:
            encoded |= {k: _encode(plan, chunk) for k, chunk in zip(which, chunks, strict=True)}
        else:
            tensors = [plan.tensors[name] for name, *_ in chunks]
            bases = [sources.base for *_, sources in chunks if sources.base is not None]
            together = key[0].plan_and_encode(tensors, bases, plan.effort)
            encoded |= zip(which, together, strict=True)
    return [encoded[k] for k in range(len(batch))]


def _encode(plan: FilePlan, chunk: _Chunk) -> tuple[TensorPlan, EncodedChunk]:
    name, encoding, sources = chunk
    if encoding is None:
        sources.context_tensors = plan.context_tensors(name)
        encoding = plan.encoding(name, sources.base, sources.context_tensors)
    restored = plan.restored(name, sources.base, encoding) if name in plan.needed else None
    return encoding, encode_chunk(plan.tensors[name], encoding, sources, restored)


def _lossy_record(
    plan: FilePlan, name: str, encoding: TensorPlan, header: FrameHeader, deviation: Deviation
) -> LossyRecord:
    recipe, role, source = plan.recipes[name], (plan.job.roles or {})[name], plan.tensors[name]
    moved: dict[str, Setting] = {}
    if isinstance(source, MovedSource):
        moved[MOVED] = _brief(source.share)
    return LossyRecord(
        method=recipe.name,
        role=role.role,
        layer_type=role.layer_type,
        settings=recipe.settings() | dict(encoding.recorded) | moved,
        n_pruned=deviation.n_zeros,
        n_protected=deviation.n_escaped,
        # The difference of two floats of very different size is rounded in double, so the bound is rounded
        # up.
        max_abs_error=_brief(math.nextafter(deviation.largest, math.inf)) if deviation.largest else 0.0,
        rms_error=_brief(math.sqrt(deviation.error / header.n_patterns)),
        rms=_brief(math.sqrt(deviation.power / header.n_patterns)),
        promise="none",
    )


def _brief(value: float) -> float:
    """Round up to seven digits, so that bounds hold; more digits would take a tenth of a delta's index."""
    brief = float(f"{value:.6e}")
    return brief if brief >= value else float(f"{value * (1 + 1e-6):.6e}")


def write_frames(
    sink: BinaryIO, data_offset: int, plan: FilePlan, workers: Workers, progress: Progress | None
) -> Iterator[tuple[TensorEntry, FrameHeader, str]]:
    """Write all frames from the position of `sink` on; yields index entry, header and note of each."""
    offset, reusable = sink.tell() - data_offset, plan.prepare(workers.map)
    fresh = [name for name in plan.tensors if name not in reusable]
    share = sum(plan.tensors[name].n_patterns for name in fresh) // (BATCHES * workers.jobs)
    batches = _batches(_chunks(plan, fresh, workers), min(max(share, LEAST_BATCH), CHUNK_VALUES))
    encode, is_small = functools.partial(_encode_all, plan), functools.partial(_is_small, plan)
    encoded = itertools.chain.from_iterable(workers.map(encode, batches, is_small))
    for name, source in plan.tensors.items():
        if name in reusable:
            frame = reusable[name]
            entry, header = _copy_frame(sink, offset, name, frame), frame.header
            note = "" if plan.earlier is None else plan.earlier.notes.get(name, "")
            if progress:
                progress(source.n_bytes)
        else:
            encoding, header, deviation = _write_frame(sink, data_offset + offset, source, encoded, progress)
            n_bytes = sink.tell() - data_offset - offset
            lossy = None
            if deviation is not None:
                lossy = _lossy_record(plan, name, encoding, header, deviation)
            checksum = f"{header.checksum:016x}"
            entry = TensorEntry(name, source.dtype.name, header.shape, offset, n_bytes, checksum, lossy)
            note = encoding.note or plan.notes.get(name, "")
        yield entry, header, note
        offset += entry.n_bytes


def _copy_frame(sink: BinaryIO, offset: int, name: str, source: FrameSource) -> TensorEntry:
    """Copy a frame from another file to the position of the sink, `offset` bytes after the header."""
    for piece in source.stored_pieces():
        sink.write(piece.data)
    return msgspec.structs.replace(source.entry, name=name, offset=offset)


def _write_frame(
    sink: BinaryIO,
    start: int,
    source: TensorSource,
    encoded: Iterator[tuple[TensorPlan, EncodedChunk]],
    progress: Progress | None,
) -> tuple[TensorPlan, FrameHeader, Deviation | None]:
    """Write the chunks of one frame, then its header before them."""
    shape = tuple(source.shape)
    if 0 < source.n_patterns <= CHUNK_VALUES:
        encoding, chunk = next(encoded)
        header = FrameHeader(source.dtype, shape, encoding.plan, (chunk.record,))
        sink.writelines((header.pack(), *chunk.streams))
        if progress:
            progress(source.n_bytes)
        return encoding, header, chunk.deviation
    encoding, packed_plan = TensorPlan(exact_plan(source.dtype)), b""
    records: list[ChunkRecord] = []
    deviations: list[Deviation] = []
    for begin, end in chunk_bounds(source.dtype.n_patterns(shape)):
        encoding, chunk = next(encoded)
        if not records:
            packed_plan = pack_plan(source.dtype, shape, encoding.plan)
            sink.seek(start + header_bytes(source.dtype, shape, encoding.plan, packed_plan))
        sink.writelines(chunk.streams)
        records.append(chunk.record)
        if chunk.deviation is not None:
            deviations.append(chunk.deviation)
        if progress:
            progress((end - begin) * source.dtype.pattern_bytes)
    header = FrameHeader(source.dtype, shape, encoding.plan, tuple(records))
    packed = header.pack(packed_plan)
    sink.seek(start)
    sink.write(packed)
    sink.seek(start + len(packed) + header.payload_bytes)
    return encoding, header, functools.reduce(operator.add, deviations) if deviations else None
