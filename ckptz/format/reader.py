"""Lazy reading of a `.ckptz` file: header and index when it is opened, frames on demand.

Implements spec/06-container.md#reading.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, TypeGuard

import numpy as np
from numpy.typing import NDArray

from ckptz.errors import CorruptionError, FormatError, MissingBaseError, UnsupportedError, error_context
from ckptz.format.bits import checksum_of_chunk, xxh64
from ckptz.format.byte_source import ByteSource
from ckptz.format.caches import (
    MAX_FRAMES,
    CachedChunks,
    Decoded,
    DecodedBases,
    HeaderCache,
    LastChunks,
    Node,
    gather,
)
from ckptz.format.context_rules import Products
from ckptz.format.decode import Changes, check_stored, decode_chunk, decode_codes, read_changes
from ckptz.format.dtypes import DType, dtype_of, n_elements
from ckptz.format.envelope import BASE_METADATA_BYTES, Envelope, parse_base_metadata, read_envelope
from ckptz.format.frame import PREFIX_BYTES, FrameHeader, header_length
from ckptz.format.index import (
    BASE_METADATA,
    HUFFMAN_FEATURE,
    KEY_VERSION,
    LOW_RANK_FEATURE,
    MAPS_FEATURE,
    OPTIONAL_PREFIX,
    PRODUCTS_FEATURE,
    BaseRef,
    InlineBase,
    TensorEntry,
    group_name,
    read_index,
)
from ckptz.format.plan import Predictor
from ckptz.format.sources import (
    CHUNK_VALUES,
    PATTERN_TYPES,
    ChunkSources,
    JoinedSource,
    Stored,
    TensorSource,
    ViewOf,
)
from ckptz.kernels.floats import Patterns

USUAL_HEADER_BYTES: Final = 256  # size of the first read; longer headers need a second one
MAX_SOURCE_DEPTH: Final = 2  # normative, spec/03-transforms.md#contexts


def required_features(header: FrameHeader) -> dict[str, str]:
    """Return the features that a file with this frame must require, each with what needs it, for messages."""
    plan = header.plan
    has_products = any(isinstance(rule, Products) for rule in plan.rules)
    contents = (
        (MAPS_FEATURE, "has a quantization map", plan.quant_map is not None),
        (LOW_RANK_FEATURE, "is of low rank", plan.predictor is Predictor.LOW_RANK),
        (HUFFMAN_FEATURE, "has Huffman streams", header.has_huffman),
        (PRODUCTS_FEATURE, "has contexts by products", has_products),
    )
    return {feature: what for feature, what, is_present in contents if is_present}


class FrameSource(TensorSource):
    """A tensor of an open file, decoded chunk by chunk."""

    dtype: DType
    shape: tuple[int, ...]

    def __init__(self, container: Container | InlineFrames, entry: TensorEntry) -> None:
        self._container = container
        self.entry = entry
        self.dtype: DType = dtype_of(entry.dtype)
        self.shape = entry.shape

    @property
    def header(self) -> FrameHeader:
        """The header of the frame, checked against the index."""
        return self._container.headers.get(self, self._read_header)

    def naming(self) -> AbstractContextManager[None]:
        """Return a context manager that names the file and the tensor in errors."""
        return error_context(f"{self._container.name}: tensor {self.entry.name!r}")

    def _read_header(self) -> FrameHeader:
        with self.naming():
            read, offset, n_bytes = self._container.read, self.entry.offset, self.entry.n_bytes
            raw = read(offset, max(min(n_bytes, USUAL_HEADER_BYTES), PREFIX_BYTES)).tobytes()
            length = header_length(raw[:PREFIX_BYTES], n_bytes)
            header = FrameHeader.parse(raw[:length] if length <= len(raw) else read(offset, length).tobytes())
            if (header.dtype, header.shape) != (self.dtype, self.shape):
                raise CorruptionError("index and frame disagree on dtype or shape")
            if length + header.payload_bytes != self.entry.n_bytes:
                raise CorruptionError("frame length does not match its chunks")
            if self.entry.checksum not in ("", f"{header.checksum:016x}"):  # empty for a group
                raise CorruptionError("index and frame disagree on the checksum")
            for feature, what in required_features(header).items():
                if feature not in self._container.features:
                    raise CorruptionError(f"{what}, and the feature {feature!r} is not required")
            return header

    @property
    def stored_bytes(self) -> int:
        """Size of the frame in bytes."""
        return self.entry.n_bytes

    @property
    def cache(self) -> CachedChunks:
        """Cache of the file's recently read chunks."""
        return self._container.cache

    @functools.cached_property
    def base(self) -> TensorSource | None:
        """The base tensor that the frame needs, or None."""
        if not self.header.plan.needs_base:
            return None
        base = self._container.bases.get(self.entry.name)
        if base is not None and (base.dtype, base.shape) == (self.dtype, self.shape):
            return base
        ref = self._container.outer_base
        if ref is None:
            raise CorruptionError("the frame needs a base, but the file has no matching one")
        if base is None:
            raise MissingBaseError(f"needs its base {ref.title}, which has no such tensor or is not open")
        raise MissingBaseError(f"has another dtype or shape in its base {ref.title}")

    @property
    def needs_other_file(self) -> bool:
        """True if the frame is decoded from a base in another file."""
        return self._container.outer_base is not None and self.header.plan.needs_base

    def needs(self, only_codes: bool) -> list[Node]:
        plan = self.header.plan
        if plan.is_self_contained:
            return []
        with self.naming():
            if only_codes and plan.quant_map is None:
                return []
            needed: list[Node] = [(self._context_tensor(name), False) for name in plan.context_tensor_names]
            patterns = plan.reads_patterns(only_codes=only_codes)
            if (patterns or plan.reads_base_codes) and isinstance(base := self.base, FrameSource):
                needed.append((base, not patterns))
            return needed

    def decoded(self, index: int, only_codes: bool, dependencies: DecodedBases) -> Decoded:
        if (self, False) in dependencies:
            return dependencies[self, False]
        begin, end = self._bounds(index)
        if only_codes:
            if self.header.plan.quant_map is None:
                return Decoded(None, None)
            payload = self._payload(index)
            with self.naming():
                codes = decode_codes(self.header, index, payload, self._sources(begin, end, dependencies))
                return Decoded(None, codes)
        patterns = np.empty(end - begin, PATTERN_TYPES[self.dtype.pattern_bytes])
        return Decoded(patterns, self._decode(index, patterns, dependencies))

    def _decode(self, index: int, out: Patterns, dependencies: DecodedBases) -> NDArray[np.uint8] | None:
        payload = self._payload(index)
        with self.naming():
            sources = self._sources(*self._bounds(index), dependencies)
            return decode_chunk(self.header, index, payload, sources, out)

    def _sources(self, begin: int, end: int, dependencies: DecodedBases) -> ChunkSources:
        plan = self.header.plan
        if plan.is_self_contained:
            return ChunkSources(begin, end)
        base, ref = self.base, self._container.outer_base
        if isinstance(base, FrameSource):
            base = _DecodedChunk(
                base, dependencies.get((base, False)) or dependencies.get((base, True)) or Decoded(None, None)
            )
        tensors = {name: self._context_tensor(name) for name in plan.context_tensor_names}
        contexts = {
            name: _DecodedChunk(tensor, dependencies[tensor, False]) for name, tensor in tensors.items()
        }
        return ChunkSources(begin, end, base, contexts, f", {ref.title}" if ref else "")

    def _tensor(self, name: str) -> FrameSource:
        """Return another tensor of the file."""
        if name not in self._container.tensors:
            raise CorruptionError(f"it is decoded with tensor {name!r}, which the file does not have")
        return self._container.tensors[name]

    def _context_tensor(self, name: str) -> FrameSource:
        """Return a context tensor of the file, and check its size and the depth of its own dependencies."""
        source = self._tensor(name)
        if source.n_patterns != self.header.n_patterns:
            raise CorruptionError(f"it is decoded with tensor {name!r}, which has another shape")
        if source.source_depth(MAX_SOURCE_DEPTH - 1) >= MAX_SOURCE_DEPTH:
            raise CorruptionError(f"it is decoded with tensor {name!r}, and that with too many others")
        return source

    def source_depth(self, most: int) -> int:
        """Return the length of the chain of context tensors in this file, at most `most` + 1."""
        names = self.header.plan.context_tensor_names
        if not names:
            return 0
        if most == 0:
            return 1
        return 1 + max(self._tensor(name).source_depth(most - 1) for name in names)

    def check_base(self) -> None:
        """Check the header, and that the base and the context tensors exist."""
        with self.naming():
            _ = self.base
            for name in self.header.plan.context_tensor_names:
                self._context_tensor(name)

    def check_vectors(self) -> None:
        """Check outer vectors that no chunk needs; their number in a file is limited."""
        outer = self.header.plan.outer
        if outer is not None:
            with self.naming():
                self._container.headers.charge_idle(outer.n_elements)
                outer.check()

    def _bounds(self, index: int) -> tuple[int, int]:
        """Return (begin, end) in patterns of chunk `index`."""
        begin = index * CHUNK_VALUES
        return begin, min(begin + CHUNK_VALUES, self.header.n_patterns)

    def _payload(self, index: int) -> NDArray[np.uint8]:
        """Read the stored bytes of a chunk."""
        header = self.header
        offset = self.entry.offset + self.entry.n_bytes - header.payload_bytes + header.chunk_offsets[index]
        return self._container.read(offset, header.chunks[index].n_bytes)

    def stored_pieces(self) -> Iterator[NDArray[np.uint8]]:
        """Yield the stored bytes of the header and of each chunk, after checking them."""
        header = self.header
        yield self._container.read(self.entry.offset, self.entry.n_bytes - header.payload_bytes)
        for index in range(len(header.chunks)):
            yield self.checked_payload(index)

    def decode_chunk(self, index: int, out: Patterns) -> NDArray[np.uint8] | None:
        """Decode chunk `index` into `out` [n], and return its codes, if it has a quantization map.

        A chain of frames that only depend on the patterns of their bases is decoded in place, full file
        first: `out` contains the base of a frame when the frame is decoded. Where a frame of the chain has
        other dependencies, two paths may lead to the same frame, so `gather` decodes each frame once.
        """
        chain = [self]
        while len(chain) < MAX_FRAMES and (below := chain[-1]._base_in_place(index)) is not None:
            chain.append(below)
        if not all(isinstance(f, FrameSource) and f.last(index) for f, _ in chain[-1].needs(False)):
            chain = [self]
        chain.reverse()
        codes = chain[0]._decode(index, out, chain[0]._gathered(index))
        for base, frame in itertools.pairwise(chain):
            codes = frame._decode(index, out, {(base, False): Decoded(out, None)})
        return codes

    def _base_in_place(self, index: int) -> FrameSource | None:
        """Return the frame of the base if chunk `index` only needs its patterns and they are not cached."""
        plan, base = self.header.plan, None
        if plan.reads_base_patterns and not plan.reads_base_codes and not plan.context_tensor_names:
            with self.naming():
                base = self.base
        if base is None or not has_own_frame(base) or base.last(index) is not None:
            return None
        return base

    def _gathered(self, index: int) -> DecodedBases:
        """Decode the dependencies of a chunk; those in this file are cached for later reads."""
        cached: dict[Node, Decoded] = {}
        missing: list[Node] = []
        for node in self.needs(False):
            frame, _ = node
            assert isinstance(frame, FrameSource)
            if frame is not self.base:
                cached[node] = Decoded(frame.chunk(index), None)
            elif (last := frame.last(index)) is not None:
                cached[node] = last
            else:
                missing.append(node)
        return cached | dict(gather(index, missing)) if missing else cached

    def last(self, index: int) -> Decoded | None:
        """Return chunk `index` if it is cached for the next file of the run; else None."""
        last = self._container.last
        return None if last is None else last.get(self.entry.name, index, self.header.chunks[index])

    def fill(self, begin: int, out: Patterns) -> None:
        """Decode the chunk that starts at `begin` into `out` [n], or copy it from the cache."""
        chunk = self.cache.peek((self, begin))
        if chunk is None:
            self.decode_chunk(begin // CHUNK_VALUES, out)
        else:
            out[:] = chunk.patterns

    def patterns_and_codes(self, begin: int, end: int) -> tuple[Patterns, NDArray[np.uint8] | None]:
        """Decode patterns and codes of begin..end, the bounds of one chunk."""
        index, newest = begin // CHUNK_VALUES, self._container.last
        if (last := self.last(index)) is not None and last.patterns is not None:
            return last.patterns, last.codes
        patterns = np.empty(end - begin, PATTERN_TYPES[self.dtype.pattern_bytes])
        codes = self.decode_chunk(index, patterns)
        if newest is not None:
            newest.put(self.entry.name, index, self.header.chunks[index], Decoded(patterns, codes))
        return patterns, codes

    @property
    def stored(self) -> Stored:
        """Plan of the frame, and method and settings from the index."""
        lossy = self.entry.lossy
        method, settings = (None, {}) if lossy is None else (lossy.method, lossy.settings)
        return Stored(self.header.plan, method, settings)

    @property
    def n_codes(self) -> int | None:
        """Number of codes of the quantization map, or None without one."""
        quant_map = self.header.plan.quant_map
        return None if quant_map is None else quant_map.n_codes

    def codes(self, begin: int, end: int) -> NDArray[np.uint8] | None:
        """Decode the codes of patterns begin..end, one chunk; None without a quantization map."""
        index = begin // CHUNK_VALUES
        last = self.last(index)
        return (last or self.decoded(index, True, gather(index, self.needs(True)))).codes

    def changes(self, index: int) -> Changes | None:
        """Return the changes of chunk `index` from its base; None if the chunk must be decoded completely."""
        payload = self._payload(index)
        record = self.header.chunks[index]
        begin, end = self._bounds(index)
        with self.naming():
            try:
                return read_changes(self.header, record, payload, end - begin)
            except (FormatError, UnsupportedError) as error:
                check_stored(record, index, payload)
                raise type(error)(f"chunk {index}: {error}") from None

    def holds(self, index: int, patterns: Patterns) -> bool:
        """Return whether patterns have the checksum of chunk `index`."""
        return xxh64(patterns) == self.header.chunks[index].decoded

    def coders(self, index: int) -> set[int]:
        """Return the coders of the streams of chunk `index`."""
        return {stream.coder for stream in self.header.chunks[index].streams}

    def checked_payload(self, index: int) -> NDArray[np.uint8]:
        """Read the stored bytes of a chunk; raise ChecksumError if they are damaged."""
        payload = self._payload(index)
        with self.naming():
            check_stored(self.header.chunks[index], index, payload)
        return payload

    def chunk(self, index: int) -> Patterns:
        """Return the patterns of chunk `index` from the cache; read-only."""
        begin, end = self._bounds(index)
        kept = self.cache.get((self, begin), lambda: Decoded(*self.patterns_and_codes(begin, end)))
        assert kept.patterns is not None
        return kept.patterns

    def patterns(self, begin: int, end: int) -> Patterns:
        """Read patterns begin..end, decoding only the chunks that they overlap."""
        n_patterns = self.header.n_patterns
        first, last = begin // CHUNK_VALUES, -(-end // CHUNK_VALUES)
        whole = (begin, end) == (first * CHUNK_VALUES, min(last * CHUNK_VALUES, n_patterns))
        if whole and last - first == 1:
            # Sequential reads use each chunk once, so it is not cached.
            is_kept = self.cache.peek((self, begin)) is not None
            return self.chunk(first) if is_kept else self.patterns_and_codes(begin, end)[0]
        out = np.empty(end - begin, PATTERN_TYPES[self.dtype.pattern_bytes])
        for index in range(first, last):
            at, chunk = index * CHUNK_VALUES, self.chunk(index)
            low, high = max(begin, at), min(end, at + len(chunk))
            out[low - begin : high - begin] = chunk[low - at : high - at]
        return out


class GroupFrame(FrameSource):
    """The frame of a group: one chunk with the concatenated patterns of its tensors."""

    def __init__(self, container: Container, members: Sequence[TensorEntry]) -> None:
        first = members[0]
        assert first.group is not None
        shape = (sum(n_elements(entry.shape) for entry in members),)
        name = group_name(first.group)
        super().__init__(
            container, TensorEntry(name, first.dtype, shape, first.offset, first.n_bytes, checksum="")
        )
        self.members = [(entry.name, entry.shape) for entry in members]

    def naming(self) -> AbstractContextManager[None]:
        first, _ = self.members[0]
        return error_context(f"{self._container.name}: {len(self.members)} tensors, first {first!r}")

    def _read_header(self) -> FrameHeader:
        header = super()._read_header()
        if header.plan.quant_map is not None or header.plan.context_tensor_names:
            with self.naming():
                raise CorruptionError("the frame of a group has a quantization map or names a tensor")
        return header

    @functools.cached_property
    def base(self) -> TensorSource | None:
        """The concatenated base tensors of the members, or None if the frame needs no base."""
        if not self.header.plan.needs_base:
            return None
        base, ref = group_base(self.dtype, self.members, self._container.bases), self._container.outer_base
        if base is not None:
            return base
        if ref is None:
            raise CorruptionError("the group needs a base, but the file has no matching one")
        raise MissingBaseError(f"needs its base {ref.title}, which has no such group or is not open")


def group_base(
    dtype: DType, members: Sequence[tuple[str, tuple[int, ...]]], bases: Mapping[str, TensorSource]
) -> TensorSource | None:
    """Return the base of a group: a group of the same members, or plain tensors of their names, or None."""
    candidates = [bases.get(name) for name, _ in members]
    first = candidates[0]
    while isinstance(first, ViewOf):
        first = first.source
    if isinstance(first, GroupMember):
        group = first.group
        return group if (group.dtype, group.members) == (dtype, members) else None
    parts = [
        base
        for base, (_, shape) in zip(candidates, members, strict=True)
        if base is not None and (base.dtype, tuple(base.shape)) == (dtype, shape) and base.stored is None
    ]
    return JoinedSource.of(parts) if len(parts) == len(members) else None


class GroupMember(FrameSource):
    """A tensor in a group; its patterns start at `begin` in the frame of the group."""

    def __init__(self, container: Container, entry: TensorEntry, group: GroupFrame, begin: int) -> None:
        super().__init__(container, entry)
        self.group = group
        self._place = slice(begin, begin + super().n_patterns)
        self._checksum = int(entry.checksum, 16)

    @property
    def n_patterns(self) -> int:
        """Number of patterns of the tensor, from its slice of the group as that is fast."""
        return self._place.stop - self._place.start

    @property
    def header(self) -> FrameHeader:
        """A header with dtype, shape and plan; the chunks belong to the group."""
        return FrameHeader(self.dtype, self.shape, self.group.header.plan, ())

    @property
    def base(self) -> TensorSource | None:
        """The base of the whole group, or None."""
        return self.group.base

    @property
    def stored_bytes(self) -> int:
        """The tensor's share of the size of the group in bytes, by patterns; shares add up to the size."""
        n_bytes, n_patterns = self.entry.n_bytes, self.group.n_patterns
        before, until = (n_bytes * at // n_patterns for at in (self._place.start, self._place.stop))
        return until - before

    def slice_of(self, patterns: Patterns) -> Patterns:
        """Return the tensor's slice of the patterns of its group, after checking its checksum."""
        values = patterns[self._place]
        if not self.holds(0, values):
            with self.naming():
                raise CorruptionError("the values in its group do not match the checksum in the index")
        return values

    def holds(self, index: int, patterns: Patterns) -> bool:
        """Return whether patterns have the tensor's checksum."""
        return checksum_of_chunk(patterns) == self._checksum

    def coders(self, index: int) -> set[int]:
        """Return the coders of the streams of the group."""
        return self.group.coders(index)

    def needs(self, only_codes: bool) -> list[Node]:
        return [] if only_codes else [(self.group, False)]

    def decoded(self, index: int, only_codes: bool, dependencies: DecodedBases) -> Decoded:
        if only_codes:
            return Decoded(None, None)
        patterns = dependencies[self.group, False].patterns
        assert patterns is not None
        return Decoded(self.slice_of(patterns), None)

    def decode_chunk(self, index: int, out: Patterns) -> None:
        """Copy the patterns into `out`."""
        out[:] = self.chunk(index)

    def chunk(self, index: int) -> Patterns:
        """Return all patterns from the cache; read-only."""
        return self.slice_of(self.group.chunk(index))

    def patterns(self, begin: int, end: int) -> Patterns:
        return self.chunk(0)[begin:end]

    def patterns_and_codes(self, begin: int, end: int) -> tuple[Patterns, None]:
        """Return the patterns; the tensor has no codes."""
        return self.patterns(begin, end), None

    def last(self, index: int) -> None:
        """Return None: the cache has the chunk of the group."""

    def changes(self, index: int) -> None:
        """Return None: the group is decoded as a whole."""

    def checked_payload(self, index: int) -> NDArray[np.uint8]:
        """Read the stored bytes of the group; raise ChecksumError if they are damaged."""
        return self.group.checked_payload(index)


def _sources_of(container: Container, entries: Sequence[TensorEntry]) -> dict[str, FrameSource]:
    """Return the sources of a file's tensors by name, in stored order."""
    members: dict[int, list[TensorEntry]] = {}
    for entry in entries:
        if entry.group is not None:
            members.setdefault(entry.group, []).append(entry)
    groups = {number: GroupFrame(container, group) for number, group in members.items()}
    sources, ends = dict[str, FrameSource](), dict.fromkeys(groups, 0)
    for entry in entries:
        if entry.group is None:
            sources[entry.name] = FrameSource(container, entry)
        else:
            member = GroupMember(container, entry, groups[entry.group], ends[entry.group])
            ends[entry.group] += member.n_patterns
            sources[entry.name] = member
    return sources


def has_own_frame(source: TensorSource) -> TypeGuard[FrameSource]:
    """Return whether a tensor has a frame that it does not share."""
    return isinstance(source, FrameSource) and not isinstance(source, GroupMember)


def frames_of(tensors: Mapping[str, FrameSource]) -> list[FrameSource]:
    """Return the distinct frames of tensors; members of a group share one."""
    frames = (frame.group if isinstance(frame, GroupMember) else frame for frame in tensors.values())
    return list(dict.fromkeys(frames))


@dataclass(frozen=True, slots=True)
class _DecodedChunk(ViewOf):
    """A decoded chunk of a frame as a tensor source."""

    chunk: Decoded

    def patterns(self, begin: int, end: int) -> Patterns:
        assert self.chunk.patterns is not None
        return self.chunk.patterns

    def codes(self, begin: int, end: int) -> NDArray[np.uint8] | None:
        return self.chunk.codes


class InlineFrames:
    """The frames of an inline base, which may be deltas to the next inline base."""

    outer_base: BaseRef | None = None
    last: LastChunks | None = None

    def __init__(
        self, container: Container, level: int, record: InlineBase, bases: Mapping[str, TensorSource]
    ) -> None:
        self.name = f"{container.name}: inline base {level}"  # for messages
        self.record = record  # its entry in the index
        self.bases = bases  # tensors of the next inline base by name
        self.features = container.features
        self.cache, self.headers = container.cache, container.headers
        self.read = container.read
        self.tensors = {entry.name: FrameSource(self, entry) for entry in record.tensors}  # in stored order


class Container:
    """An open `.ckptz` file: its index, required features, and sources of its tensors by name."""

    def __init__(self, source: ByteSource, envelope: Envelope | None = None) -> None:
        self._source = source
        self.name = source.name  # for messages
        self.stored_bytes = source.size  # of the file
        self.cache = CachedChunks()
        self.headers = HeaderCache()
        self.bases: Mapping[str, TensorSource] = {}  # by name; for a delta set by `store.resolve`
        self.last: LastChunks | None = None  # cache for the next file of a run, set by its writer
        envelope = read_envelope(source) if envelope is None else envelope
        self._data_offset = envelope.data_offset
        self._sections = {r.name: r for r in envelope.regions if r.name.startswith(OPTIONAL_PREFIX)}
        with error_context(self.name):
            self.index, self.features = read_index(envelope, self.read)
        self.version = (envelope.metadata or {})[KEY_VERSION]  # format version of the file
        self.tensors = _sources_of(self, self.index.tensors)
        self.outer_base = self.index.base  # reference to a base in another file, or None
        self.inline = list[InlineFrames]()  # inline bases, nearest first; each is the base of the one before
        for level, record in reversed(list(enumerate(self.index.inline or (), 1))):
            self.inline.insert(0, InlineFrames(self, level, record, self.bases))
            self.bases = self.inline[0].tensors

    @property
    def levels(self) -> list[Container | InlineFrames]:
        """The file itself, then its inline bases, nearest first."""
        return [self, *self.inline]

    def read(self, offset: int, n_bytes: int) -> NDArray[np.uint8]:
        """Read bytes after the header, uint8 [n_bytes]."""
        return self._source.read(self._data_offset + offset, n_bytes)

    def base_metadata(self) -> int | None:
        """Return the recorded checksum of a plain base's metadata, or None.

        Raises:
            ChecksumError: the section is damaged.
        """
        region = self._sections.get(BASE_METADATA)
        if region is None:
            return None
        n_bytes = min(region.end - region.begin, BASE_METADATA_BYTES + 1)
        section = self.read(region.begin, n_bytes).tobytes()
        with error_context(self.name):
            return parse_base_metadata(section)

    def share_caches(self, other: Container) -> None:
        """Use the caches of another file of the same chain, so that their limit applies to both."""
        for level in self.levels:
            level.cache, level.headers = other.cache, other.headers

    def close(self) -> None:
        """Close the file and clear its caches."""
        self.cache.clear()
        self.headers.clear()
        self._source.close()


def check_empty(source: TensorSource) -> None:
    """Check the frame of an empty tensor, which has no chunks to decode; do nothing for other tensors.

    Raises:
        LimitError: the empty tensors of the file have more than 2^24 elements in outer vectors.
    """
    if isinstance(source, FrameSource) and not source.n_patterns:
        source.check_base()
        source.check_vectors()
