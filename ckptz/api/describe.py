"""Describes an open `.ckptz` file from its index and the headers of its frames; no tensor is decoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ckptz.errors import CkptzError
from ckptz.format.caches import MAX_FRAMES
from ckptz.format.envelope import PlainFile
from ckptz.format.frame import FrameHeader
from ckptz.format.index import LossyRecord, QualityRecord
from ckptz.format.plan import Domain
from ckptz.format.reader import (
    MAX_SOURCE_DEPTH,
    Container,
    FrameSource,
    GroupMember,
    InlineFrames,
)
from ckptz.format.streams import CoderId
from ckptz.state.roles import role_of
from ckptz.store.resolve import Checkpoint
from ckptz.words import Report

Level = Container | PlainFile | InlineFrames
CODERS: Final = {coder.value: coder.name.lower().replace("_", "-") for coder in CoderId}  # as reports say


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorReport:
    """Size, coding and record of one stored tensor."""

    name: str
    role: str  # from its record if it is lossy, else from its name and shape, as is the next
    layer_type: str  # of the parameter that it is or belongs to
    dtype: str  # safetensors' code
    shape: tuple[int, ...]
    tensor_bytes: int  # decoded size
    stored_bytes: int  # size of its frame; of one that it shares, its share by values
    ratio: float | None  # decoded by stored size; None if it is empty
    bits_per_element: float | None  # of the frame; None if it is empty
    predictor: str  # "zero", "base", "outer" or "low-rank"
    # how bit patterns are split, "raw", "rotated", "xor" or "difference"; for a quantization map the domain
    # of its values, "linear" or "bits"
    mode: str
    coders: dict[str, float]  # share of the stored streams that each entropy coder wrote
    n_chunks: int  # chunks, each decoded on its own
    # frames that one chunk is decoded from: its own, those of its bases, and those of the tensors that its
    # contexts are made of; None if some are missing, or more than readers follow
    n_frames: int | None
    # what was asked of a lossy tensor and what was measured; None if it is lossless
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
class InspectReport(Report):
    """Everything that a file says of itself and its tensors."""

    file: str
    format_version: str  # of its bytes
    writer: str  # what wrote it
    content_id: str  # identity of the values
    depth: int  # deltas between it and its full file
    chain: tuple[Member, ...]  # its bases, nearest first, as far as they are found
    broken: str | None  # why the chain is incomplete, or None
    step: int | None  # training step, if it was recorded
    metadata: dict[str, str] | None  # the user's own
    quality: tuple[QualityRecord, ...]  # budgets that it was searched for, and what was measured
    n_tensors: int  # tensors in it
    tensor_bytes: int  # their decoded size
    stored_bytes: int  # size of this file
    ratio: float  # tensor bytes by stored bytes
    coders: dict[str, float]  # share of all stored streams that each entropy coder wrote
    shards: tuple[str, ...]  # files that a restore writes, if the source was a folder
    has_tree: bool  # whether the source was a nested checkpoint
    tensors: tuple[TensorReport, ...]  # one report each, in stored order


def described(container: Container, checkpoint: Checkpoint | None, broken: str | None) -> InspectReport:
    """Describe an open file; `checkpoint` is None if its bases cannot be opened, and `broken` says why."""
    index = container.index
    levels: list[Level] = []  # every checkpoint of the chain, as files or within them, nearest first
    for file in checkpoint.files if checkpoint else (container,):
        levels += file.levels if isinstance(file, Container) else [file]
    tensors: list[TensorReport] = []
    counts: Counter[str] = Counter()
    for source in container.tensors.values():  # once: few parsed headers are kept
        tensors.append(_tensor_report(source, levels))
        if not isinstance(source, GroupMember):
            counts.update(_coder_bytes(source.header))
    for group in dict.fromkeys(
        one.group for one in container.tensors.values() if isinstance(one, GroupMember)
    ):
        counts.update(_coder_bytes(group.header))
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


def _chain(container: Container, checkpoint: Checkpoint | None) -> tuple[Member, ...]:
    """List the bases, nearest first; of a broken chain only the nearest is known."""
    members: list[Member] = []
    for i, file in enumerate(checkpoint.files if checkpoint else (container,)):
        if not isinstance(file, Container):
            break
        records = [base.record for base in file.inline]
        members += (
            Member(file=r.file, content_id=r.content_id, depth=depth, path=file.name, is_inline=True)
            for depth, r in zip(reversed(range(len(records))), records, strict=True)
        )
        if (ref := file.index.base) is not None:
            path = checkpoint.files[i + 1].name if checkpoint else None
            members.append(Member(file=ref.file, content_id=ref.content_id, depth=ref.depth - 1, path=path))
    return tuple(members)


def _tensor_report(source: FrameSource, levels: Sequence[Level]) -> TensorReport:
    header, n_bytes, stored = source.header, source.n_bytes, source.stored_bytes
    frame = source.group.header if isinstance(source, GroupMember) else header
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
        stored_bytes=stored,
        ratio=n_bytes / stored if n_bytes and stored else None,
        bits_per_element=stored * 8 / n_elements if n_elements else None,
        predictor=plan.predictor.name.lower().replace("_", "-"),
        mode=(plan.mode if plan.domain is Domain.PLANES else plan.domain).name.lower(),
        coders=_shares(_coder_bytes(frame)),
        n_chunks=len(frame.chunks),
        n_frames=_n_frames(levels, source.entry.name),
        lossy=record,
    )


def _n_frames(levels: Sequence[Level], name: str) -> int | None:
    """Count the frames that a chunk of tensor `name` is decoded from; None if one is missing or damaged.

    Also None where decoding refuses them: more in all, or one after another in one file, than it follows.
    """
    frames: set[tuple[int, str]] = set()
    waiting = [(0, name, 0)]
    while waiting:
        level, name, n_passed = waiting.pop()
        source = levels[level].tensors.get(name) if level < len(levels) else None
        frames.add((level, name))
        if source is None or n_passed > MAX_SOURCE_DEPTH or len(frames) > MAX_FRAMES:
            return None
        if isinstance(source, FrameSource):
            try:
                needed = [
                    (level, context_tensor, n_passed + 1) for context_tensor in source.context_tensor_names
                ]
                if source.header.plan.needs_base:
                    needed.append((level + 1, name, 0))
            except CkptzError:
                return None
            waiting += [node for node in needed if node[:2] not in frames]
    return len(frames)


def _coder_bytes(header: FrameHeader) -> Counter[str]:
    counts: Counter[str] = Counter()
    for chunk in header.chunks:
        for stream in chunk.streams:
            counts[CODERS.get(stream.coder, f"coder {stream.coder}")] += stream.n_bytes
    return counts


def _shares(counts: Counter[str]) -> dict[str, float]:
    total = counts.total()
    return {name: n / total for name, n in counts.most_common() if total}
