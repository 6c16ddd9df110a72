"""Frequency tables of the rANS coder. Implements spec/02-entropy.md#frequency-table.

    first symbol u8 | last symbol u8 | order u8 | Exp-Golomb codes of all frequencies but the last
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ckptz.bits.cursor import ByteReader, ByteWriter
from ckptz.errors import CorruptionError
from ckptz.kernels import cpu

Counts = NDArray[np.int64]
Frequencies = NDArray[np.uint16]

SCALE: Final = 4096
MAX_ORDER: Final = 11


def normalise(counts: Counts) -> Frequencies:
    """Frequencies [256] that sum to 4096, at least 1 for every symbol that occurs.

    The encoder's choice: any table with these two properties decodes.
    """
    rare = counts < 0
    while True:
        # Symbols too rare for a share of their own get 1; the others divide what is left.
        left = SCALE - int(rare.sum())
        exact = counts * (left / max(int(counts[~rare].sum()), 1))
        fallen = (exact < 1) & (counts > 0) & ~rare
        if not fallen.any():
            break
        rare |= fallen
    frequencies = np.where(rare, 1, np.floor(exact)).astype(np.int64)
    # What rounding down left over goes where one more saves most: near count / frequency.
    missing = SCALE - int(frequencies.sum())
    gain = np.where(frequencies > 0, counts / np.maximum(frequencies, 1), -1.0)
    for symbol in np.argsort(-gain, kind="stable")[:missing]:
        frequencies[symbol] += 1
    return frequencies.astype(np.uint16)


def cost_bits(counts: Counts, frequencies: Frequencies) -> float:
    """Bits that `counts` take under `frequencies`; infinite if a symbol has no frequency."""
    used = counts > 0
    if not frequencies[used].all():
        return float("inf")
    return float((counts[used] * (12.0 - np.log2(frequencies[used]))).sum())


def entropy_bits(counts: Counts) -> float:
    """Bits of an ideal order-0 coder over the last axis, summed over all rows."""
    totals = counts.sum(axis=-1, keepdims=True)
    logs = np.log2(np.maximum(counts, 1)) - np.log2(np.maximum(totals, 1))
    return float(-(counts * logs).sum())


def _golomb_bits(values: NDArray[np.int64], order: int) -> int:
    n_low = np.floor(np.log2(values + (1 << order))).astype(np.int64)
    return int((2 * n_low - order + 1).sum())


def pack_table(frequencies: Frequencies) -> bytes:
    """A table as bytes."""
    used = np.flatnonzero(frequencies)
    first, last = int(used[0]), int(used[-1])
    body = frequencies[first:last]
    values = body.astype(np.int64)
    order = min(range(MAX_ORDER + 1), key=lambda k: _golomb_bits(values, k)) if len(body) else 0
    return bytes((first, last, order)) + cpu().golomb_pack(body, order).tobytes()


def parse_table(source: ByteReader) -> Frequencies:
    """Inverse of `pack_table`; refuses tables that do not sum to 4096."""
    first, last, order = (source.u8(f"frequency table {field}") for field in ("first", "last", "order"))
    if last < first or order > MAX_ORDER:
        raise CorruptionError(f"frequency table: symbols {first}..{last} with order {order}")
    frequencies = np.zeros(256, np.uint16)
    start = source.offset
    rest = np.frombuffer(source.peek(), np.uint8)
    n_bytes = int(cpu().golomb_unpack(rest, last - first, order, frequencies[first:last]))
    if n_bytes < 0:
        raise CorruptionError(f"frequency table at offset {start}: its codes end early or overflow")
    source.take(n_bytes, "frequency table")
    rest_of_scale = SCALE - int(frequencies.sum(dtype=np.int64))
    frequencies[last] = max(rest_of_scale, 0)
    if rest_of_scale < 1 or not frequencies[first]:
        raise CorruptionError(f"frequency table at offset {start}: frequencies do not sum to {SCALE}")
    return frequencies


def write_tables(out: ByteWriter, tables: Frequencies) -> None:
    """A number of tables (u8) and the tables [n_tables, 256]."""
    out.u8(len(tables))
    for row in tables:
        out.raw(pack_table(row))


def parse_tables(source: ByteReader, most: int) -> Frequencies:
    """Inverse of `write_tables`."""
    n_tables = source.u8("number of frequency tables")
    if n_tables > most:
        raise CorruptionError(f"{n_tables} frequency tables, at most {most} are allowed")
    rows = [parse_table(source) for _ in range(n_tables)]
    return np.stack(rows) if rows else np.zeros((0, 256), np.uint16)
