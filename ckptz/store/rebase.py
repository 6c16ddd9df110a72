"""The part of a chain that a checkpoint is decoded from, gathered from all its files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ckptz.codec.units import TensorSource
from ckptz.container.inline_writer import NeededBase
from ckptz.container.reader import CachedFrame, Container, FrameSource
from ckptz.store.resolve import Checkpoint

Tensors = Mapping[str, TensorSource]


def standing_alone(checkpoint: Checkpoint) -> tuple[Tensors, tuple[NeededBase, ...]]:
    """Give the tensors of a checkpoint for a file of its own, and the bases that go with them, nearest first.

    Frames with codes stay as they are, since later deltas may group by these, and so do frames without a
    base. All others are given as values, to be encoded anew: that takes less room than what they are made
    from.

    Raises:
        FormatError: a file of the chain is damaged.
        MissingBaseError: a base lacks a tensor that is needed.
    """
    needed: list[NeededBase] = []
    own = above = _kept_or_anew(checkpoint.tensors)
    for base in _bases(checkpoint):
        names = _with_companions(_names_in_base(above), base.tensors)
        if not names:
            break
        above = _kept_or_anew({name: source for name, source in base.tensors.items() if name in names})
        needed.append(NeededBase(content_id=base.content_id, file=base.file, tensors=above))
    return own, tuple(needed)


def _kept_or_anew(tensors: Tensors) -> Tensors:
    """Keep frames with codes; turn lossless deltas into plain values, which need no base."""
    for source in tensors.values():
        if isinstance(source, FrameSource):
            source.check_base()
    return {
        name: CachedFrame(source) if isinstance(source, FrameSource) and _is_anew(source) else source
        for name, source in tensors.items()
    }


def _is_anew(frame: FrameSource) -> bool:
    plan = frame.header.plan
    return plan.needs_base and plan.quant_map is None


def _bases(checkpoint: Checkpoint) -> Iterator[NeededBase]:
    """Every base of the chain with all its tensors: files, and what they carry within."""
    ref = None
    for file in checkpoint.files:
        if ref is not None:
            yield NeededBase(content_id=ref.content_id, file=ref.file, tensors=file.tensors)
        if isinstance(file, Container):
            for base in file.inline:
                record = base.record
                yield NeededBase(content_id=record.content_id, file=record.file, tensors=base.tensors)
            ref = file.index.base


def _names_in_base(tensors: Tensors) -> list[str]:
    """Tensors of the next base that frames of `tensors` are decoded from."""
    return [
        n
        for n, source in tensors.items()
        if isinstance(source, FrameSource) and source.header.plan.needs_base
    ]


def _with_companions(names: Iterable[str], tensors: Tensors) -> set[str]:
    """`names`, and the tensors beside them that their classes read, as far as they are there."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found or name not in tensors:
            continue
        found.add(name)
        source = tensors[name]
        waiting += source.companion_names if isinstance(source, FrameSource) else []
    return found
