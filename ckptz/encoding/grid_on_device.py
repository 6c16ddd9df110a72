"""Encoding weights on grids on a GPU: what is measured of them, their codes, and the chunks of these.

Byte for byte what `ckptz.encoding.chunk` makes of the same draft. Sums that steps follow from are added up in
the host's order; others, as of errors, which no two processors add up alike, in the device's.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, Protocol

import numpy as np
import torch

from ckptz.codec.decode import Run
from ckptz.codec.frame import FrameHeader
from ckptz.codec.on_device import FLOATS, Classes, classes_of, moved, restore
from ckptz.codec.plan import Domain, Plan, Predictor
from ckptz.codec.quant_map import QuantizationMap
from ckptz.codec.units import CHUNK_UNITS, ChunkSources, TensorSource, n_rows_of
from ckptz.codec.values import KINDS
from ckptz.dtypes import DType
from ckptz.encoding.chunk import Deviation, EncodedChunk, encode_chunk, encode_values
from ckptz.encoding.counts import ClassCounts, stream_tables
from ckptz.encoding.draft import Draft
from ckptz.encoding.extent import Extent
from ckptz.encoding.guide import NO_GUIDE
from ckptz.encoding.near import Near
from ckptz.encoding.planes_on_device import Found, Slab, counted, finished, host_of, slabs
from ckptz.kernels import planes_on_gpu, values_on_gpu
from ckptz.kernels.floats import NEAREST
from ckptz.parallel import Workers
from ckptz.quant.grid import OnGrid, RowSteps, bare_levels, largest_magnitude, with_escape
from ckptz.transform.classes import ClassRule, Row

UNIT_SCRATCH: Final = 28  # bytes on the device for each unit: floats of it and its base, codes, classes


class There(Protocol):
    """A tensor on a device; see `ckptz.encoding.on_device.DeviceSource`."""

    @property
    def dtype(self) -> DType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def flat(self) -> torch.Tensor: ...


def floats_there(units: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Read values, float32 [n], of units [n] of a dtype in `KINDS`."""
    return units.view(FLOATS[KINDS[dtype.name]]).to(torch.float32)


def extent_of(source: There, base: Near | None, squares: There | None, most: int) -> Extent:
    """Measure a tensor with its base and the second moments of its gradients; see `Extent`."""
    found = []
    for begin, end in slabs(len(source.flat), UNIT_SCRATCH, most):
        values = floats_there(source.flat[begin:end], source.dtype)
        others = None if base is None else floats_there(base.there(begin, end), source.dtype)
        largest = float(
            torch.stack([part.abs().max() for part in (values, others) if part is not None]).max()
        )
        powers = values_on_gpu().powers(values, None, CHUNK_UNITS)
        residuals = [np.inf] * len(powers)
        if others is not None:
            residuals = values_on_gpu().powers(values, others, CHUNK_UNITS)
        for part, power, residual in zip(torch.split(values, CHUNK_UNITS), powers, residuals, strict=True):
            found.append(Extent(len(part), largest, power, residual, None, 0.0, True))
    total = functools.reduce(operator.add, found)
    return total if squares is None else _sensitivity(source, squares) + total


def _sensitivity(source: There, squares: There) -> Extent:
    """Sum second moments, by row and with the squares of the values."""
    moments = squares.flat.view(FLOATS[KINDS[squares.dtype.name]])
    row_sums = moments.view(n_rows_of(source.shape), -1).sum(dim=1, dtype=torch.float64)
    parts = []
    both = zip(torch.split(source.flat, CHUNK_UNITS), torch.split(moments, CHUNK_UNITS), strict=True)
    for units, part in both:
        values, is_one = floats_there(units, source.dtype).to(torch.float64), (part >= 0) & (part < torch.inf)
        energy = (part.to(torch.float64) * (values * values)).sum()
        parts.append(torch.stack([energy, is_one.all().to(torch.float64)]))
    energies, are_all = torch.stack(parts).cpu().numpy().T
    return Extent(0, 0.0, 0.0, 0.0, host_of(row_sums), float(energies.sum()), bool(are_all.all()))


def _codes(source: There, grid: OnGrid, base: Near | None, begin: int, end: int) -> torch.Tensor:
    """Give the codes of units begin..end, uint8 [end - begin], the last one beyond the alphabet."""
    device = source.flat.device
    codes: torch.Tensor = values_on_gpu().residual_codes(
        floats_there(source.flat[begin:end], source.dtype),
        None if base is None else floats_there(base.there(begin, end), source.dtype),
        moved(grid.rows.steps.astype(np.float32), device),
        moved(grid.rows.labels, device),
        grid.row_units,
        grid.dead_zone,
        grid.key,
        begin,
    )
    return codes.clamp_(max=2 * grid.most + 1)


def _run(source: There, plan: Plan, base: Near | None, begin: int, end: int) -> Run:
    """Give units begin..end as what a reader decodes them into: over the base, or nothing."""
    units = source.flat[begin:end]
    is_over = base is not None and plan.predictor is Predictor.BASE
    out = base.there(begin, end).clone() if base is not None and is_over else torch.empty_like(units)
    codes = None if base is None or not plan.reads_base_codes else base.codes_there(begin, end)
    header = FrameHeader(source.dtype, source.shape, plan, ())
    return Run(header, begin // CHUNK_UNITS, (), out, _not_asked, codes)


def _not_asked(index: int, units: object) -> None:
    raise AssertionError(f"chunk {index} is not stored yet")


def _found(codes: torch.Tensor, classes: Classes | None) -> list[Found]:
    """Count the codes of each chunk by class."""
    if classes is not None:
        return [counted(codes[None], classes, i) for i in range(len(classes.counts))]
    counts = planes_on_gpu().histograms(codes[None], CHUNK_UNITS)[0].cpu().numpy().astype(np.int64)
    return [(ClassCounts(np.zeros(1, np.int64), row[None]),) for row in counts]


def codes_by_class(
    source: There, grid: OnGrid, base: Near | None, rules: tuple[ClassRule, ...], most: int
) -> ClassCounts:
    """Count the codes of a whole tensor by class."""
    found: list[Found] = []
    for begin, end in slabs(len(source.flat), UNIT_SCRATCH, most):
        classes = classes_of(_run(source, Plan(rules=rules), base, begin, end), {})
        found += _found(_codes(source, grid, base, begin, end), classes)
    return functools.reduce(operator.add, [own for (own,) in found])


def encoded_chunks(
    source: There, draft: Draft, grid: OnGrid, base: Near | None, workers: Workers, most: int
) -> Iterator[EncodedChunk]:
    """Encode the chunks of a tensor by its draft."""
    for begin, end in slabs(len(source.flat), UNIT_SCRATCH, most):
        yield from _encoded(source, draft.plan, grid, base, workers, (begin, end))


def _encoded(
    source: There, plan: Plan, grid: OnGrid, base: Near | None, workers: Workers, bounds: tuple[int, int]
) -> list[EncodedChunk]:
    units, run = source.flat[slice(*bounds)], _run(source, plan, base, *bounds)
    own_base = None if grid.base is None else base
    codes, classes = _codes(source, grid, own_base, *bounds), classes_of(run, {})
    positions = _escaped(plan, codes)
    kept = units.view(torch.uint8).view(len(units), -1)[positions]
    restore(run, classes, codes, [(positions, kept.view(-1).view(units.dtype))])
    found = _found(codes, classes)
    deviations = _deviations(units, run.out, source.dtype, found)
    decoded = planes_on_gpu().xxh64_of_chunks(run.out, CHUNK_UNITS).cpu().numpy().tolist()
    base_codes = _base_checksums(plan, run, len(decoded))
    planes = codes.clone()[None]
    slab = Slab(planes, lambda first, last: codes[None, first:last], plan, classes, found)
    streams = slab.streams(workers)
    if plan.quant_map is not None and plan.quant_map.escape_code is not None:
        ends = np.searchsorted(host_of(positions), np.arange(1, len(decoded)) * CHUNK_UNITS)
        values = np.split(host_of(kept).reshape(-1).view(f"<u{units.element_size()}"), ends)
        streams = [own + more for own, more in zip(streams, workers.map(encode_values, values), strict=True)]
    return list(map(finished, streams, decoded, base_codes, deviations))


def _escaped(plan: Plan, codes: torch.Tensor) -> torch.Tensor:
    """Find where units stand beside their codes: positions int64 [k]."""
    escape = None if plan.quant_map is None else plan.quant_map.escape_code
    if escape is None:
        return torch.empty(0, dtype=torch.int64, device=codes.device)
    return (codes == escape).nonzero()[:, 0]


def _base_checksums(plan: Plan, run: Run, n_chunks: int) -> Sequence[int | None]:
    if not plan.reads_base_codes:
        return [None] * n_chunks
    if run.base_codes is None:
        return [0] * n_chunks
    checksums: list[int] = planes_on_gpu().xxh64_of_chunks(run.base_codes, CHUNK_UNITS).cpu().numpy().tolist()
    return checksums


def _deviations(
    units: torch.Tensor, decoded: torch.Tensor, dtype: DType, found: Sequence[Found]
) -> list[Deviation]:
    """Measure what each chunk loses, in double."""
    rows = []
    for both in zip(torch.split(units, CHUNK_UNITS), torch.split(decoded, CHUNK_UNITS), strict=True):
        exact, restored = (floats_there(part, dtype).to(torch.float64) for part in both)
        error = restored - exact
        rows.append(torch.stack([error.abs().max(), (error * error).sum(), (exact * exact).sum()]))
    sums: list[tuple[float, float, float]] = torch.stack(rows).tolist()
    return [Deviation(*row, counts=own.total) for row, (own,) in zip(sums, found, strict=True)]


def agrees(source: TensorSource, base: TensorSource, there: There, near: Near, workers: Workers) -> bool:
    """Tell whether a matrix on the device is measured and encoded on a grid as its copy on the host is."""
    whole = Extent.whole(source, base, NO_GUIDE, map)
    if extent_of(there, near, None, UNIT_SCRATCH * CHUNK_UNITS) != whole:
        return False
    labels = np.arange(source.shape[0], dtype=np.uint8) % 3
    rows = RowSteps(whole.spread * np.array([0.1, 0.3, 0.4]), labels)
    return all(
        _encodes_alike(OnGrid(source, against, rows, 0.1, key), there, near, workers)
        for against in (None, base)
        for key in (NEAREST, 7)
    )


def _encodes_alike(grid: OnGrid, there: There, near: Near, workers: Workers) -> bool:
    source, rules = grid.source, (Row(len(grid.rows.steps), grid.rows.labels),)
    base, most = None if grid.base is None else near, UNIT_SCRATCH * CHUNK_UNITS
    found = codes_by_class(there, grid, base, rules, most)
    grid = replace(grid, most=max(largest_magnitude(found.total) - 1, 1))
    quant_map = QuantizationMap(
        with_escape(bare_levels(grid.rows.steps, grid.most)),
        np.arange(len(grid.rows.steps)),
        escape_code=2 * grid.most + 1,
    )
    found = codes_by_class(there, grid, base, rules, most)
    plan = Plan(
        quant_map=quant_map,
        domain=Domain.LINEAR,
        predictor=Predictor.ZERO if base is None else Predictor.BASE,
        rules=rules,
        tables=(stream_tables(found, len(grid.rows.steps)),),
    )
    draft = Draft(plan, grid)
    made = encoded_chunks(there, draft, grid, base, workers, most)
    wanted = (encode_chunk(source, draft, ChunkSources(*b, grid.base)) for b in source.chunk_bounds())
    return all((a.record, a.payload) == (b.record, b.payload) for a, b in zip(made, wanted, strict=True))
