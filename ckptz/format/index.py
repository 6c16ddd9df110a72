"""The index of a `.ckptz` file. Implements spec/06-container.md#index.

Strict JSON, plain or deflated, checked against the header of the file. It does not affect the decoding of
frames.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from numpy.typing import NDArray

from ckptz._version import __version__
from ckptz.errors import ChecksumError, ConfigError, CorruptionError, FormatError, UnsupportedError
from ckptz.format.dtypes import dtype_of
from ckptz.format.envelope import (
    Count,
    Envelope,
    Region,
    as_written,
    check_number,
    is_text_map,
    strict_json,
    tensor_checksum,
)
from ckptz.format.sources import TensorSource

FORMAT_NAME: Final = "ckptz"
FORMAT_VERSION: Final = "1.3"
WRITER: Final = f"ckptz {__version__}"  # `Index.writer` of new files
READABLE: Final = re.compile(r"1\.(0|[1-9][0-9]*)")  # the features decide, not the minor version
RESERVED_PREFIX: Final = "__ckptz__"
INDEX_NAME: Final = "__ckptz__.index"
OPTIONAL_PREFIX: Final = "__ckptz__.optional."  # sections that a reader may skip
BASE_METADATA: Final = f"{OPTIONAL_PREFIX}base-metadata"  # spec/07-chain.md#metadata-of-a-plain-base
MAX_INDEX_BYTES: Final = 64 << 20
LOSSLESS_FEATURE: Final = "lossless"  # every file requires it
DELTA_FEATURE: Final = "delta"
MAPS_FEATURE: Final = "maps"
INLINE_FEATURE: Final = "inline"
LOW_RANK_FEATURE: Final = "low-rank"
HUFFMAN_FEATURE: Final = "huffman"
GROUPS_FEATURE: Final = "groups"
PRODUCTS_FEATURE: Final = "products"
MAX_GROUP: Final = 1 << 16  # patterns, normative, spec/06-container.md#groups
# Features later than version 1.0 and the version that introduced each, newest first.
VERSION_OF_FEATURE: Final = {
    PRODUCTS_FEATURE: FORMAT_VERSION,
    GROUPS_FEATURE: "1.2",
    HUFFMAN_FEATURE: "1.2",
    LOW_RANK_FEATURE: "1.1",
}
KNOWN_FEATURES: Final = frozenset(
    {LOSSLESS_FEATURE, DELTA_FEATURE, MAPS_FEATURE, INLINE_FEATURE, *VERSION_OF_FEATURE}
)
MAX_INLINE: Final = 64  # normative, spec/07-chain.md#depth

KEY_FORMAT, KEY_VERSION = "ckptz.format", "ckptz.version"
KEY_FEATURES, KEY_DIGEST = "ckptz.required_features", "ckptz.index_sha256"


# Bounded on parsing, like `Count`, so that arithmetic cannot overflow or take long.
Amount = Annotated[float, msgspec.Meta(ge=0)]
Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]  # spec/05-frame.md#shape


Setting = Count | float | bool | str
Promise = Literal["none", "rmse", "quality-drop", "resume-gap"]
# Metric of a record after one of a resumed loss: its difference, divided by the gain of a training step.
STEPS_LOST: Final = "steps_lost"
CHANGES: Final = "_changes_by_"  # joins a metric and its unit; see spec/06-container.md
Read = Callable[[int, int], NDArray[Any]]
_CHECKSUM: Final = re.compile("[0-9a-f]{16}")


class LossyRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of a lossy tensor, and the measured errors of its decoded values.

    `promise` is the kind of limit that the writer kept, "none" for fixed settings. `settings` are those of
    the method. Errors are absolute; `rms` is the root mean square of the original values.
    """

    method: str
    role: str
    layer_type: str
    settings: dict[str, Setting]
    n_pruned: Count
    n_protected: Count
    max_abs_error: Amount
    rms_error: Amount
    rms: Amount
    promise: str


class QualityRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A quality budget of a file, and its measurement on the decoded tensors.

    `metric` is a name, never code to run. `max_drop` is a share of `exact` if `is_relative`, else an absolute
    difference; `exact` and `measured` are the values for the original and for the decoded tensors.
    """

    promise: str
    metric: str
    max_drop: Amount
    is_relative: bool
    lower_is_better: bool
    exact: float
    measured: float
    is_met: bool
    date: str
    data_digest: str | None = None


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A tensor; `offset` and `n_bytes` locate its frame, as in the envelope.

    Tensors with the same `group` share one frame, in the order of their entries.
    """

    name: str
    dtype: str
    shape: Shape
    offset: Count
    n_bytes: Count
    checksum: str
    lossy: LossyRecord | None = None
    group: Count | None = None


class BaseRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Reference to the base of a delta; `file` is a hint, a single path component."""

    content_id: str
    file: str
    depth: Count

    @property
    def title(self) -> str:
        """Description of the base for messages."""
        return f"{self.file!r} with content id {self.content_id[:16]}"


class InlineBase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A base inside the file: the tensors that are needed, and its original name for information."""

    content_id: str
    file: str
    tensors: Annotated[tuple[TensorEntry, ...], msgspec.Meta(min_length=1)]


InlineBases = Annotated[tuple[InlineBase, ...], msgspec.Meta(min_length=1, max_length=MAX_INLINE)]


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One file of a sharded checkpoint, with its tensors in order and its metadata."""

    file: str
    tensors: tuple[str, ...]
    metadata: dict[str, str] | None = None


class Sharding(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The layout of a folder: shards, the text of its `*.index.json`, and paths of its other files."""

    shards: tuple[Shard, ...]
    index_file: str | None = None
    index_text: str | None = None
    carried: tuple[str, ...] = ()


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The content of the index."""

    writer: str
    content_id: str
    tensors: tuple[TensorEntry, ...]
    metadata: dict[str, str] | None = None
    base: BaseRef | None = None
    inline: InlineBases | None = None
    step: Count | None = None
    sharding: Sharding | None = None
    tree: dict[str, Any] | None = None
    quality: tuple[QualityRecord, ...] = ()

    @property
    def depth(self) -> int:
        """Chain length: deltas between this file and its full file, inline or in other files."""
        return self.base.depth if self.base else len(self.inline or ())

    def placed(self) -> Iterator[tuple[str, TensorEntry]]:
        """Yield (name of the region, entry) of every frame in stored order; for a group its first entry."""
        n_groups = 0
        for entry in self.tensors:
            if entry.group is None:
                yield entry.name, entry
            elif entry.group == n_groups:
                yield group_name(n_groups), entry
                n_groups += 1
        for level, base in enumerate(self.inline or (), 1):
            for position, entry in enumerate(base.tensors):
                yield inline_name(level, position), entry


def is_reserved(name: str) -> bool:
    """Return whether no tensor may have a name."""
    return name.startswith(RESERVED_PREFIX) or name == "__metadata__"


def inline_name(level: int, position: int) -> str:
    """Return the region name of tensor `position` of inline base `level`, where 1 is the nearest."""
    return f"{RESERVED_PREFIX}.inline.{level}.{position}"


def group_name(number: int) -> str:
    """Return the region name of the frame of a group."""
    return f"{RESERVED_PREFIX}.group.{number}"


def _counted(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return len(encoded).to_bytes(8, "little") + encoded


@functools.lru_cache(256)  # a file has few different shapes
def _geometry(dtype: str, shape: tuple[int, ...]) -> bytes:
    return _counted(dtype) + b"".join(n.to_bytes(8, "little") for n in (len(shape), *shape))


def content_id(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> str:
    """Compute the identity of values from (name, dtype, shape, checksum) of tensors in any order.

    Implements spec/07-chain.md#content-id.
    """
    digest = hashlib.sha256()
    for name, dtype, shape, checksum in sorted(tensors):
        digest.update(_counted(name) + _geometry(dtype, shape) + checksum.to_bytes(8, "little"))
    return digest.hexdigest()


def content_id_of(tensors: Mapping[str, TensorSource]) -> str:
    """Compute the content id of tensors, reading all of them."""
    return content_id(
        (name, source.dtype.name, source.shape, tensor_checksum(source)) for name, source in tensors.items()
    )


def pack_index(index: Index) -> bytes:
    """Pack an index: u8 1 and deflated JSON.

    Raises:
        ConfigError: the index exceeds the limits of readers.
    """
    text = msgspec.json.encode(index)
    try:
        _parse_text(text)
    except CorruptionError as error:
        raise ConfigError(f"the checkpoint does not fit into one file: {error}") from None
    # Files with groups have many tensors: level 9 would take a quarter of a save for 5 % of the index.
    has_groups = any(entry.group is not None for entry in index.tensors)
    return b"\x01" + zlib.compress(text, 6 if has_groups else 9)


def parse_index(raw: bytes) -> Index:
    """Parse an index, the inverse of `pack_index`.

    Raises:
        CorruptionError: not an index, or larger than 64 MiB.
    """
    if raw[:1] == b"\x00":
        text = raw[1:]
    elif raw[:1] == b"\x01":
        text = _inflate(raw[1:])
    else:
        raise CorruptionError("index: its first byte is neither 0 (plain) nor 1 (deflated)")
    return _parse_text(text)


def _parse_text(text: bytes) -> Index:
    if len(text) > MAX_INDEX_BYTES:
        raise CorruptionError("index: larger than 64 MiB")
    check_number(text, "index")
    if (index := as_written(text, Index)) is not None:
        return index
    raw = strict_json(text, "index")
    try:
        # Metadata may have millions of keys; check them without a copy.
        metadata = raw.pop("metadata", None) if isinstance(raw, dict) else None
        if metadata is not None and not is_text_map(metadata):
            raise CorruptionError("index: metadata is not a map of strings")
        index = msgspec.convert(raw, Index, strict=True)
    except msgspec.ValidationError as error:
        raise CorruptionError(f"index: {error}") from None
    return index if metadata is None else msgspec.structs.replace(index, metadata=metadata)


def _inflate(raw: bytes) -> bytes:
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(raw, MAX_INDEX_BYTES + 1)
    except zlib.error as error:
        raise CorruptionError(f"index: not deflated data ({error})") from None
    if len(text) <= MAX_INDEX_BYTES and (not inflater.eof or inflater.unused_data):
        raise CorruptionError("index: its deflated data end early or late")
    return text


def envelope_metadata(features: Collection[str], packed_index: bytes) -> dict[str, str]:
    """Return the `__metadata__` of the envelope; its size only depends on the features."""
    return {
        KEY_FORMAT: FORMAT_NAME,
        KEY_VERSION: version_of(features),
        KEY_FEATURES: ",".join(sorted(features)),
        KEY_DIGEST: hashlib.sha256(packed_index).hexdigest(),
    }


def version_of(features: Collection[str]) -> str:
    """Return the lowest format version with all of these features."""
    return next((since for name, since in VERSION_OF_FEATURE.items() if name in features), "1.0")


def is_ckptz(metadata: dict[str, str] | None) -> bool:
    """Return whether the metadata of an envelope are those of a `.ckptz` file."""
    return metadata is not None and metadata.get(KEY_FORMAT) == FORMAT_NAME


def features_of(metadata: Mapping[str, str]) -> set[str]:
    """Return the features that a file requires of a reader."""
    return set(metadata.get(KEY_FEATURES, "").split(","))


def check_version(metadata: dict[str, str]) -> None:
    """Raise UnsupportedError for unknown format versions and features."""
    version = metadata.get(KEY_VERSION, "")
    if not READABLE.fullmatch(version):
        raise UnsupportedError(f"format version {version!r} is not known to this ckptz, which reads 1.x")
    # Check features first: an unknown key may belong to an unknown feature.
    unknown = sorted(features_of(metadata) - KNOWN_FEATURES)
    if unknown and KEY_FEATURES in metadata:
        raise UnsupportedError(f"required feature {', '.join(unknown)!r} is not known; upgrade ckptz")
    if set(metadata) != {KEY_FORMAT, KEY_VERSION, KEY_FEATURES, KEY_DIGEST}:
        raise CorruptionError("header: __metadata__ must have the four keys of ckptz and no others")
    listed = metadata[KEY_FEATURES].split(",")
    if LOSSLESS_FEATURE not in listed or listed != sorted(set(listed)):
        raise CorruptionError("header: the required features lack 'lossless', are unsorted or name one twice")


def read_index(envelope: Envelope, read: Read) -> tuple[Index, set[str]]:
    """Read and check the index of a file.

    Args:
        envelope: the header.
        read: function of (offset, n_bytes) that reads bytes after the header.

    Returns:
        (the index, required features).

    Raises:
        FormatError: not a `.ckptz` file, or a damaged one.
        UnsupportedError: an unknown version or feature.
    """
    if not is_ckptz(envelope.metadata):
        raise FormatError("not a .ckptz file")
    assert envelope.metadata is not None
    check_version(envelope.metadata)
    if not envelope.regions or envelope.regions[-1].name != INDEX_NAME:
        raise CorruptionError(f"the last tensor is not {INDEX_NAME}")
    *frames, region = envelope.regions
    if region.end - region.begin > MAX_INDEX_BYTES + 1:
        raise CorruptionError("index: larger than 64 MiB")
    packed = read(region.begin, region.end - region.begin).tobytes()
    if hashlib.sha256(packed).hexdigest() != envelope.metadata.get(KEY_DIGEST):
        raise ChecksumError("the index was changed after it was written")
    index, features = parse_index(packed), features_of(envelope.metadata)
    if any(r.dtype.name != "U8" or r.shape != (r.end - r.begin,) for r in envelope.regions):
        raise CorruptionError("header: frames and index must have dtype U8 and one dimension")
    _check_places(frames, index)
    _check_entries(index)
    _check_groups(index, features)
    _check_bases(index, features)
    computed = content_id((e.name, e.dtype, e.shape, int(e.checksum, 16)) for e in index.tensors)
    if computed != index.content_id:
        raise CorruptionError("the content id does not match the tensors' checksums")
    return index, features


def _check_places(frames: list[Region], index: Index) -> None:
    """Check that header and index have the same frames at the same offsets."""
    regions = [(r.name, r.begin, r.end) for r in frames]
    while regions and regions[-1][0].startswith(OPTIONAL_PREFIX):
        regions.pop()
    if regions != [(name, e.offset, e.offset + e.n_bytes) for name, e in index.placed()]:
        raise CorruptionError("header and index disagree on names or offsets")


def _check_entries(index: Index) -> None:
    files = [index.tensors, *(base.tensors for base in index.inline or ())]
    # The header has no names of tensors in groups and inline bases, which it would refuse.
    if any(len({entry.name for entry in entries}) != len(entries) for entries in files):
        raise CorruptionError("the file or an inline base has two tensors of one name")
    for entry in itertools.chain.from_iterable(files):
        if is_reserved(entry.name):
            raise CorruptionError(f"a tensor has the reserved name {entry.name!r:.80}")
        dtype_of(entry.dtype).n_bytes(entry.shape)
        if not _CHECKSUM.fullmatch(entry.checksum):
            raise CorruptionError(f"tensor {entry.name!r}: its checksum is not 16 hexadecimal digits")


def _check_groups(index: Index, features: set[str]) -> None:
    """Check that groups are numbered in order of their first members, and that members agree."""
    if any(entry.group is not None for base in index.inline or () for entry in base.tensors):
        raise CorruptionError("an inline base has groups")
    members = [entry for entry in index.tensors if entry.group is not None]
    if members and GROUPS_FEATURE not in features:
        raise CorruptionError("the index has groups, and the feature 'groups' is not required")
    first, sizes = list[TensorEntry](), list[int]()  # first entry and number of patterns of each group
    for entry in members:
        assert entry.group is not None
        if entry.group == len(first):
            first.append(entry)
            sizes.append(0)
        elif entry.group > len(first):
            raise CorruptionError(f"tensor {entry.name!r}: groups are not numbered as they begin")
        sizes[entry.group] += _member_patterns(entry, first[entry.group])
    if max(sizes, default=0) > MAX_GROUP:
        raise CorruptionError(f"a group has more than {MAX_GROUP} patterns")


def _member_patterns(entry: TensorEntry, first: TensorEntry) -> int:
    """Check a group member against the first one, and return its number of patterns."""
    if (entry.dtype, entry.offset, entry.n_bytes) != (first.dtype, first.offset, first.n_bytes):
        raise CorruptionError(f"tensor {entry.name!r}: differs from its group in dtype, offset or size")
    n_patterns = dtype_of(entry.dtype).n_patterns(entry.shape)
    if entry.lossy is not None or not n_patterns:
        raise CorruptionError(f"tensor {entry.name!r}: no member of a group is lossy or empty")
    return n_patterns


def _check_bases(index: Index, features: set[str]) -> None:
    if index.base is not None and DELTA_FEATURE not in features:
        raise CorruptionError("the index names a base, and the feature 'delta' is not required")
    if index.inline is None:
        return
    if INLINE_FEATURE not in features:
        raise CorruptionError("the index has inline bases, and the feature 'inline' is not required")
    if index.base is not None:
        raise CorruptionError("the index has both a base and inline ones")
