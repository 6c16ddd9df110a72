"""One weight on a grid: its codes, with or without compensation of errors, and their levels and contexts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.column_rounding import ColumnGrid, ColumnRounding, Targets
from ckptz.codec.grid_steps import RowSteps, bare_levels, fit_levels, largest_magnitude
from ckptz.codec.quantizer import Quantizer
from ckptz.codec.rounding_rule import (
    LEAST,
    LEAST_OF_CLUSTERS,
    MIN_DECIDING,
    TO_NEAREST,
    RoundingRule,
    choose_rounding,
    deciding_elements,
)
from ckptz.codec.sensitivity import floats_in, floats_of
from ckptz.codec.tensor import Bounds, MapFunction, SideInformation, TensorToEncode, summed
from ckptz.codec.tensor_plan import ContextCounts, TensorPlan, stream_tables
from ckptz.format.bits import ByteWriter
from ckptz.format.context_rules import (
    MAX_CONTEXTS,
    BaseCode,
    ContextRule,
    Row,
    labels_of_rows,
    n_contexts_of,
    write_runs,
)
from ckptz.format.frequency import entropy_bits, write_tables
from ckptz.format.plan import Domain, LinearTable, Plan, Predictor, QuantizationMap, StreamTables
from ckptz.format.sources import CHUNK_VALUES, Patterns, TensorSource, n_rows_of
from ckptz.format.values import FLOAT_KINDS
from ckptz.kernels import rounding
from ckptz.kernels.floats import MAX_MAGNITUDE

SAMPLE_OUTPUTS: Final = 128  # outputs of a layer that levels are fitted to
N_FITS: Final = 2  # a third fit changes the size by less than 1 %
FULL_STEPS: Final = 4.0  # least RMS, in steps, of rows of full files whose rounding is chosen
FINEST: Final = 1 / 64  # smallest factor by which steps are reduced

Outputs = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class _Counted:
    """Counts of codes by context, and sums of their magnitudes; those of chunks can be added.

    Attributes:
        codes: counts of codes; contexts are numbered by row context, then by code of the base.
        sums: sums of magnitudes by row context and code [n_row_contexts, 256], if levels are fitted.
    """

    codes: ContextCounts
    sums: NDArray[np.float64]

    def __add__(self, other: _Counted) -> _Counted:
        return _Counted(self.codes + other.codes, self.sums + other.sums)


@dataclass(frozen=True, slots=True)
class GridTensor(Quantizer):
    """Quantizer of a tensor on a grid.

    Attributes:
        source: the tensor.
        base: the base that is subtracted, or None.
        rows: steps of the rows.
        dead_zone: additional share of a step that becomes zero.
        rounding_rule: to the nearest level, or stochastic.
        most: largest magnitude that has codes; larger ones escape.
        rounded: codes of the complete tensor, if they are known: after error-compensated rounding, and for a
            tensor of one chunk.
        fits_levels: whether magnitudes are summed up when codes are counted.
    """

    source: TensorSource
    base: TensorSource | None
    rows: RowSteps
    dead_zone: float
    rounding_rule: RoundingRule = TO_NEAREST
    most: int = MAX_MAGNITUDE
    rounded: NDArray[np.uint8] | None = None
    fits_levels: bool = False

    @property
    def row_patterns(self) -> int:
        """Number of elements in a row, the unit that has a label."""
        return self.source.n_patterns // len(self.rows.labels)

    @property
    def n_base_codes(self) -> int:
        """Number of codes of the base's frame; 1 if it has no codes or too many for contexts.

        As contexts they save 2.7 % of a delta's bits. In addition, quartiles of the second moment would save
        1.2 %, the sign of the base 0.2 %, and the sign of its first moment nothing.
        """
        n = 1 if self.base is None else self.base.n_codes or 1
        return n if n * len(self.rows.steps) <= MAX_CONTEXTS else 1

    def whole_residual(self) -> NDArray[np.float32]:
        """Return the difference of the complete tensor to its base, float32 [n_rows, elements of a row]."""
        source, base = self.source, self.base
        whole = np.empty(source.n_patterns, np.float32)
        for begin, end in source.chunk_bounds():
            values = floats_in(source, begin, end)
            # The difference is rounded once, from double.
            whole[begin:end] = (
                values if base is None else values.astype(np.float64) - floats_in(base, begin, end)
            )
        return whole.reshape(n_rows_of(tuple(source.shape)), -1)

    def codes(self, begin: int, end: int, patterns: Patterns) -> NDArray[np.uint8]:
        """Return the codes of patterns begin..end, uint8 [end - begin]; the last code is the escape code."""
        if self.rounded is None:
            codes = np.empty(end - begin, np.uint8)
            seed, inputs = self.rounding_rule.seed, self.inputs(begin, end, patterns)
            rounding().residual_codes(*inputs, self.dead_zone, seed, begin, codes)
        else:
            codes = self.rounded[begin:end]
        return codes if self.most == MAX_MAGNITUDE else np.minimum(codes, np.uint8(2 * self.most + 1))

    def inputs(self, begin: int, end: int, patterns: Patterns) -> tuple[Any, ...]:
        """Return the arguments of kernels for patterns [n].

        Values [n], base values [n] or None, steps of contexts, labels of rows, number of elements in a row.
        """
        values = floats_of(patterns, FLOAT_KINDS[self.source.dtype.name])
        base = None if self.base is None else floats_in(self.base, begin, end)
        steps = self.rows.steps.astype(np.float32)
        return values, base, steps, self.rows.labels, self.row_patterns

    def choose_rounding(self, tensor: TensorToEncode, peak: float, most: float | None) -> GridTensor:
        """Choose the rounding rule, and finer steps for stochastic rounding, from the middle chunk.

        Residuals of elements whose base, or value without a base, is within `peak` steps of zero are ignored:
        weights have a peak at zero, so many of these residuals are small with and without a restore.

        If few elements have moved by a step, finer steps reduce the error of stochastic rounding, which is
        the product of movement and step, for few bits. All tensors of a file use the same factor, so that the
        ratio of bits and errors is the same in each.

        Args:
            tensor: the tensor; the rule of the base's file is `self.rounding_rule`.
            peak: steps around zero to ignore.
            most: largest factor of the steps with stochastic rounding; None for no change.
        """
        old, parts = self.rounding_rule, deciding_elements(self.source, self.base)
        samples = [self._sample(*part) for part in parts]
        sample, origins, labels = map(np.concatenate, zip(*samples, strict=True))
        of_rows = self.rows.steps.astype(np.float32)[labels]
        thresholds = None
        if old.is_stochastic:
            thresholds = np.concatenate([old.thresholds(i, j - i)[at - i] for (i, j), at in parts])
        movements = (sample - origins) / of_rows
        base = self.base
        if base is None:
            movements -= np.rint(movements)
            # Densities that are not smooth over a step look clustered: steps have to be far below the spread.
            movements[FULL_STEPS * of_rows > np.sqrt(np.square(sample).mean())] = np.nan
        is_far = np.abs(sample if base is None else origins) > peak * of_rows
        if np.count_nonzero(is_far) < MIN_DECIDING:
            is_far[:] = True
        least = LEAST_OF_CLUSTERS if base is None else LEAST
        known = np.where(is_far, movements, np.nan)
        groups = None if base is None else labels
        rule = choose_rounding(known, thresholds, old, tensor.dither_seed, least, groups, tensor.was_restored)
        share = min(max(most, FINEST), 1.0) if most and rule.is_stochastic else 1.0
        return replace(self, rounding_rule=rule, rows=replace(self.rows, steps=self.rows.steps * share))

    def _sample(self, bounds: Bounds, at: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        """Return the values, base values and labels of steps of elements `at` of a chunk; [n] each."""
        begin, end = bounds
        values, base, _, labels, row_patterns = self.inputs(begin, end, self.source.patterns(begin, end))
        sample = values[at - begin].astype(np.float64)
        origins = np.zeros_like(sample) if base is None else base[at - begin].astype(np.float64)
        return sample, origins, labels[at // row_patterns]

    def fit(self, counted: _Counted) -> tuple[int, LinearTable]:
        """Fit the largest magnitude that has codes, and the levels of the codes."""
        merged = _merged(counted.codes, self.n_base_codes)
        by_row = np.zeros((len(self.rows.steps), 256), np.int64)
        by_row[merged.contexts, : merged.counts.shape[1]] = merged.counts
        most = largest_magnitude(counted.codes.total)
        return most, fit_levels(self.rows.steps, by_row, counted.sums, most)

    def rules(self, n_base_codes: int) -> tuple[ContextRule, ...]:
        """Return the context rules: by row, and by code of the base if there are several."""
        rows = (Row(len(self.rows.steps), self.rows.labels),) if len(self.rows.steps) > 1 else ()
        return (*rows, BaseCode(n_base_codes)) if n_base_codes > 1 else rows

    def coded(self) -> GridTensor:
        """Return the quantizer with the codes of a tensor of one chunk, which is planned and encoded once."""
        n = self.source.n_patterns
        return (
            self if n > CHUNK_VALUES else replace(self, rounded=self.codes(0, n, self.source.patterns(0, n)))
        )

    def counted(self, run: MapFunction) -> _Counted:
        """Count the codes of the tensor by row context and code of the base."""
        return summed(run, self.count, self.source)

    def count(self, bounds: Bounds) -> _Counted:
        """Count the codes of one chunk by row context and code of the base."""
        patterns = self.source.patterns(*bounds)
        codes = self.codes(*bounds, patterns)
        sums = np.zeros((len(self.rows.steps), 256))
        if self.fits_levels:
            values, base, _, row_labels, row_patterns = self.inputs(*bounds, patterns)
            rounding().residual_sums(values, base, row_labels, row_patterns, bounds[0], codes, sums)
        n_base_codes = self.n_base_codes
        contexts: NDArray[Any] = labels_of_rows(self.rows.labels, *bounds, self.row_patterns)
        base_codes = None if self.base is None or n_base_codes == 1 else self.base.codes(*bounds)
        if n_base_codes > 1:
            contexts = contexts * np.uint16(n_base_codes)
        if base_codes is not None:
            contexts += base_codes
        return _Counted(ContextCounts.of(contexts, codes, len(self.rows.steps) * n_base_codes), sums)


@dataclass(frozen=True, slots=True)
class Layer:
    """A weight during error-compensated rounding; needs memory for up to three float32 copies of it.

    Attributes:
        grid: the grid of the tensor.
        residual: the difference to the base [n_rows, elements of a row].
        is_transposed: whether the first dimension of the weight is the input dimension.
        roundings: factors of the input covariance of each group.
    """

    grid: GridTensor
    residual: NDArray[np.float32]
    is_transposed: bool
    roundings: tuple[ColumnRounding, ...]

    @classmethod
    def of(cls, grid: GridTensor, guide: SideInformation) -> Layer | None:
        """Prepare a weight with known input covariance [n, n] or [n_groups, n, n]; None without."""
        moments = None if guide.inputs is None else guide.inputs.read()
        if guide.inputs is None or moments is None or moments.ndim < 2:
            return None
        groups = moments.reshape(-1, *moments.shape[-2:])
        roundings = tuple(map(ColumnRounding.of, groups))
        return cls(grid, grid.whole_residual(), guide.inputs.axis == 0, roundings)

    def fit(self) -> tuple[int, LinearTable]:
        """Fit the largest magnitude that has codes, and the levels, to a sample of the outputs.

        The rounded values contain the errors of earlier columns, so their centroids have larger magnitudes.
        Centroids of the original values would shrink the restored ones: 4.3 % more bits and 4.3 % more
        weighted error on a language model's run.
        """
        rows = self.grid.rows
        most, levels = MAX_MAGNITUDE, bare_levels(rows.steps)
        for _ in range(N_FITS):
            targets, n_patterns = Targets.none(len(rows.steps)), 0
            for group_rounding, columns, part in self._parts(SAMPLE_OUTPUTS):
                targets.add(group_rounding, columns, self._columns(part, most, levels))
                n_patterns += columns.size
            most = largest_magnitude(targets.counts.sum(axis=0) * (self.residual.size / n_patterns))
            levels = fit_levels(rows.steps, targets.weights, targets.sums, most)
        return most, levels

    def rounded(self, most: int, levels: LinearTable) -> NDArray[np.uint8]:
        """Return the codes of the complete tensor, uint8 [n_patterns]."""
        codes = np.empty(self.residual.shape, np.uint8)
        by_output = codes.T if self.is_transposed else codes
        for group_rounding, columns, part in self._parts():
            by_output[part] = group_rounding.round(columns, self._columns(part, most, levels)).T
        return codes.reshape(-1)

    def _parts(
        self, most: int | None = None
    ) -> Iterator[tuple[ColumnRounding, NDArray[np.float32], Outputs]]:
        """Yield the columns [n, n_outputs] of each group and the indices of their outputs, at most `most`."""
        by_output = self.residual.T if self.is_transposed else self.residual
        size = len(by_output) // len(self.roundings)
        for i, group_rounding in enumerate(self.roundings):
            n = min(size, most or size)
            part = i * size + np.arange(n) * size // n
            yield group_rounding, np.ascontiguousarray(by_output[part].T), part

    def _columns(self, part: Outputs, most: int, levels: LinearTable) -> ColumnGrid:
        rows = self.grid.rows
        labels = np.broadcast_to(rows.labels, len(self.residual))
        labels = labels[:, None] if self.is_transposed else labels[None, part]
        steps = rows.steps.astype(np.float32)[labels]
        return ColumnGrid(steps, labels, levels.expand().view(np.float32), self.grid.dead_zone, most)


def encoding_of(grid: GridTensor, counted: _Counted, most: int, levels: LinearTable) -> TensorPlan:
    """Build the plan from the counts of all codes."""
    by_row = _merged(counted.codes, grid.n_base_codes)
    has_escape = bool(counted.codes.total[2 * most + 1 :].any())
    by_row, by_both = (_clipped(counts, 2 * most + 1) for counts in (by_row, counted.codes))
    candidates = [(grid.rules(1), by_row)]  # rules by row are required
    if grid.n_base_codes > 1:
        candidates.append((grid.rules(grid.n_base_codes), by_both))
    coded = [_coded(*candidate) for candidate in candidates]
    best = min(range(len(coded)), key=lambda k: coded[k][0])
    (rules, chosen), (_, tables) = candidates[best], coded[best]
    n_contexts = n_contexts_of(rules)
    row_of_context = np.arange(n_contexts) // (n_contexts // len(grid.rows.steps))
    if has_escape:
        levels = replace(levels, level=np.append(levels.level, 0.0))  # the entry of the escape code
    quant_map = QuantizationMap(levels, row_of_context, escape_code=2 * most + 1 if has_escape else None)
    is_counted = grid.source.n_patterns <= CHUNK_VALUES and rules
    plan = Plan(
        quant_map=quant_map,
        domain=Domain.LINEAR,
        predictor=Predictor.ZERO if grid.base is None else Predictor.BASE,
        rules=rules,
        tables=tables,
    )
    return TensorPlan(plan, replace(grid, most=most), counted=(chosen,) if is_counted else ())


def _coded(rules: tuple[ContextRule, ...], counts: ContextCounts) -> tuple[float, tuple[StreamTables, ...]]:
    """Return the bytes of the codes with their tables, and the tables: none without contexts."""
    if not rules:
        return entropy_bits(counts.total) / 8, ()
    tables = stream_tables(counts, n_contexts_of(rules))
    out = ByteWriter()
    write_tables(out, tables.frequencies)
    write_runs(out, tables.table_of)
    return len(out) + counts.bytes_by(tables), (tables,)


def _merged(counted: ContextCounts, n: int) -> ContextCounts:
    """Merge each `n` consecutive contexts."""
    contexts, first = np.unique(counted.contexts // n, return_index=True)
    return ContextCounts(contexts, np.add.reduceat(counted.counts, first, axis=0))


def _clipped(counted: ContextCounts, last: int) -> ContextCounts:
    """Replace codes above `last` by `last`."""
    counts = counted.counts[:, : last + 1].copy()
    counts[:, last:] += counted.counts[:, last + 1 :].sum(axis=1, keepdims=True)
    return ContextCounts(counted.contexts, counts)
