"""Frequency tables of the rANS coder. Implements spec/02-entropy.md#frequency-table.

first symbol u8 | last symbol u8 | order u8 | Exp-Golomb codes of all frequencies but the last
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ckptz.bits.cursor import ByteReader, ByteWriter
from ckptz.errors import CorruptionError
from ckptz.kernels import cpu, planning

Counts = NDArray[np.int64]
Frequencies = NDArray[np.uint16]

SCALE: Final = 4096
MAX_ORDER: Final = 11


def normalise(counts: Counts) -> Frequencies:
    """Frequencies [256] that sum to 4096, at least 1 for every symbol that occurs.

    The encoder's choice: any table with these two properties decodes.
    """
    return planning().normalise(counts)


def cost_bits(counts: Counts, frequencies: Frequencies) -> float:
    """Bits that `counts` take under `frequencies`; infinite if a symbol has no frequency."""
    return float(planning().cost_bits(counts, frequencies))


def entropy_bits(counts: Counts) -> float:
    """Bits of an ideal order-0 coder with one table for each row of the last axis."""
    return float(planning().entropy_bits(np.ascontiguousarray(counts).reshape(-1, counts.shape[-1])))


def pack_table(frequencies: Frequencies) -> bytes:
    """A table as bytes."""
    used = np.flatnonzero(frequencies)
    first, last = int(used[0]), int(used[-1])
    body = frequencies[first:last]
    order = int(planning().best_golomb_order(body, MAX_ORDER))
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
