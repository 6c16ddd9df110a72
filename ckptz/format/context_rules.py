"""Contexts: labels known to the decoder, which select the frequency table of a code.

Implements spec/03-transforms.md#contexts. A frame lists at most three rules; the context of an element is
the mixed-radix number of their labels, the first rule most significant.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from ckptz.errors import CorruptionError
from ckptz.format.bits import ByteReader, ByteWriter
from ckptz.kernels.floats import Bytes

MAX_RULES: Final = 3
MAX_CONTEXTS: Final = 1 << 12
MAX_INDICES: Final = 1 << 24  # stored labels of rows and blocks in a header
MAX_TABLES: Final = 64  # spec/02-entropy.md#tables
N_MAGNITUDE_CONTEXTS: Final = 256
N_PRODUCT_CONTEXTS: Final = 256
MAX_RANK: Final = 64  # of sums of outer products, spec/registry.md#limits
MAX_SHIFT: Final = 20  # of sums of products, which are at most 2^20: spec/03-transforms.md#contexts

MIN_REPEATED: Final = 1 << 12  # patterns of a row from which rows are filled one by one
MIN_RUN: Final = 32  # patterns of a run that is moved as a whole

Labels = NDArray[Any]  # uint8 or uint16


class RuleId(IntEnum):
    """Ids of the context rules: spec/registry.md#context-rules."""

    MAGNITUDE = 1
    ROW = 2
    BLOCK = 3
    BASE_CODE = 4
    PRODUCTS = 6


@dataclass(frozen=True, slots=True)
class Magnitude:
    """The label is the eight bits below the sign, in the base or in tensor `source` of the same file."""

    source: str | None = None
    radix: ClassVar[int] = N_MAGNITUDE_CONTEXTS


@dataclass(frozen=True, slots=True)
class Row:
    """The label is stored for each index of the first dimension."""

    radix: int
    indices: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Block:
    """The label is stored for each block of `size` patterns."""

    radix: int
    size: int
    indices: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class BaseCode:
    """The label is the code in the frame of the base; 0 if that has no codes."""

    radix: int


@dataclass(frozen=True, slots=True)
class Products:
    """The label is a sum of products of levels of row and column, divided by 2^`shift`, around 128.

    All numbers are integers below 2^31, so every order of the additions has the same result.

    Attributes:
        shift: number of bits by which sums are shifted to the right, at most `MAX_SHIFT`.
        n_rows: rows of the matrix.
        levels: levels of the rows, then of the columns, by term [rank, n_rows + n_columns].
    """

    shift: int
    n_rows: int
    levels: NDArray[np.int8]
    radix: ClassVar[int] = N_PRODUCT_CONTEXTS

    def labels(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Compute the labels of patterns begin..end [end - begin]."""
        n = self.levels.shape[1] - self.n_rows
        first, last = begin // n, -(-end // n)
        if n < MIN_REPEATED:  # complete rows at once
            return self._block(first, last, 0, n)[begin - first * n :][: end - begin]
        spans = ((row, max(begin - row * n, 0), min(end - row * n, n)) for row in range(first, last))
        return np.concatenate([self._block(row, row + 1, left, right) for row, left, right in spans])

    def _block(self, first: int, last: int, left: int, right: int) -> NDArray[np.uint8]:
        rows = self.levels[:, first:last].astype(np.int32)
        columns = self.levels[:, self.n_rows + left : self.n_rows + right].astype(np.int32)
        sums = np.einsum("ki,kj->ij", rows, columns).reshape(-1)
        sums >>= self.shift
        sums += N_PRODUCT_CONTEXTS // 2
        labels: NDArray[np.uint8] = sums.clip(0, N_PRODUCT_CONTEXTS - 1, out=sums).astype(np.uint8)
        return labels


ContextRule = Magnitude | Row | Block | BaseCode | Products


def n_contexts_of(rules: Sequence[ContextRule]) -> int:
    """Return the number of contexts; 1 without rules."""
    return math.prod(rule.radix for rule in rules)


def n_indices_of(rules: Sequence[ContextRule]) -> int:
    """Return the number of stored labels and levels of all rules."""
    labels = sum(rule.indices.size for rule in rules if isinstance(rule, Row | Block))
    return labels + sum(rule.levels.size for rule in rules if isinstance(rule, Products))


def labels_of_rows(indices: NDArray[np.uint8], begin: int, end: int, row_patterns: int) -> NDArray[np.uint8]:
    """Return the labels [end - begin] of patterns begin..end, given a label for each row or block."""
    first, last = begin // row_patterns, -(-end // row_patterns)
    row_labels = indices[first:last]
    if row_patterns < MIN_REPEATED:
        return np.repeat(row_labels, row_patterns)[begin - first * row_patterns :][: end - begin]
    labels = np.empty(end - begin, np.uint8)
    for label, row in zip(row_labels.tolist(), range(first, last), strict=True):
        labels[max(row * row_patterns - begin, 0) : (row + 1) * row_patterns - begin] = label
    return labels


@dataclass(frozen=True)
class Runs:
    """The patterns [n] of a chunk as runs of equal size with one context each.

    Attributes:
        labels: context of each run [n / size].
        size: patterns of a run.
        n_contexts: number of contexts.
    """

    labels: NDArray[np.uint8]
    size: int
    n_contexts: int

    @cached_property
    def per_context(self) -> NDArray[np.int64]:
        """Number of patterns of each context [n_contexts]."""
        return np.bincount(self.labels, minlength=self.n_contexts) * self.size

    @cached_property
    def _order(self) -> NDArray[np.intp] | None:
        """Indices of the runs in context order, or None if they are sorted already."""
        is_sorted = bool((self.labels[1:] >= self.labels[:-1]).all())
        return None if is_sorted else np.argsort(self.labels, kind="stable")

    def group(self, codes: Bytes) -> Bytes:
        """Reorder codes [n] into context order."""
        return codes if self._order is None else codes.view(f"V{self.size}")[self._order].view(np.uint8)

    def ungroup(self, grouped: Bytes) -> Bytes:
        """Reorder codes [n] from context order into the order of the patterns."""
        if self._order is None:
            return grouped
        codes = np.empty_like(grouped)
        codes.view(f"V{self.size}")[self._order] = grouped.view(f"V{self.size}")
        return codes


def runs_of(rules: Sequence[ContextRule], begin: int, end: int, row_patterns: int) -> Runs | None:
    """Return the runs of patterns begin..end; None if contexts depend on values, or if runs are too short."""
    rule = rules[0] if len(rules) == 1 else None
    if not isinstance(rule, Row | Block):
        return None
    label_size = row_patterns if isinstance(rule, Row) else rule.size
    size = math.gcd(label_size, begin, end)
    if size < MIN_RUN:
        return None
    labels = labels_of_rows(rule.indices, begin // size, end // size, label_size // size)
    return Runs(labels, size, rule.radix)


def write_runs(out: ByteWriter, table_of: NDArray[np.int64]) -> None:
    """Write the table of each context [n_contexts] as runs: length varint, table varint."""
    begins = [0, *((table_of[1:] != table_of[:-1]).nonzero()[0] + 1).tolist()]
    lengths = map(operator.sub, [*begins[1:], len(table_of)], begins)
    numbers = [*itertools.chain.from_iterable(zip(lengths, table_of[begins].tolist(), strict=True))]
    if max(numbers) < 0x80:
        out.raw(bytes(numbers))
        return
    for number in numbers:
        out.varint(number)


def parse_runs(source: ByteReader, n_contexts: int, n_tables: int) -> NDArray[np.int64]:
    """Parse the table of each context [n_contexts], the inverse of `write_runs`; refuse undefined tables."""
    table_of = np.empty(n_contexts, np.int64)
    position = 0
    while position < n_contexts:
        n, table = source.varint("context run"), source.varint("context run table")
        if not 1 <= n <= n_contexts - position or table >= n_tables:
            raise CorruptionError(f"context run of {n} from {position} names table {table} of {n_tables}")
        table_of[position : position + n] = table
        position += n
    return table_of
