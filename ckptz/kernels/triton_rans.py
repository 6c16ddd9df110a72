"""Interleaved rANS on a GPU: a warp codes a stream, a launch many. Implements spec/02-entropy.md#rans.

A stream has 1, 4 or 32 lanes; thread `lane` of the warp keeps the state of that lane. Its codes run through
segments, each with a frequency table, as in `ckptz.entropy.streams.Segments`. For stream b:

    codes      uint8, from code_at[b] on, n_codes[b] of them
    words      uint16, before word_end[b] when coding and from word_at[b] on when decoding
    states     uint32 [n_streams, 32]
    segments   first_segment[b] to first_segment[b + 1] - 1 of ends (last code + 1) and table_of
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ckptz.kernels import cpu
from ckptz.kernels.floats import Counts, Frequencies


@triton.jit
def _count_below(flags, lane):
    """Count the flags [32] that are set in lower lanes: a vote of the warp, then bits counted by masks."""
    votes = tl.sum(flags.to(tl.uint32) << lane.to(tl.uint32), axis=0)
    x = votes & ((tl.full([32], 1, tl.uint32) << lane.to(tl.uint32)) - 1)
    x -= (x >> 1) & 0x55555555
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _decode(
    words,
    word_at,
    n_words,
    states,
    n_lanes,
    first_segment,
    ends,
    table_of,
    slots,
    codes,
    code_at,
    n_codes,
    is_whole,
):
    """Decode stream `program_id`; is_whole[b] says whether it ended as it must.

    `slots` are the tables of `coding_cpu.slot_tables`: symbol | frequency - 1 << 8 | slot - start << 20.
    """
    b = tl.program_id(0)
    lane = tl.arange(0, 32)
    n, width, n_left = tl.load(n_codes + b), tl.load(n_lanes + b), tl.load(n_words + b)
    words += tl.load(word_at + b)
    codes += tl.load(code_at + b)
    segment, last = tl.load(first_segment + b), tl.load(first_segment + b + 1) - 1
    end, table = tl.load(ends + segment), tl.load(table_of + segment)
    state = tl.load(states + b * 32 + lane, mask=lane < width, other=1 << 16)
    taken = 0
    for step in tl.range(0, n, width):
        tables = tl.zeros_like(lane) + table
        while (segment < last) & (end < step + width):
            segment += 1
            table = tl.load(table_of + segment)
            tables = tl.where(step + lane >= end, table, tables)
            end = tl.load(ends + segment)
        is_code = (lane < width) & (step + lane < n)
        entry = tl.load(slots + tables * 4096 + (state & 4095).to(tl.int32), mask=is_code, other=0)
        tl.store(codes + step + lane, entry.to(tl.uint8), mask=is_code)
        reduced = (((entry >> 8) & 4095) + 1) * (state >> 12) + (entry >> 20)
        is_low = is_code & (reduced < 1 << 16)
        at = taken + _count_below(is_low, lane)
        word = tl.load(words + at, mask=is_low & (at < n_left), other=0).to(tl.uint32)
        reduced = tl.where(is_low, reduced << 16 | word, reduced)
        state = tl.where(is_code, reduced, state)
        taken += tl.sum(is_low.to(tl.int32), axis=0)
    n_wrong = tl.sum((state != 1 << 16).to(tl.int32), axis=0)
    tl.store(is_whole + b, ((n_wrong == 0) & (taken == n_left)).to(tl.uint8))


@triton.jit
def _encode(
    codes,
    code_at,
    n_codes,
    n_lanes,
    first_segment,
    ends,
    table_of,
    entries,
    words,
    word_end,
    states,
    n_words,
):
    """Code stream `program_id` backwards, so that its words end before words[word_end[b]].

    `entries` are the tables of `coding_cpu.encoding_tables`: reciprocal | start << 32 | shift << 44 |
    frequency - 1 << 48.
    """
    b = tl.program_id(0)
    lane = tl.arange(0, 32)
    n, width = tl.load(n_codes + b), tl.load(n_lanes + b)
    words += tl.load(word_end + b)
    codes += tl.load(code_at + b)
    first, segment = tl.load(first_segment + b), tl.load(first_segment + b + 1) - 1
    table = tl.load(table_of + segment)
    begin = tl.load(ends + segment - 1, mask=segment > first, other=0)
    state = tl.full([32], 1 << 16, tl.uint64)
    given = 0
    n_steps = tl.cdiv(n, width)
    for back in tl.range(0, n_steps):
        step = (n_steps - 1 - back) * width
        tables = tl.zeros_like(lane) + table
        while begin > step:
            segment -= 1
            table = tl.load(table_of + segment)
            tables = tl.where(step + lane < begin, table, tables)
            begin = tl.load(ends + segment - 1, mask=segment > first, other=0)
        is_code = (lane < width) & (step + lane < n)
        code = tl.load(codes + step + lane, mask=is_code, other=0).to(tl.int32)
        entry = tl.load(entries + tables * 256 + code, mask=is_code, other=0)
        is_full = is_code & ((state >> 20) > (entry >> 48))
        given += tl.sum(is_full.to(tl.int32), axis=0)
        tl.store(words - given + _count_below(is_full, lane), state.to(tl.uint16), mask=is_full)
        state = tl.where(is_full, state >> 16, state)
        quotient = (((state * (entry & 0xFFFFFFFF)) >> 32) + state) >> ((entry >> 44) & 15)
        coded = state + ((entry >> 32) & 4095) + quotient * (4095 - (entry >> 48))
        state = tl.where(is_code, coded, state)
    tl.store(states + b * 32 + lane, state.to(tl.uint32))
    tl.store(n_words + b, given)


@dataclass(frozen=True, slots=True)
class Streams:
    """Streams in a buffer: where their codes stand and how they run through tables; arrays are on the host.

    Attributes:
        code_at: first code of each, in a buffer on the device [n_streams].
        n_codes: of each [n_streams], at least 1.
        n_lanes: of each, 1, 4 or 32 [n_streams].
        n_segments: of each, at least 1 [n_streams].
        ends: index of each segment's last code in its stream, plus 1 [n_segments of all].
        table_of: table of each segment [n_segments of all].
        tables: frequencies [n_tables, 256].
    """

    code_at: Counts
    n_codes: Counts
    n_lanes: Counts
    n_segments: Counts
    ends: Counts
    table_of: Counts
    tables: Frequencies

    def __len__(self) -> int:
        return len(self.n_codes)

    def _places(self, device: torch.device) -> tuple[Tensor, ...]:
        """Give where the codes are, and the segments, on the device."""
        first = np.concatenate([[0], np.cumsum(self.n_segments)])
        return (
            _on(self.code_at, np.int64, device),
            *(
                _on(a, np.int32, device)
                for a in (self.n_codes, self.n_lanes, first, self.ends, self.table_of)
            ),
        )


def joined(code_at: Counts, n_lanes: Counts, ways: Sequence[Any]) -> Streams:
    """Describe streams; tables that several have go up once.

    Args:
        code_at: first code of each [n_streams].
        n_lanes: of each [n_streams].
        ways: their `ckptz.entropy.streams.Segments` [n_streams].
    """
    first: dict[int, int] = {}  # of the tables at an address
    tables: list[Frequencies] = []
    for way in ways:
        if id(way.tables) not in first:
            first[id(way.tables)] = sum(map(len, tables))
            tables.append(way.tables)
    return Streams(
        code_at,
        np.array([way.ends[-1] for way in ways]),
        n_lanes,
        np.array([len(way.ends) for way in ways]),
        np.concatenate([way.ends for way in ways]),
        np.concatenate([way.table_of + first[id(way.tables)] for way in ways]),
        np.concatenate(tables),
    )


def _on(array: np.ndarray, dtype: type[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype)).to(device, non_blocking=True)


def rans_encode(codes: Tensor, streams: Streams, most_words: Counts) -> tuple[Tensor, Tensor, Tensor]:
    """Code streams of a buffer uint8 [n].

    Args:
        codes: the buffer.
        streams: what to code of it.
        most_words: a bound of the words of each; the number of its codes is one.

    Returns:
        (words, states, n_words): uint16 [all most_words], where stream b has the last n_words[b] of its
        most_words[b]; uint32 [n_streams, 32]; int32 [n_streams].
    """
    n, device = len(streams), codes.device
    code_at, n_codes, n_lanes, *segments = streams._places(device)
    entries = _on(cpu().encoding_tables(streams.tables), np.uint64, device)
    words = torch.empty(int(most_words.sum()), dtype=torch.uint16, device=device)
    word_end = _on(np.cumsum(most_words), np.int64, device)
    states = torch.empty((n, 32), dtype=torch.uint32, device=device)
    n_words = torch.empty(n, dtype=torch.int32, device=device)
    places = (codes, code_at, n_codes, n_lanes, *segments)
    _encode[(n,)](*places, entries, words, word_end, states, n_words, num_warps=1)
    return words, states, n_words


def rans_decode(
    words: Tensor, word_at: Counts, n_words: Counts, states: Tensor, streams: Streams, codes: Tensor
) -> Tensor:
    """Decode streams into a buffer uint8 [n].

    Args:
        words: of all streams, uint16.
        word_at: first word of each [n_streams].
        n_words: of each [n_streams].
        states: of their lanes, uint32 [n_streams, 32].
        streams: where the codes go.
        codes: the buffer.

    Returns:
        Whether each used all its words and ended in its start state, uint8 [n_streams].
    """
    device = codes.device
    code_at, n_codes, n_lanes, *segments = streams._places(device)
    slots = _on(cpu().slot_tables(streams.tables), np.uint32, device)
    is_whole = torch.empty(len(streams), dtype=torch.uint8, device=device)
    given = words, _on(word_at, np.int64, device), _on(n_words, np.int32, device), states, n_lanes, *segments
    _decode[(len(streams),)](*given, slots, codes, code_at, n_codes, is_whole, num_warps=1)
    return is_whole
