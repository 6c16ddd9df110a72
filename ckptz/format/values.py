"""Decoding of codes to patterns with a quantization map. Implements spec/04-quantization.md#decoding."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptz.format.dtypes import DType
from ckptz.format.plan import MAX_CODES, Domain, Plan, Predictor
from ckptz.format.sources import PATTERN_TYPES, ChunkSources
from ckptz.kernels import cpu, floats
from ckptz.kernels.floats import Bytes, Patterns

MAX_BY_CONTEXT: Final = 1 << 16  # entries of a table expanded to one row for each context
ONE_ROW: Final = np.zeros(1, np.uint16)
# Number in kernels, called `kind`, of each dtype whose values may be lossy.
FLOAT_KINDS: Final = {"F32": floats.F32, "BF16": floats.BF16, "F16": floats.F16}


class ValueTable:
    """The quantization map of a plan as arrays for kernels; the dtype is one of `FLOAT_KINDS`."""

    def __init__(self, dtype: DType, plan: Plan) -> None:
        assert plan.quant_map is not None
        self.dtype, self.plan, self.quant_map = dtype, plan, plan.quant_map
        self.kind = FLOAT_KINDS[dtype.name]  # number of the dtype in kernels
        self.row_of_context = self.quant_map.row_of_context.astype(np.uint16)

    @cached_property
    def entries(self) -> NDArray[Any]:
        """Values of all codes [n_rows, n_codes]: F32 patterns or integers, final patterns if added to 0."""
        return np.ascontiguousarray(self._finished(self.quant_map.table.expand()))

    @cached_property
    def by_context(self) -> NDArray[Any] | None:
        """Values of all codes [n_contexts, n_codes], [1, n_codes] if all rows are equal; None if too many."""
        rows = self.row_of_context
        if not rows.any():
            return self.entries[:1]
        return self.entries[rows] if len(rows) * self.quant_map.n_codes <= MAX_BY_CONTEXT else None

    def _finished(self, entries: NDArray[Any]) -> NDArray[Any]:
        if self.plan.domain is not Domain.LINEAR or self.plan.predictor is not Predictor.ZERO:
            return entries
        flat = cpu().add_f32(np.zeros(entries.size, np.uint32), entries.reshape(-1))
        return cpu().from_f32(flat, self.kind).reshape(entries.shape)

    def decode(
        self, codes: Bytes, labels: NDArray[Any] | None, prediction: Patterns | None, out: Patterns
    ) -> None:
        """Decode codes [n] into `out`, patterns [n]; the caller writes escaped values.

        Args:
            codes: uint8 [n].
            labels: context of each code [n], or None for a single context.
            prediction: patterns of the base, F32 patterns of the outer product, or None.
            out: patterns [n].
        """
        if labels is None:
            self._decode(codes, self.row_of_context[:1], self.entries, prediction, out)
        elif len(codes) < math.prod(self.quant_map.table.shape):
            self._decode(*self._used_entries(self.row_of_context[labels], codes), prediction, out)
        elif (entries := self.by_context) is None:
            self._decode(codes, self.row_of_context[labels], self.entries, prediction, out)
        else:
            rows = ONE_ROW if len(entries) == 1 else labels.astype(np.uint16, copy=False)
            self._decode(codes, rows, entries, prediction, out)
        if self.quant_map.zero_code is not None:
            out[np.flatnonzero(codes == self.quant_map.zero_code)] = 0

    def _used_entries(
        self, rows: NDArray[np.uint16], codes: Bytes
    ) -> tuple[Bytes, NDArray[np.uint16], NDArray[Any]]:
        """Return a table with one entry for each of a few codes, instead of all entries of the map.

        A header of a few kilobytes may describe a table of a million entries.
        """
        at, values = np.arange(len(codes)), self._finished(self.quant_map.table.at(rows, codes))
        entries = np.zeros((-(-len(codes) // MAX_CODES), MAX_CODES), values.dtype)
        entries.reshape(-1)[: len(codes)] = values
        return (at % MAX_CODES).astype(np.uint8), (at // MAX_CODES).astype(np.uint16), entries

    def _decode(
        self,
        codes: Bytes,
        rows: NDArray[np.uint16],
        entries: NDArray[Any],
        prediction: Patterns | None,
        out: Patterns,
    ) -> None:
        is_outer = self.plan.predictor in (Predictor.OUTER, Predictor.LOW_RANK)
        if self.plan.domain is not Domain.LINEAR:
            if prediction is None:
                prediction = np.zeros(len(codes), PATTERN_TYPES[self.dtype.pattern_bytes])
            elif is_outer:
                prediction = cpu().from_f32(prediction, self.kind)
            cpu().add_bits(prediction, codes, rows, entries, out)
        elif prediction is None:
            cpu().lookup(codes, rows, entries, out)
        elif is_outer:
            terms = np.empty(len(codes), np.uint32)
            cpu().lookup(codes, rows, entries, terms)
            out[:] = cpu().from_f32(cpu().add_f32(prediction, terms), self.kind)
        else:
            cpu().add_linear(prediction, codes, rows, entries, self.kind, out)


def predicted(plan: Plan, sources: ChunkSources) -> Patterns | None:
    """Return the prediction for a chunk: base patterns, F32 outer products, or None for zero."""
    if plan.outer is not None:
        return plan.outer.products(sources.begin, sources.end)
    return sources.base_patterns() if plan.predictor is Predictor.BASE else None
