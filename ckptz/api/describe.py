"""Describes an open `.ckptz` file from its index and the headers of its frames, without decoding tensors."""

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
from ckptz.format.reader import MAX_SOURCE_DEPTH, Container, FrameSource, GroupMember, InlineFrames
from ckptz.format.streams import CoderId
from ckptz.state.roles import role_of
from ckptz.store.resolve import Checkpoint
from ckptz.words import Report

Level = Container | PlainFile | InlineFrames
CODERS: Final = {coder.value: coder.name.lower().replace("_", "-") for coder in CoderId}  # names in reports


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorReport:
    """Size, encoding and record of one stored tensor."""

    name: str
    role: str  # from its record if it is lossy, else derived from name and shape
    layer_type: str  # layer type of the parameter that it is or belongs to, derived likewise
    dtype: str  # safetensors' name of the dtype
    shape: tuple[int, ...]
    tensor_bytes: int  # decoded size
    stored_bytes: int  # size of its frame; in a group, its share by number of elements
    ratio: float | None  # decoded size / stored size; None if it is empty
    bits_per_element: float | None  # stored bits per element; None if it is empty
    predictor: str  # "zero", "base", "outer" or "low-rank"
    # Plane mode of bit patterns, "raw", "rotated", "xor" or "difference"; with a quantization map the domain
    # of its values, "linear" or "bits".
    mode: str
    coders: dict[str, float]  # share of the stored bytes by entropy coder
    n_chunks: int  # number of independently decoded chunks
    # Frames that decoding one chunk needs: its own, those of its bases, and those of tensors that its
    # contexts depend on; None if some are missing or there are more than readers allow.
    n_frames: int | None
    # Settings and measured errors of a lossy tensor; None if it is lossless.
    lossy: LossyRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One base of the chain; `path` is the file that contains it, or None if it was not found.

    `is_inline`: whether it is stored inside the delta `path`, not in its own file.
    """

    file: str
    content_id: str
    depth: int
    path: str | None
    is_inline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectReport(Report):
    """Description of a file and its tensors."""

    file: str
    format_version: str  # version of the format
    writer: str  # program that wrote the file
    content_id: str  # hash of names, dtypes, shapes and values
    depth: int  # chain length: number of deltas up to the full file
    chain: tuple[Member, ...]  # bases that were found, nearest first
    broken: str | None  # why the chain is incomplete, or None
    step: int | None  # training step, if recorded
    metadata: dict[str, str] | None  # the user's metadata
    quality: tuple[QualityRecord, ...]  # budgets of its search, with measurements
    n_tensors: int  # number of tensors
    tensor_bytes: int  # decoded size of the tensors
    stored_bytes: int  # size of the file
    ratio: float  # tensor bytes / stored bytes
    coders: dict[str, float]  # share of the stored bytes by entropy coder
    shards: tuple[str, ...]  # files that a restore writes, if the source was a folder
    has_tree: bool  # whether the source was a nested checkpoint
    tensors: tuple[TensorReport, ...]  # reports in stored order


def described(container: Container, checkpoint: Checkpoint | None, broken: str | None) -> InspectReport:
    """Describe an open file; `checkpoint` is None if its bases cannot be opened, for the reason `broken`."""
    index = container.index
    levels: list[Level] = []  # all checkpoints of the chain, nearest first
    for file in checkpoint.files if checkpoint else (container,):
        levels += file.levels if isinstance(file, Container) else [file]
    tensors: list[TensorReport] = []
    counts: Counter[str] = Counter()
    frames = set[FrameSource]()
    for source in container.tensors.values():  # only once, as few parsed headers are cached
        tensors.append(_tensor_report(source, levels))
        frame = source.group if isinstance(source, GroupMember) else source
        if frame not in frames:
            frames.add(frame)
            counts.update(_coder_bytes(frame.header))
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
    """Return the bases, nearest first; of a broken chain, only the nearest."""
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
    """Count the frames that decoding a chunk of tensor `name` needs.

    Returns:
        The number, or None if a frame is missing or damaged, or there are more than readers allow.
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
                plan = source.header.plan
                needed = [(level, context, n_passed + 1) for context in plan.context_tensor_names]
                if plan.needs_base:
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
