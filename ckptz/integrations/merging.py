"""Sketches of tensors that are split over ranks, merged, so that all shards get one quantization map.

All ranks run the same collectives in the same order, on a gloo group of their own; a rank without a
shard takes part with zeros, and one that fails takes part before it says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import reduce
from operator import add
from typing import Final

import torch
import torch.distributed as dist

from ckptz.codec.units import TensorSource
from ckptz.codec.values import KINDS
from ckptz.encoding.guide import Guide
from ckptz.quant.sketch import Sketch

TIMEOUT: Final = timedelta(minutes=10)


def own_group(timeout: timedelta = TIMEOUT) -> dist.ProcessGroup | None:
    """Make a gloo group of all ranks for checkpoints only; None in a process of its own.

    A collective: all ranks call it at the same point of their programs. A rank gives up on the others after
    the timeout.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo", timeout=timeout)


def merged_guides(
    names: Sequence[str],
    shards: Mapping[str, Sequence[TensorSource]],
    kinds: Mapping[str, str],
    group: dist.ProcessGroup | None,
) -> dict[str, Guide]:
    """Make guides with the sketch of each whole tensor.

    Args:
        names: the tensors that are split, the same on all ranks in the same order.
        shards: this rank's pieces, by name.
        kinds: dtype of each of `names`, such as "F32".
        group: of the ranks; None if there is one.

    Raises:
        Exception: what a sketch of this rank raised, after all collectives are done.
    """
    guides, failure = {}, None
    for name in names:
        kind = KINDS[kinds[name]]
        counts = torch.zeros(1 << 16, dtype=torch.int64)
        try:
            if name in shards:
                counts = torch.from_numpy(_sketch(shards[name], kind).counts)
        except Exception as error:  # the others must not wait for a rank that failed
            failure = failure or error
        if group is not None:
            dist.all_reduce(counts, group=group)
        if name in shards:
            guides[name] = Guide(sketch=Sketch(kind, counts.numpy()))
    if failure is not None:
        raise failure
    return guides


def _sketch(pieces: Sequence[TensorSource], kind: int) -> Sketch:
    empty = Sketch(kind, torch.zeros(1 << 16, dtype=torch.int64).numpy())
    chunks = ((s, bounds) for s in pieces for bounds in s.chunk_bounds())
    return reduce(add, (Sketch.of(source.units(*bounds), kind) for source, bounds in chunks), empty)
