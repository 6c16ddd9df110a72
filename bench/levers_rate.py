"""Rounding that weighs errors against bits, for levers.py: of a plan that calibrated rounding made.

Columns are rounded one after another, errors pushed on, as `ckptz.quant.rounding` does it; but of the nearest
level, the next one towards zero, and zero itself, a weight takes the one with the least

    ((target - level) / step)^2 + rate * bits of its code in its class

Bits are those of the plan's own tables. A gain makes up for what shrinking takes from the movement: levels
are multiplied by what restores its projection, in the metric of the layer's inputs, and a second round
follows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from levers_chain import Revise
from levers_states import Codes, Floats
from numpy.typing import NDArray

from ckptz.codec.plan import Plan, Predictor, StreamTables
from ckptz.codec.quant_map import LinearTable, QuantizationMap
from ckptz.codec.sources import ChunkSources
from ckptz.codec.units import ArraySource, TensorSource
from ckptz.encoding.guide import Guide
from ckptz.methods.lossless import stream_tables
from ckptz.quant.grid import ESCAPE, grid_codes
from ckptz.quant.rounding import ColumnGrid, round_compensated
from ckptz.transform.classes import ClassCounts, labels_of

N_ROUNDS: Final = 1
LONGEST_CODE: Final = 14.0  # bits; for codes that have not occurred so far


@dataclass(frozen=True, slots=True, kw_only=True)
class RateGrid(ColumnGrid):
    """A grid that knows what its codes cost.

    Attributes:
        bits: of each code in each class [n_classes, n_codes].
        classes: of each weight [n, n_rows].
        rate: what a bit is worth, in squared steps.
    """

    bits: NDArray[np.float64]
    classes: NDArray[np.int64]
    rate: float

    def round(self, column: int, target: Floats, exact: Floats) -> tuple[Codes, Floats]:
        """See `ColumnGrid.round`."""
        at = min(column, len(self.steps) - 1)
        steps, labels, classes = self.steps[at], self.labels[at], self.classes[column]
        nearest = grid_codes(target / steps, 0.0, self.most)
        is_escaped = nearest == ESCAPE
        first = np.where(is_escaped, 0, nearest).astype(np.int64)
        choices = np.stack([first, np.maximum(first - 2, 0), np.zeros_like(first)])
        restored = self.values[labels, choices]
        costs = ((target - restored) / steps) ** 2 + self.rate * self.bits[classes, choices]
        best = costs.argmin(0)[None]
        codes = np.take_along_axis(choices, best, 0)[0].astype(np.uint8)
        values = np.take_along_axis(restored, best, 0)[0]
        return np.where(is_escaped, ESCAPE, codes).astype(np.uint8), np.where(is_escaped, exact, values)


@dataclass(frozen=True, slots=True)
class FixedCodes:
    """Codes that are known already; see `ckptz.codec.plan.Quantizer`."""

    found: Codes

    def codes(self, begin: int, end: int, units: Any) -> Codes:
        """Codes of some units."""
        del units
        return self.found[begin:end]

    def kept(self, units: Any) -> Any:
        """Escaped values are exact."""
        return units

    def protected(self, begin: int, end: int, units: Any) -> None:
        """There are none."""
        del begin, end, units


def by_values(source: ArraySource, base: TensorSource | None, plan: Plan, guide: Guide) -> Plan:
    """Levels at the centroids of the values without the errors pushed on them, as they were before."""
    moments = _matrix_of(guide)
    return plan if moments is None else _Layer.of(source, base, plan, moments).by_values()


def _matrix_of(guide: Guide) -> NDArray[Any] | None:
    """Second moments of the inputs of a linear layer."""
    if guide.inputs is None or guide.inputs.axis != 1:
        return None
    moments = guide.inputs.read()
    return moments if moments.ndim == 2 else None


def weighed(rate: float, has_gain: bool = False) -> Revise:
    """Plans whose codes are chosen by errors and bits, where the inputs of a linear layer are known.

    Args:
        rate: what a bit is worth, in squared steps.
        has_gain: whether levels make up for what shrinking takes from the movement.
    """

    def revise(source: ArraySource, base: TensorSource | None, plan: Plan, guide: Guide) -> Plan:
        moments = _matrix_of(guide)
        return plan if moments is None else _Layer.of(source, base, plan, moments).weighed(rate, has_gain)

    return revise


@dataclass(frozen=True, slots=True)
class _Layer:
    """A linear layer's weight before it is rounded.

    Attributes:
        plan: what the planner made of it.
        quant_map: of the plan.
        table: of the map.
        moments: second moments of its inputs [n, n].
        residual: to the base [n_rows, n].
        classes: of each weight [n_rows, n].
        steps: of each row.
        first: codes that the plan has.
    """

    plan: Plan
    quant_map: QuantizationMap
    table: LinearTable
    moments: NDArray[Any]
    residual: Floats
    classes: NDArray[np.int64]
    steps: Floats
    first: Codes

    @classmethod
    def of(cls, source: ArraySource, base: TensorSource | None, plan: Plan, moments: NDArray[Any]) -> _Layer:
        n_units, n_rows = len(source.flat), source.shape[0]
        residual = source.flat.view(np.float32)
        if plan.predictor is Predictor.BASE:
            assert base is not None
            residual = residual - base.units(0, n_units).view(np.float32)
        classes = np.zeros(n_units, np.int64)
        if plan.rules:
            sources = ChunkSources(0, n_units, base)
            classes = labels_of(plan.rules, sources, n_units // n_rows).astype(np.int64)
        rows = plan.quantizer.grid.rows  # type: ignore[union-attr]  # of plan_grid
        labels = np.broadcast_to(rows.labels, n_rows)
        assert plan.quant_map is not None
        assert isinstance(plan.quant_map.table, LinearTable)
        assert plan.quantizer is not None
        return cls(
            plan,
            plan.quant_map,
            plan.quant_map.table,
            moments,
            residual.reshape(n_rows, -1),
            classes.reshape(n_rows, -1),
            rows.steps.astype(np.float32)[labels],
            plan.quantizer.codes(0, n_units, source.flat),
        )

    def by_values(self) -> Plan:
        """The plan with levels at the centroids of values, and codes rounded to them."""
        grid = replace(self.plan.quantizer.grid, rounded=None)  # type: ignore[union-attr]
        most, levels = grid.fit(grid.count((0, self.residual.size)))
        labels = np.broadcast_to(grid.rows.labels, len(self.residual))[None]
        columns = ColumnGrid(self.steps[None], labels, levels.expand(), grid.dead_zone, most)
        found = round_compensated(np.ascontiguousarray(self.residual.T), self.moments, columns).T.reshape(-1)
        codes = np.minimum(found, np.uint8(2 * most + 1))
        has_escape = bool((codes == 2 * most + 1).any())
        n_classes = self.plan.n_classes // grid.rows.n_classes if self.plan.rules else 1
        rows = np.arange(self.plan.n_classes) // n_classes if self.plan.rules else np.zeros(1, np.int64)
        quant_map = QuantizationMap(
            levels.table(has_escape), rows, escape_code=2 * most + 1 if has_escape else None
        )
        return self._with(quant_map, codes)

    def weighed(self, rate: float, has_gain: bool) -> Plan:
        """The plan with other codes."""
        tables, codes, table = self._tables(self.first), self.first, self.table
        for i in range(N_ROUNDS + has_gain):
            if has_gain and i == N_ROUNDS:
                table = replace(table, scale=table.scale * self._gain(codes))
            codes = self._codes(rate, tables, table)
            tables = self._tables(codes)
        return self._with(replace(self.quant_map, table=table), codes)

    def _with(self, quant_map: QuantizationMap, codes: Codes) -> Plan:
        tables = (self._tables(codes),) if self.plan.rules else ()
        quantizer = FixedCodes(codes)
        return replace(self.plan, quant_map=quant_map, tables=tables, quantizer=quantizer, counted=())

    def _tables(self, codes: Codes) -> StreamTables:
        n_classes = max(self.plan.n_classes, 1)
        labels = self.classes.reshape(-1).astype(np.uint16)
        return stream_tables(ClassCounts.of(labels, codes, n_classes), n_classes)

    @property
    def _row_labels(self) -> NDArray[np.int64]:
        return self.quant_map.row_of_class[self.classes[:, 0]]

    def _codes(self, rate: float, tables: StreamTables, table: LinearTable) -> Codes:
        n_codes = self.quant_map.n_codes
        shares = tables.frequencies[tables.table_map.table_of, :n_codes] / 4096
        bits = np.minimum(-np.log2(np.maximum(shares, 2.0**-LONGEST_CODE)), LONGEST_CODE)
        grid = RateGrid(
            steps=self.steps[None],
            labels=self._row_labels[None].astype(np.uint8),
            values=table.expand().view(np.float32),
            dead_zone=0.0,
            most=(n_codes - 1 - (self.quant_map.escape_code is not None)) // 2,
            bits=bits,
            classes=self.classes.T,
            rate=rate,
        )
        codes = round_compensated(np.ascontiguousarray(self.residual.T), self.moments, grid).T.reshape(-1)
        return np.minimum(codes, np.uint8(n_codes - 1))

    def _gain(self, codes: Codes) -> float:
        """What the levels lack to keep the residual's projection on itself."""
        values = self.table.expand().view(np.float32)
        sent = values[self._row_labels[:, None], codes.reshape(self.residual.shape)].astype(np.float64)
        through = self.residual.astype(np.float64) @ self.moments
        return float((through * self.residual).sum() / (through * sent).sum())
