"""`ckptz inspect`: what a file says of itself, read from its index and frame headers only."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptz.codec.frame import FrameHeader
from ckptz.codec.plan import Domain
from ckptz.container.byte_source import FileBytes
from ckptz.container.index import LossyRecord, QualityRecord
from ckptz.container.plain import PlainFile
from ckptz.container.reader import Container, FrameSource, InlineFrames
from ckptz.entropy.streams import CoderId
from ckptz.errors import CkptzError, FormatError
from ckptz.formats.targets import PathLike, paths
from ckptz.roles import role_of
from ckptz.store.resolve import Checkpoint, open_checkpoint, open_file

Files = Sequence[Container | PlainFile]
Levels = Sequence[Container | PlainFile | InlineFrames]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorReport:
    """One tensor.

    Attributes:
        name: its name.
        role: what it is; from its record if it is lossy, else from name and shape, as below.
        layer_type: of the parameter that it is or belongs to.
        dtype: safetensors' code.
        shape: dimensions.
        tensor_bytes: decoded size.
        stored_bytes: size of its frame.
        ratio: decoded by stored size; None if it is empty.
        bits_per_element: of the frame; None if it is empty.
        predictor: "zero", "base" or "outer".
        mode: how bit patterns are split, "raw", "rotated", "xor" or "difference"; for a quantization
            map the domain of its values, "linear" or "bits".
        coders: share of the stored streams that each entropy coder wrote.
        n_chunks: chunks, each decoded on its own.
        n_frames: frames that one chunk is decoded from: its own, those of its bases, and those of the
            tensors that its classes read; None if some are missing.
        lossy: what was asked of a lossy tensor and what was measured; None if it is lossless.
    """

    name: str
    role: str
    layer_type: str
    dtype: str
    shape: tuple[int, ...]
    tensor_bytes: int
    stored_bytes: int
    ratio: float | None
    bits_per_element: float | None
    predictor: str
    mode: str
    coders: dict[str, float]
    n_chunks: int
    n_frames: int | None
    lossy: LossyRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One base of the chain; `path` is the file that holds it, None where none is found.

    `is_inline`: it is not a file of its own, but carried within `path`.
    """

    file: str
    content_id: str
    depth: int
    path: str | None
    is_inline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectReport:
    """One file.

    Attributes:
        file: the file.
        format_version: of its bytes.
        writer: what wrote it.
        content_id: identity of the values.
        depth: deltas between it and its anchor.
        chain: its bases, nearest first, as far as they are found.
        broken: why the chain is incomplete, or None.
        step: training step, if it was recorded.
        metadata: the user's own.
        quality: budgets that it was searched for, and what was measured.
        n_tensors: tensors in it.
        tensor_bytes: their decoded size.
        stored_bytes: size of this file.
        ratio: tensor bytes by stored bytes.
        coders: share of all stored streams that each entropy coder wrote.
        shards: files that a restore writes, if the source was a folder.
        has_tree: whether the source was a nested checkpoint.
        tensors: one report each, in stored order.
    """

    file: str
    format_version: str
    writer: str
    content_id: str
    depth: int
    chain: tuple[Member, ...]
    broken: str | None
    step: int | None
    metadata: dict[str, str] | None
    quality: tuple[QualityRecord, ...]
    n_tensors: int
    tensor_bytes: int
    stored_bytes: int
    ratio: float
    coders: dict[str, float]
    shards: tuple[str, ...]
    has_tree: bool
    tensors: tuple[TensorReport, ...]


def inspect(path: PathLike, *, search_path: Sequence[PathLike] = ()) -> InspectReport:
    """Describe a `.ckptz` file; no tensor is decoded, and bases may be missing.

    Args:
        path: the file.
        search_path: folders to look for bases in, after the file's own.

    Raises:
        FileNotFoundError: no such file.
        FormatError: not a `.ckptz` file, or damaged.
    """
    path = Path(path)
    try:
        checkpoint = open_checkpoint(path, paths(search_path))
    except CkptzError as error:
        with contextlib.closing(open_file(FileBytes(path))) as alone:  # damaged itself, it says so again
            return _report(_require_container(alone, path), None, str(error))
    with contextlib.closing(checkpoint):
        return _report(_require_container(checkpoint.files[0], path), checkpoint, None)


def _require_container(file: Container | PlainFile, path: Path) -> Container:
    if isinstance(file, Container):
        return file
    raise FormatError(f"{path}: a plain safetensors file; inspect describes .ckptz files")


def _report(container: Container, checkpoint: Checkpoint | None, broken: str | None) -> InspectReport:
    index = container.index
    levels = _levels(checkpoint.files if checkpoint else (container,))
    tensors: list[TensorReport] = []
    counts: Counter[str] = Counter()
    for source in container.tensors.values():  # once: few parsed headers are kept
        tensors.append(_tensor_report(source, levels))
        counts.update(_coder_bytes(source.header))
    n_bytes = sum(tensor.tensor_bytes for tensor in tensors)
    return InspectReport(
        file=container.name,
        format_version=container.version,
        writer=index.writer,
        content_id=index.content_id,
        depth=index.depth,
        chain=_chain(container, checkpoint),
        broken=broken,
        step=index.step,
        metadata=index.metadata,
        quality=index.quality,
        n_tensors=len(tensors),
        tensor_bytes=n_bytes,
        stored_bytes=container.stored_bytes,
        ratio=n_bytes / container.stored_bytes,
        coders=_shares(counts),
        shards=tuple(shard.file for shard in index.sharding.shards) if index.sharding else (),
        has_tree=index.tree is not None,
        tensors=tuple(tensors),
    )


def _levels(files: Files) -> Levels:
    """Every checkpoint of a chain, as files or within them, nearest first."""
    levels: list[Container | PlainFile | InlineFrames] = []
    for file in files:
        levels += file.levels if isinstance(file, Container) else [file]
    return levels


def _chain(container: Container, checkpoint: Checkpoint | None) -> tuple[Member, ...]:
    """The bases; of a broken chain only the nearest is known."""
    members: list[Member] = []
    for i, file in enumerate(checkpoint.files if checkpoint else (container,)):
        if not isinstance(file, Container):
            break
        members += _inline_bases(file)
        if (ref := file.index.base) is not None:
            path = checkpoint.files[i + 1].name if checkpoint else None
            members.append(Member(file=ref.file, content_id=ref.content_id, depth=ref.depth - 1, path=path))
    return tuple(members)


def _inline_bases(file: Container) -> list[Member]:
    records = [base.record for base in file.inline]
    return [
        Member(file=r.file, content_id=r.content_id, depth=depth, path=file.name, is_inline=True)
        for depth, r in zip(reversed(range(len(records))), records, strict=True)
    ]


def _tensor_report(source: FrameSource, levels: Levels) -> TensorReport:
    header, n_bytes = source.header, source.dtype.n_bytes(source.shape)
    plan = header.plan
    n_elements = n_bytes * 8 // source.dtype.bits
    role = role_of(source.entry.name, source.shape, source.dtype.is_float)
    record = source.entry.lossy
    return TensorReport(
        name=source.entry.name,
        role=record.role if record else role.role,
        layer_type=record.layer_type if record else role.layer_type,
        dtype=source.dtype.name,
        shape=source.shape,
        tensor_bytes=n_bytes,
        stored_bytes=source.entry.n_bytes,
        ratio=n_bytes / source.entry.n_bytes if n_bytes else None,
        bits_per_element=source.entry.n_bytes * 8 / n_elements if n_elements else None,
        predictor=plan.predictor.name.lower(),
        mode=(plan.mode if plan.domain is Domain.PLANES else plan.domain).name.lower(),
        coders=_shares(_coder_bytes(header)),
        n_chunks=len(header.chunks),
        n_frames=_n_frames(levels, source.entry.name),
        lossy=record,
    )


def _n_frames(levels: Levels, name: str) -> int | None:
    """Frames that a chunk of tensor `name` is decoded from; None if one of them cannot be looked at."""
    found: set[tuple[int, str]] = set()
    waiting = [(0, name)]
    while waiting:
        level, name = waiting.pop()
        source = levels[level].tensors.get(name) if level < len(levels) else None
        if source is None:
            return None
        found.add((level, name))
        if isinstance(source, FrameSource):
            try:
                waiting += set(_needed(source, level)) - found
            except CkptzError:
                return None
    return len(found)


def _needed(source: FrameSource, level: int) -> list[tuple[int, str]]:
    """(level in the chain, name) of the tensors that one frame is decoded from."""
    needed = [(level, name) for name in source.companion_names]
    return needed + ([(level + 1, source.entry.name)] if source.header.plan.needs_base else [])


def _coder_bytes(header: FrameHeader) -> Counter[str]:
    counts: Counter[str] = Counter()
    for chunk in header.chunks:
        for stream in chunk.streams:
            counts[_coder_name(stream.coder)] += stream.n_bytes
    return counts


def _coder_name(coder: int) -> str:
    known = {member.value: member.name.lower().replace("_", "-") for member in CoderId}
    return known.get(coder, f"coder {coder}")


def _shares(counts: Counter[str]) -> dict[str, float]:
    total = counts.total()
    return {name: n / total for name, n in counts.most_common() if total}
