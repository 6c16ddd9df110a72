"""A tensor on a GPU while it is planned and encoded there: what is measured of it, its codes, and its chunks.

Byte for byte what `ckptz.encoding.chunk` makes of the same draft. Sums that steps and levels follow from are
added up in the host's order; those of which few digits count (logarithms, second moments by row), and of
errors, which no two processors add up alike, in the device's.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from ckptz.class_rules import ClassRule, Magnitude
from ckptz.codec.decode import Run
from ckptz.codec.frame import FrameHeader
from ckptz.codec.on_device import FLOATS, Classes, classes_of, moved, restore
from ckptz.codec.plan import Domain, Plan, Predictor, kernel_mode
from ckptz.codec.units import CHUNK_UNITS, TensorSource, chunk_bounds, n_chunks_of, n_rows_of
from ckptz.codec.values import KINDS
from ckptz.encoding.chunk import Deviation, EncodedChunk, EncodedSource, encode_values
from ckptz.encoding.draft import ClassCounts, Draft
from ckptz.encoding.moments_on_device import (
    LARGEST,
    N_LEVELS,
    codes_of,
    ladder_codes,
    ladder_levels,
    step_levels,
    sums_by_cell,
)
from ckptz.encoding.near import Near, Resident
from ckptz.encoding.planes_on_device import Found, Slab, counted, finished, host_of, slabs
from ckptz.encoding.subject import Extent
from ckptz.kernels import planes_on_gpu, values_on_gpu
from ckptz.kernels import torch as kernels
from ckptz.kernels.floats import NEAREST
from ckptz.parallel import Workers
from ckptz.quant.grid import OnGrid
from ckptz.quant.moment_codes import LadderQuantizer, LadderSums, Prediction, StepQuantizer
from ckptz.quant.moments import LevelSums, LogSums
from ckptz.quant.quantizer import Quantizer

DEVICE_BYTES: Final = 768 << 20  # of device memory beside the tensors; one chunk is coded whatever it takes
PLANE_SCRATCH: Final = 2.25  # bytes on the device for each byte coded: planes, words, samples
DELTA_SCRATCH: Final = 4.5  # and base, classes, codes in their order
GRID_SCRATCH: Final = 40  # bytes for each unit: floats of it and its base, codes, classes, doubles of squares
MOMENT_SCRATCH: Final = 128  # and levels, cells, their order, doubles in steps, a restored companion

Bounds = tuple[int, int]
Array = np.ndarray[Any, Any]
Kept = tuple[torch.Tensor, torch.Tensor]


class There:
    """A tensor on a device, beside what it may be stored against and the tensors that its classes look at.

    Args:
        source: the tensor.
        base: on the device, or None.
        companions: on the device, by name.
        workers: threads that choose coders.
    """

    def __init__(
        self, source: Resident, base: Near | None, companions: Mapping[str, Near], workers: Workers
    ) -> None:
        self.dtype, self.shape, self.flat = source.dtype, source.shape, source.now()
        self.base, self.companions, self._workers = base, companions, workers
        self._counted: list[Found] = []  # codes of planes by class, of each chunk

    def _slabs(self, bytes_of_unit: float) -> Iterator[Bounds]:
        return slabs(len(self.flat), bytes_of_unit, DEVICE_BYTES)

    def _base(self, begin: int, end: int) -> torch.Tensor:
        assert self.base is not None
        return self.base.there(begin, end)

    def _signed(self, begin: int, end: int) -> torch.Tensor:
        """Give units begin..end as torch's integers, which can be compared."""
        return self.flat[begin:end].view(kernels.UNIT_TYPES[self.dtype.unit_bytes])

    def _floats(self, units: torch.Tensor) -> torch.Tensor:
        """Read values, float32 [n], of units [n] of a dtype in `KINDS`."""
        return units.view(FLOATS[KINDS[self.dtype.name]]).to(torch.float32)

    def _values(self, begin: int, end: int) -> torch.Tensor:
        return self._floats(self.flat[begin:end])

    # --- what plans follow from ---

    def class_counts(self, mode: int) -> list[ClassCounts]:
        """Count the codes of each plane, of a kernels' mode, by the magnitude of the base."""
        self._counted = []
        for begin, end in self._slabs(DELTA_SCRATCH * self.dtype.unit_bytes):
            units, others = self.flat[begin:end], self._base(begin, end)
            planes, classes = planes_on_gpu().split_planes(units, others, mode), Classes.by_magnitude(others)
            self._counted += [counted(planes, classes, i) for i in range(len(classes.counts))]
        return [functools.reduce(operator.add, plane) for plane in zip(*self._counted, strict=True)]

    def top_histogram(self) -> Array:
        """Count units by their top 16 bits; see `ckptz.quant.sketch.Sketch`."""
        found = sum(kernels.top_histogram(self._signed(*b)) for b in self._slabs(MOMENT_SCRATCH))
        assert isinstance(found, torch.Tensor)
        return host_of(found)

    def extent(self, squares: TensorSource | None) -> Extent | None:
        """Measure the tensor, its base and second moments of its gradients; None if the host has these."""
        if squares is not None and not isinstance(squares, Resident):
            return None
        found = [] if squares is None else [self._sensitivity(squares)]
        for begin, end in self._slabs(GRID_SCRATCH):
            values = self._values(begin, end)
            others = None if self.base is None else self._floats(self._base(begin, end))
            largest = float(torch.stack([p.abs().max() for p in (values, others) if p is not None]).max())
            sizes = [len(part) for part in torch.split(values, CHUNK_UNITS)]
            powers, residuals = _powers(values.to(torch.float64), sizes), [np.inf] * len(sizes)
            if others is not None:
                residuals = _powers(values.to(torch.float64).sub_(others.to(torch.float64)), sizes)
            found += [
                Extent(n, largest, power, residual, None, 0.0, True)
                for n, power, residual in zip(sizes, powers, residuals, strict=True)
            ]
        return functools.reduce(operator.add, found)

    def _sensitivity(self, squares: Resident) -> Extent:
        """Sum second moments, by row and with the squares of the values."""
        moments = squares.now().view(FLOATS[KINDS[squares.dtype.name]])
        row_sums = moments.view(n_rows_of(self.shape), -1).sum(dim=1, dtype=torch.float64)
        parts = []
        for begin, end in chunk_bounds(len(self.flat)):
            values, part = self._values(begin, end).to(torch.float64), moments[begin:end]
            energy = (part.to(torch.float64) * (values * values)).sum()
            is_one = ((part >= 0) & (part < torch.inf)).all()
            parts.append(torch.stack([energy, is_one.to(torch.float64)]))
        energies, are_all = torch.stack(parts).cpu().numpy().T
        return Extent(0, 0.0, 0.0, 0.0, host_of(row_sums), float(energies.sum()), bool(are_all.all()))

    def ratio_sums(self, second: Near, roots: Array) -> Array:
        """Sum magnitudes in roots [256] of classes of second moments; and count those that have a root."""
        total, n_live, root_of = 0.0, 0, moved(roots, self.flat.device)
        for begin, end in self._slabs(MOMENT_SCRATCH):
            units = second.there(begin, end)
            own = root_of[planes_on_gpu().magnitude_classes(units).to(torch.int64)]
            is_live = (own > 0) & (units.view(kernels.UNIT_TYPES[second.dtype.unit_bytes]) != 0)
            sizes = torch.stack([part.sum() for part in torch.split(is_live, CHUNK_UNITS)]).tolist()
            ratios = (self._values(begin, end).to(torch.float64).abs() / own)[is_live]
            total = functools.reduce(operator.add, values_on_gpu().sums_of_pairs(ratios, sizes), total)
            n_live += sum(sizes)
        return np.array([total, n_live])

    def row_powers(self, n_rows: int, row_units: int) -> Array:
        """Sum squares of each row [n_rows], one after another in each chunk."""
        powers = np.zeros(n_rows)
        for begin, end in self._slabs(MOMENT_SCRATCH):
            values, at = (
                self._values(begin, end).to(torch.float64),
                torch.arange(end - begin, device=self.flat.device),
            )
            cells = at // CHUNK_UNITS * n_rows + (at + begin) // row_units
            for _, sums in sums_by_cell(cells, values * values, n_rows, n_chunks_of(end - begin)):
                powers += sums
        return powers

    def log_sums(self, shape: tuple[int, int]) -> LogSums:
        """Sum binary logarithms over rows and columns of a matrix of this shape; see `LogSums`."""
        sums = LogSums(np.zeros((2, shape[0])), np.zeros((2, shape[1])))
        n_rows = max(int(DEVICE_BYTES / (MOMENT_SCRATCH * shape[1])), 1)
        for first in range(0, shape[0], n_rows):
            last = min(first + n_rows, shape[0])
            values = self._values(first * shape[1], last * shape[1]).view(-1, shape[1]).to(torch.float64)
            is_live = values > 0
            for j, terms in enumerate((torch.where(is_live, values.log2(), 0.0), is_live.to(torch.float64))):
                sums.rows[j, first:last] = host_of(terms.sum(dim=1))
                sums.columns[j] += host_of(terms.sum(dim=0))
        return sums

    def sums_by(self, quantizer: Any) -> Any:
        """Sum what the levels of a quantizer stand for over the whole tensor, chunk by chunk."""
        of_slab = self._ladder_sums if isinstance(quantizer, LadderQuantizer) else self._step_sums
        found = (of_slab(quantizer, begin, end) for begin, end in self._slabs(MOMENT_SCRATCH))
        return functools.reduce(operator.add, itertools.chain.from_iterable(found))

    def _ladder_sums(self, quantizer: LadderQuantizer, begin: int, end: int) -> Iterator[LadderSums]:
        levels, has_level, ratios = self._ladder_levels(quantizer, begin, end)
        first, n = quantizer.ladder.span(quantizer.prediction.kind)
        places = levels - first
        at = (has_level & (places >= 0) & (places < n)).nonzero()[:, 0]
        cells = (at // CHUNK_UNITS * 4 + at % 4) * n + places[at]  # by turns, as the host's kernel adds
        for chunk in sums_by_cell(cells, ratios[at], 4 * n, n_chunks_of(end - begin)):
            counts, roots = (turns.reshape(4, n).sum(axis=0) for turns in chunk)
            yield LadderSums(first, counts, roots, 0, 0)
        n_zeros = int((self._signed(begin, end) == 0).sum())
        others = end - begin - n_zeros - len(at)
        yield LadderSums(first, np.zeros(n, np.int64), np.zeros(n), n_zeros, others)

    def _step_sums(self, quantizer: StepQuantizer, begin: int, end: int) -> Iterator[LevelSums]:
        classes = self._classes(self._run(Plan(rules=quantizer.classes.rules), begin, end))
        n, (levels, ratios) = len(quantizer.classes.steps), self._step_levels(quantizer, classes, begin, end)
        cells = levels + LARGEST
        if classes is not None:
            cells += classes.labels.to(torch.int64) * N_LEVELS
        counts = host_of(torch.bincount(cells, minlength=n * N_LEVELS)).reshape(n, N_LEVELS)
        if quantizer.key != NEAREST:
            yield LevelSums(counts, counts * np.arange(-LARGEST, LARGEST + 1.0))
            return
        at = levels.nonzero()[:, 0]
        cells = cells[at] + at // CHUNK_UNITS * (n * N_LEVELS)
        yield LevelSums(counts, np.zeros(counts.shape))
        for _, sums in sums_by_cell(cells, ratios[at], n * N_LEVELS, n_chunks_of(end - begin)):
            yield LevelSums(np.zeros_like(counts), sums.reshape(n, N_LEVELS))

    def codes_by_class(self, quantizer: Quantizer, rules: tuple[ClassRule, ...]) -> ClassCounts:
        """Count the codes of the whole tensor by class."""
        found: list[Found] = []
        for begin, end in self._slabs(_scratch(quantizer)):
            classes = self._classes(self._run(Plan(rules=rules), begin, end))
            found += _found(self._codes(quantizer, classes, begin, end), classes)
        return functools.reduce(operator.add, [own for (own,) in found])

    # --- codes ---

    def _run(self, plan: Plan, begin: int, end: int) -> Run:
        """Give units begin..end as what a reader decodes them into: over the base, or nothing."""
        is_over = plan.predictor is Predictor.BASE
        out = self._base(begin, end).clone() if is_over else torch.empty_like(self.flat[begin:end])
        codes = None if self.base is None or not plan.reads_base_codes else self.base.codes_there(begin, end)
        header = FrameHeader(self.dtype, self.shape, plan, ())
        return Run(header, begin // CHUNK_UNITS, (), out, _not_asked, codes)

    def _classes(self, run: Run) -> Classes | None:
        """Find the classes of a run's units; None where there are none."""
        begin, names = run.first * CHUNK_UNITS, run.header.plan.companion_names
        units = (self.companions[name].there(begin, begin + len(run.out)) for name in names)
        keys = ((id(run), name) for name in names)
        return classes_of(run, dict(zip(keys, map(planes_on_gpu().magnitude_classes, units), strict=True)))

    def _codes(self, quantizer: Any, classes: Classes | None, begin: int, end: int) -> torch.Tensor:
        """Give the codes of units begin..end, uint8 [end - begin]."""
        if isinstance(quantizer, LadderQuantizer):
            levels, has_level, _ = self._ladder_levels(quantizer, begin, end)
            return ladder_codes(quantizer, levels, has_level, self._signed(begin, end) == 0)
        if isinstance(quantizer, StepQuantizer):
            return codes_of(quantizer.rungs, self._step_levels(quantizer, classes, begin, end)[0])
        return self._grid_codes(quantizer, begin, end)

    def _grid_codes(self, grid: OnGrid, begin: int, end: int) -> torch.Tensor:
        codes: torch.Tensor = values_on_gpu().residual_codes(
            self._values(begin, end),
            None if grid.base is None else self._floats(self._base(begin, end)),
            moved(grid.rows.steps.astype(np.float32), self.flat.device),
            moved(grid.rows.labels, self.flat.device),
            grid.row_units,
            grid.dead_zone,
            grid.key,
            begin,
        )
        return codes.clamp_(max=2 * grid.most + 1)

    def _step_levels(
        self, quantizer: StepQuantizer, classes: Classes | None, begin: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        labels = None if classes is None else classes.labels
        return step_levels(quantizer, self._values(begin, end), labels, begin)

    def _ladder_levels(
        self, quantizer: LadderQuantizer, begin: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        predicted = self._predicted(quantizer.prediction, begin, end)
        return ladder_levels(quantizer, self._signed(begin, end), predicted)

    def _predicted(self, prediction: Prediction, begin: int, end: int) -> torch.Tensor | None:
        """Give the units that second moments are told apart from; None for zeros."""
        units, outer = self._signed(begin, end), prediction.outer
        if prediction.base is not None:
            return self._base(begin, end).view(units.dtype)
        if outer is None:
            return None
        vectors = tuple(moved(vector, units.device) for vector in (outer.rows, outer.columns))
        out, codes = torch.empty_like(self.flat[begin:end]), torch.zeros_like(units, dtype=torch.uint8)
        table = torch.zeros_like(units[:1])[None].view(out.dtype)  # of no distance
        given = codes, None, table, prediction.kind, int(Domain.BITS), out, None, vectors, begin
        values_on_gpu().restore(*given)
        return out.view(units.dtype)

    def _restored(self, run: Run, classes: Classes | None, codes: torch.Tensor) -> Kept:
        """Decode a run's codes into its units; gives positions of what escaped, and what stands there."""
        begin, quant_map = run.first * CHUNK_UNITS, run.header.plan.quant_map
        units, positions = self.flat[begin : begin + len(codes)], codes.new_empty(0, dtype=torch.int64)
        if quant_map is not None and quant_map.escape_code is not None:
            positions = (codes == quant_map.escape_code).nonzero()[:, 0]
        kept = units.view(torch.uint8).view(len(units), -1)[positions].view(-1).view(units.dtype)
        restore(run, classes, codes, [(positions, kept)])
        return positions, kept

    # --- chunks ---

    def made(self, draft: Draft, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Give what units begin..end, whole chunks, are restored to, and their codes if a map makes any."""
        if draft.plan.quant_map is None:
            return self.flat[begin:end], None
        run = self._run(draft.plan, begin, end)
        classes = self._classes(run)
        codes = self._codes(draft.quantizer, classes, begin, end)
        self._restored(run, classes, codes)
        return run.out, codes

    def encoded(self, draft: Draft) -> EncodedSource | None:
        """Encode the tensor by a draft, if the device can do what that asks for."""
        plan = draft.plan
        if plan.quant_map is not None:
            pieces = (self._lossy(draft, *b) for b in self._slabs(_scratch(draft.quantizer)))
        else:
            is_ours = plan.rules in ((), (Magnitude(),)) and draft.rounding is None and not draft.is_sparse
            if not is_ours or (plan.rules and not self._counted):
                return None
            scratch = PLANE_SCRATCH if self.base is None else DELTA_SCRATCH
            pieces = (self._exact(plan, *b) for b in self._slabs(scratch * self.dtype.unit_bytes))
        return EncodedSource(self.dtype, self.shape, plan, tuple(itertools.chain.from_iterable(pieces)))

    def _exact(self, plan: Plan, begin: int, end: int) -> list[EncodedChunk]:
        mode, units = kernel_mode(plan.mode, self.dtype), self.flat[begin:end]
        others = self._base(begin, end) if plan.needs_base else units

        def again(first: int, last: int) -> Any:
            return planes_on_gpu().split_planes(units[first:last], others[first:last], mode)

        checksums = planes_on_gpu().xxh64_of_chunks(units, CHUNK_UNITS)
        classes = Classes.by_magnitude(others) if plan.rules else None
        found = self._counted[begin // CHUNK_UNITS : n_chunks_of(end)] if plan.rules else []
        slab = Slab(again(0, len(units)), again, plan, classes, found)
        streams = slab.streams(self._workers)
        both = zip(streams, checksums.tolist(), strict=True)
        return list(self._workers.map(lambda task: finished(*task), both))

    def _lossy(self, draft: Draft, begin: int, end: int) -> list[EncodedChunk]:
        plan, units, run = draft.plan, self.flat[begin:end], self._run(draft.plan, begin, end)
        classes = self._classes(run)
        codes = self._codes(draft.quantizer, classes, begin, end)
        positions, kept = self._restored(run, classes, codes)
        found = _found(codes, classes)
        deviations = self._deviations(units, run.out, found)
        decoded = planes_on_gpu().xxh64_of_chunks(run.out, CHUNK_UNITS).cpu().numpy().tolist()
        base_codes = _base_checksums(plan, run, len(decoded))
        planes = codes.clone()[None]
        slab = Slab(planes, lambda first, last: codes[None, first:last], plan, classes, found)
        streams = slab.streams(self._workers)
        if plan.quant_map is not None and plan.quant_map.escape_code is not None:
            ends = np.searchsorted(host_of(positions), np.arange(1, len(decoded)) * CHUNK_UNITS)
            values = np.split(host_of(kept).view(f"<u{units.element_size()}"), ends)
            more = self._workers.map(encode_values, values)
            streams = [own + escaped for own, escaped in zip(streams, more, strict=True)]
        return list(map(finished, streams, decoded, base_codes, deviations))

    def _deviations(
        self, units: torch.Tensor, decoded: torch.Tensor, found: Sequence[Found]
    ) -> list[Deviation]:
        """Measure what each chunk loses, in double."""
        rows = []
        for both in zip(torch.split(units, CHUNK_UNITS), torch.split(decoded, CHUNK_UNITS), strict=True):
            exact, restored = (self._floats(part).to(torch.float64) for part in both)
            error = restored - exact
            rows.append(torch.stack([error.abs().max(), (error * error).sum(), (exact * exact).sum()]))
        sums: list[tuple[float, float, float]] = torch.stack(rows).tolist()
        return [Deviation(*row, counts=own.total) for row, (own,) in zip(sums, found, strict=True)]


def _scratch(quantizer: Quantizer | None) -> int:
    return GRID_SCRATCH if isinstance(quantizer, OnGrid) else MOMENT_SCRATCH


def _powers(values: torch.Tensor, sizes: Sequence[int]) -> list[float]:
    """Sum squares of float64 [n], which are overwritten, in parts of these sizes."""
    found: list[float] = values_on_gpu().sums_of_pairs(values.mul_(values), sizes)
    return found


def _not_asked(index: int, units: object) -> None:
    raise AssertionError(f"chunk {index} is not stored yet")


def _found(codes: torch.Tensor, classes: Classes | None) -> list[Found]:
    """Count the codes of each chunk by class."""
    if classes is not None:
        return [counted(codes[None], classes, i) for i in range(len(classes.counts))]
    counts = planes_on_gpu().histograms(codes[None], CHUNK_UNITS)[0].cpu().numpy().astype(np.int64)
    return [(ClassCounts(np.zeros(1, np.int64), row[None]),) for row in counts]


def _base_checksums(plan: Plan, run: Run, n_chunks: int) -> Sequence[int | None]:
    if not plan.reads_base_codes:
        return [None] * n_chunks
    if run.base_codes is None:
        return [0] * n_chunks
    checksums: list[int] = planes_on_gpu().xxh64_of_chunks(run.base_codes, CHUNK_UNITS).cpu().numpy().tolist()
    return checksums
