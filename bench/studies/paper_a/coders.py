"""The ablation of paper_a: what a file's codes take by other coders than the one that wrote it.

All ways code the same codes of the same lossy tensors; everything else in the file is counted as it is. The
paper's delta is D = (code of the base - code) mod the larger alphabet, with prune and protect as symbols.
Huffman codes are counted in bits, with 5 bits a symbol of the alphabet for the table;
rANS streams are made. None of this is part of ckptz.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.core.coders import huffman_bits, rans_bytes
from ckptz.codec.frame import FrameHeader
from ckptz.container.reader import FrameSource
from ckptz.store.resolve import open_checkpoint

Codes = NDArray[np.uint8]

WAYS: Final = ("no delta, rANS", "Huffman", "zero runs + Huffman", "rANS", "rANS regrouped")
LENGTH_BITS: Final = 5  # of the table, for the code length of each symbol of the alphabet


def huffman_bytes(symbols: NDArray[Any], n_symbols: int) -> int:
    """Bytes of one stream with its table."""
    counts = np.bincount(symbols, minlength=n_symbols)
    return -(-(huffman_bits(counts) + LENGTH_BITS * n_symbols) // 8)


def zero_runs_bytes(delta: Codes, n_symbols: int) -> int:
    """Bytes with each run of zeros as one symbol for its length's power of two, and the bits below it."""
    at = np.flatnonzero(delta)
    gaps = np.diff(at, prepend=-1, append=len(delta)) - 1
    runs = gaps[gaps > 0]
    exponents = np.frexp(runs.astype(np.float64))[1] - 1
    extra = int(exponents.sum())
    tokens = np.concatenate([delta[at].astype(np.int64) - 1, n_symbols - 1 + exponents])
    return huffman_bytes(tokens, int(tokens.max(initial=0)) + 1) + -(-extra // 8)


def _cyclic_delta(source: FrameSource, base: Any, codes: Codes) -> tuple[Codes, int]:
    """(D, size of its alphabet); the codes themselves where the base has none."""
    assert source.header.plan.quant_map is not None
    n_codes = source.header.plan.quant_map.n_codes
    base_codes = None if base is None else base.codes(0, source.header.n_units)
    if base_codes is None:
        return codes, n_codes
    n_symbols = max(n_codes, base.n_codes)
    return ((base_codes.astype(np.int64) - codes) % n_symbols).astype(np.uint8), n_symbols


def _code_bytes(header: FrameHeader) -> int:
    """Bytes of a frame that code its codes: their streams, and what grouping adds to the header."""
    streams = sum(chunk.streams[0].n_bytes for chunk in header.chunks)
    assert header.plan.quant_map is not None
    one_class = dataclasses.replace(header.plan.quant_map, row_of_class=np.zeros(1, np.int64))
    plan = dataclasses.replace(header.plan, rules=(), tables=(), quant_map=one_class)
    chunks = tuple(dataclasses.replace(chunk, base_codes=None) for chunk in header.chunks)
    plain = dataclasses.replace(header, plan=plan, chunks=chunks)
    return streams + len(header.pack()) - len(plain.pack())


def file_bytes_by_way(path: Path) -> dict[str, int]:
    """Bytes that a k-means file would have with each of WAYS; the last is its size as it is."""
    with contextlib.closing(open_checkpoint(path)) as checkpoint:
        bases = checkpoint.container.bases
        totals = dict.fromkeys(WAYS, path.stat().st_size)
        for name, source in checkpoint.tensors.items():
            if source.header.plan.quant_map is None:
                continue
            codes = source.codes(0, source.header.n_units)
            delta, n_symbols = _cyclic_delta(source, bases.get(name), codes)
            own = _code_bytes(source.header)
            sizes = (
                *(rans_bytes(codes), huffman_bytes(delta, n_symbols)),
                *(zero_runs_bytes(delta, n_symbols), rans_bytes(delta), own),
            )
            for way, size in zip(WAYS, sizes, strict=True):
                totals[way] += size - own
    return totals
