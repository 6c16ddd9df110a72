"""Stand-ins for two kernels for GPUs that Triton's interpreter takes minutes for, by those for the CPU.

`tests/test_triton.py` holds the kernels themselves against the same definitions.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ckptz.bits import xxh64
from ckptz.kernels import compiled, triton_planes, triton_rans


def _segments(streams: triton_rans.Streams, b: int) -> tuple[Any, Any]:
    first = int(streams.n_segments[:b].sum())
    own = slice(first, first + int(streams.n_segments[b]))
    return np.asarray(streams.ends[own], np.int64), np.asarray(streams.table_of[own], np.int64)


def rans_encode(
    codes: torch.Tensor, streams: triton_rans.Streams, most_words: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what `triton_rans.rans_encode` does."""
    n = len(streams)
    words, lengths = np.zeros(int(most_words.sum()), np.uint16), np.zeros(n, np.int32)
    states = np.full((n, 32), 1 << 16, np.uint32)
    for b, end in enumerate(np.cumsum(most_words).tolist()):
        begin, n_lanes = int(streams.code_at[b]), int(streams.n_lanes[b])
        own = codes.numpy()[begin : begin + int(streams.n_codes[b])].copy()
        made = compiled().rans_encode(own, *_segments(streams, b), streams.tables, n_lanes)
        states[b, :n_lanes], lengths[b] = made[0], len(made[1])
        assert lengths[b] <= most_words[b]
        words[end - len(made[1]) : end] = made[1]
    return torch.from_numpy(words), torch.from_numpy(states), torch.from_numpy(lengths)


def rans_decode(
    words: torch.Tensor, word_at: Any, n_words: Any, states: torch.Tensor, streams: Any, codes: torch.Tensor
) -> torch.Tensor:
    """Do what `triton_rans.rans_decode` does."""
    slots, is_whole = compiled().slot_tables(streams.tables), np.zeros(len(streams), np.uint8)
    for b, (at, n) in enumerate(zip(word_at.tolist(), n_words.tolist(), strict=True)):
        out = np.zeros(int(streams.n_codes[b]), np.uint8)
        own = states.numpy()[b, : int(streams.n_lanes[b])].copy()
        given = words.numpy()[at : at + n].copy()
        is_whole[b] = compiled().rans_decode(given, own, *_segments(streams, b), slots, out)
        begin = int(streams.code_at[b])
        codes[begin : begin + len(out)] = torch.from_numpy(out)
    return torch.from_numpy(is_whole)


def xxh64_of_chunks(units: torch.Tensor, chunk: int) -> torch.Tensor:
    """Do what `triton_planes.xxh64_of_chunks` does."""
    return torch.from_numpy(np.array([xxh64(part.numpy().copy()) for part in units.split(chunk)], np.uint64))


RANS = SimpleNamespace(joined=triton_rans.joined, rans_encode=rans_encode, rans_decode=rans_decode)
PLANES = SimpleNamespace(**{**vars(triton_planes), "xxh64_of_chunks": xxh64_of_chunks})
