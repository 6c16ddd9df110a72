"""One file for several: a delta over many steps, or a checkpoint that stands alone. Bit for bit."""

from __future__ import annotations

from typing import BinaryIO

from ckptz.config import Lossless
from ckptz.container.contents import Contents, Progress
from ckptz.container.writer import Written, write_container
from ckptz.parallel import Workers
from ckptz.store.resolve import Checkpoint, base_ref


def write_fold(
    sink: BinaryIO, first: Checkpoint, last: Checkpoint, workers: Workers, progress: Progress | None = None
) -> Written:
    """Write what leads from checkpoint `first` to checkpoint `last` as one delta.

    Its values are those of `last` and so is its content id; `first` is its base, whatever is between.
    """
    contents = _contents(last, first)
    return write_container(sink, last.tensors, contents, workers, progress)


def write_alone(
    sink: BinaryIO, checkpoint: Checkpoint, workers: Workers, progress: Progress | None = None
) -> Written:
    """Write a checkpoint as one `.ckptz` file that needs no other."""
    return write_container(sink, checkpoint.tensors, _contents(checkpoint, None), workers, progress)


def _contents(checkpoint: Checkpoint, base: Checkpoint | None) -> Contents:
    index = None if checkpoint.container is None else checkpoint.container.index
    return Contents(
        metadata=checkpoint.metadata,
        base=None if base is None else base_ref(base),
        bases={} if base is None else base.tensors,
        step=None if index is None else index.step,
        sharding=None if index is None else index.sharding,
        tree=None if index is None else index.tree,
        config=Lossless(sparse=True),
    )
