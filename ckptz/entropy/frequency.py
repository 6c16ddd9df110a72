"""Frequency tables of the rANS coder. Implements spec/02-entropy.md#frequency-table.

first symbol u8 | last symbol u8 | order u8 | Exp-Golomb codes of all frequencies but the last
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ckptz.bits import ByteReader, ByteWriter
from ckptz.errors import CorruptionError, FormatError, TruncatedError
from ckptz.kernels import cpu, planning
from ckptz.kernels.floats import MAX_TABLE_ORDER, Counts, Frequencies

SCALE: Final = 4096
MAX_ORDER: Final = MAX_TABLE_ORDER


def normalise(counts: Counts) -> Frequencies:
    """Make frequencies [256] that sum to 4096 of counts [256], at least 1 for every symbol that occurs.

    The encoder's choice: any table with these two properties decodes.
    """
    return planning().normalise(counts)


def cost_bits(counts: Counts, frequencies: Frequencies) -> float:
    """Count the bits that `counts` [256] take under `frequencies` [256]; infinite if a symbol has none."""
    return float(planning().cost_bits(counts, frequencies))


def entropy_bits(counts: Counts) -> float:
    """Count the bits of an ideal order-0 coder of counts [..., 256] with a table for each row."""
    return float(planning().entropy_bits(np.ascontiguousarray(counts).reshape(-1, counts.shape[-1])))


def pack_table(frequencies: Frequencies) -> bytes:
    """Write a table [256] as bytes."""
    packed: bytes = cpu().pack_table(frequencies).tobytes()
    return packed


def parse_table(source: ByteReader) -> Frequencies:
    """Read what `pack_table` wrote, [256]; refuse tables that do not sum to 4096."""
    return _parse(source, 1)[0]


def _parse(source: ByteReader, n_tables: int) -> Frequencies:
    tables = np.empty((n_tables, 256), np.uint16)
    n_bytes = int(cpu().table_unpack(np.frombuffer(source.peek(), np.uint8), tables))
    if n_bytes < 0:
        for _ in range(n_tables - 1):
            _parse(source, 1)
        raise _why_no_table(source)
    source.take(n_bytes, "frequency table")
    return tables


def _why_no_table(source: ByteReader) -> FormatError:
    """The reason, found by reading it once more field by field."""
    at = source.offset
    try:
        first, last, order = (source.u8(f"frequency table {field}") for field in ("first", "last", "order"))
    except TruncatedError as error:
        return error
    if last < first or order > MAX_ORDER:
        return CorruptionError(f"frequency table: symbols {first}..{last} with order {order}")
    codes = np.empty(last - first, np.uint16)
    if cpu().golomb_unpack(np.frombuffer(source.peek(), np.uint8), last - first, order, codes) < 0:
        return CorruptionError(f"frequency table at offset {at}: its codes end early or overflow")
    return CorruptionError(f"frequency table at offset {at}: frequencies do not sum to {SCALE}")


def write_tables(out: ByteWriter, tables: Frequencies) -> None:
    """Write the number of tables (u8) and the tables [n_tables, 256]."""
    out.u8(len(tables))
    if len(tables):
        out.raw(cpu().pack_tables(tables).tobytes())


def parse_tables(source: ByteReader, most: int) -> Frequencies:
    """Read what `write_tables` wrote, [n_tables, 256] with at most `most` tables."""
    n_tables = source.u8("number of frequency tables")
    if n_tables > most:
        raise CorruptionError(f"{n_tables} frequency tables, at most {most} are allowed")
    return _parse(source, n_tables)
