"""Frequency tables of the rANS coder. Implements spec/02-entropy.md#frequency-table.

    first symbol u8 | last symbol u8 | order u8 | Exp-Golomb codes of all frequencies but the last

Everything is numpy over the rows of many tables at once. An encoder may choose any table that sums to 4096
and has at least 1 for every symbol that occurs.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptz.errors import CorruptionError, FormatError, TruncatedError
from ckptz.format.bits import ByteReader, ByteWriter
from ckptz.kernels import cpu, plain
from ckptz.kernels.floats import MAX_TABLE_ORDER, SCALE, SCALE_BITS, Bytes, Counts, Frequencies

MAX_ORDER: Final = MAX_TABLE_ORDER
FEW_TABLES: Final = 1 << 10  # tables that a process makes with numpy, in a tenth of a second
_n_made: Final = [0]
Float64Array = NDArray[np.float64]

# Bits of a code by its frequency; in single precision, because existing files were written with it.
_CODE_BITS: Final = SCALE_BITS - plain.LOGS.astype(np.float32).astype(np.float64)


def row_entropy_bits(counts: Counts) -> Float64Array:
    """Compute the entropy in bits [n] of each row of counts [n, 256] under an order-0 model."""
    bits: Float64Array = (cpu() if _n_made[0] > FEW_TABLES else plain).entropies(counts)
    return bits


def entropy_bits(counts: Counts) -> float:
    """Compute the entropy in bits of counts [..., 256] under an order-0 model with a table for each row."""
    return float(sum(row_entropy_bits(counts.reshape(-1, counts.shape[-1])).tolist()))


def row_cost_bits(counts: Counts, frequencies: Frequencies) -> Float64Array:
    """Compute the bits [n] of counts [n, 256] under frequencies [n, 256]; infinite if a symbol has none."""
    used = plain.used_symbols(counts)
    counts, frequencies = counts[:, used], frequencies[:, used]
    bits = plain.row_sums(counts * _CODE_BITS[frequencies])
    bits[((counts > 0) & (frequencies == 0)).any(axis=1)] = math.inf
    return bits


def cost_bits(counts: Counts, frequencies: Frequencies) -> float:
    """Compute the bits of counts [256] under frequencies [256]; infinite if a symbol has frequency 0."""
    return float(row_cost_bits(counts[None], frequencies[None])[0])


def _kernels_for(tables: NDArray[Any]) -> Any:
    """Return the kernels for tables [n, 256]: numpy for the first ones, as compiling would take longer."""
    _n_made[0] += len(tables)
    return cpu() if _n_made[0] > FEW_TABLES else plain


def use_compiled() -> None:
    """Use compiled kernels for all further tables."""
    _n_made[0] += FEW_TABLES


def normalise(counts: Counts) -> Frequencies:
    """Scale counts [..., 256] to frequencies that sum to 4096, at least 1 for each symbol that occurs."""
    rows = counts.reshape(-1, 256)
    frequencies: Frequencies = _kernels_for(rows).normalise(rows)
    return frequencies.reshape(counts.shape)


def pack_tables(frequencies: Frequencies) -> tuple[Bytes, Counts]:
    """Pack tables [n, 256]; return their concatenated bytes and the end of each [n]."""
    packed: tuple[Bytes, Counts] = _kernels_for(frequencies).pack_tables(frequencies)
    return packed


def slot_tables(frequencies: Frequencies) -> NDArray[np.uint32]:
    """Compute decoding tables [n, 4096] from frequencies [n, 256]."""
    tables: NDArray[np.uint32] = _kernels_for(frequencies).slot_tables(frequencies)
    return tables


def pack_table(frequencies: Frequencies) -> bytes:
    """Pack a table [256] into bytes."""
    return pack_tables(frequencies[None])[0].tobytes()


def parse_table(source: ByteReader) -> Frequencies:
    """Parse a table [256], the inverse of `pack_table`; raise CorruptionError if it does not sum to 4096."""
    return _parse(source, 1)[0]


def _parse(source: ByteReader, n_tables: int) -> Frequencies:
    tables = np.empty((n_tables, 256), np.uint16)
    unread = np.frombuffer(source.peek().toreadonly(), np.uint8)  # of one type, so that it compiles once
    n_bytes = int(cpu().table_unpack(unread, tables))
    if n_bytes < 0:
        for _ in range(n_tables - 1):
            _parse(source, 1)
        raise _table_error(source)
    source.take(n_bytes, "frequency table")
    return tables


def _table_error(source: ByteReader) -> FormatError:
    """Return the error of an invalid table, found by parsing it again field by field."""
    at = source.offset
    try:
        first, last, order = (source.u8(f"frequency table {field}") for field in ("first", "last", "order"))
    except TruncatedError as error:
        return error
    if last < first or order > MAX_ORDER:
        return CorruptionError(f"frequency table: symbols {first}..{last} with order {order}")
    codes = np.empty(last - first, np.uint16)
    if plain.golomb_unpack(np.frombuffer(source.peek(), np.uint8), last - first, order, codes) < 0:
        return CorruptionError(f"frequency table at offset {at}: its codes end early or overflow")
    return CorruptionError(f"frequency table at offset {at}: frequencies do not sum to {SCALE}")


def write_tables(out: ByteWriter, tables: Frequencies) -> None:
    """Write the number of tables (u8) and the tables [n_tables, 256]."""
    out.u8(len(tables))
    if len(tables):
        out.raw(pack_tables(tables)[0].tobytes())


def parse_tables(source: ByteReader, most: int) -> Frequencies:
    """Parse tables [n_tables, 256], the inverse of `write_tables`; refuse more than `most`."""
    n_tables = source.u8("number of frequency tables")
    if n_tables > most:
        raise CorruptionError(f"{n_tables} frequency tables, at most {most} are allowed")
    return _parse(source, n_tables)


# --- encoding tables ----------------------------------------------------------------------------

_FREQUENCY: Final = np.arange(1, SCALE + 1, dtype=np.uint64)
_SHIFT: Final = np.frexp(np.arange(SCALE))[1].astype(np.uint64)  # the binary logarithm, rounded up
# Entry of each frequency: reciprocal (32 bits) | start (12), added below | shift (4) | frequency - 1 (12).
_ENTRIES: Final = np.concatenate(
    (
        np.zeros(1, np.uint64),
        (
            ((np.uint64(1) << (np.uint64(32) + _SHIFT)) + _FREQUENCY - np.uint64(1)) // _FREQUENCY
            - np.uint64(1 << 32)
        )
        | _SHIFT << np.uint64(44)
        | (_FREQUENCY - np.uint64(1)) << np.uint64(48),
    )
)


def encoding_tables(frequencies: Frequencies) -> NDArray[np.uint64]:
    """Compute encoding tables [n, 256]: reciprocal (32 bits) | start (12) | shift (4) | frequency - 1 (12).

    With s = ceil(log2 f) and m = ceil(2^(32+s) / f) - 2^32, floor(x / f) is (x + (x m >> 32)) >> s for
    every x below 2^32, since m f exceeds its real value by less than f <= 2^s.
    """
    starts = np.cumsum(frequencies, axis=1, dtype=np.uint64) - frequencies
    starts[frequencies == 0] = 0
    return _ENTRIES[frequencies] | starts << np.uint64(32)
