"""The part of a chain that a checkpoint is decoded from, gathered from all its files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ckptz.codec.units import TensorSource
from ckptz.container.inline_writer import NeededBase
from ckptz.container.reader import Container, FrameSource
from ckptz.store.resolve import Checkpoint

Tensors = Mapping[str, TensorSource]


def needed_bases(checkpoint: Checkpoint) -> tuple[NeededBase, ...]:
    """Give what the tensors of a checkpoint are decoded from beside their own frames, nearest base first.

    Raises:
        FormatError: a file of the chain is damaged.
        MissingBaseError: a base lacks a tensor that is needed.
    """
    needed: list[NeededBase] = []
    above: Tensors = checkpoint.tensors
    for base in _bases(checkpoint):
        names = _with_companions(_names_in_base(above), base.tensors)
        if not names:
            break
        above = {name: source for name, source in base.tensors.items() if name in names}
        needed.append(NeededBase(content_id=base.content_id, file=base.file, tensors=above))
    return tuple(needed)


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
    names = []
    for name, source in tensors.items():
        if isinstance(source, FrameSource):
            source.check_base()
            names += [name] if source.header.plan.needs_base else []
    return names


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
