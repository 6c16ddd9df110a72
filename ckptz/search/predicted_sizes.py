"""The size of a file for any configuration, predicted from histograms: nothing is encoded.

One pass counts how often each bucket of values occurs with each code of the base and in each band of
sensitivities. Any map is a relabelling of these cells, so its frequencies, by context of the base too,
follow from the counts, and the size from the cost of the tables that the planner would choose.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.chunk import encode_chunk
from ckptz.codec.histogram import Histogram
from ckptz.codec.kmeans import SensitivityRanks, rank
from ckptz.codec.lossless import EXACT
from ckptz.codec.method import Method, Recipe
from ckptz.codec.partitions import Cut, Partitions, fit_levels, region_cuts
from ckptz.codec.tensor import MapFunction, TensorToEncode
from ckptz.codec.tensor_plan import ContextCounts, stream_tables
from ckptz.format.frame import pack_plan
from ckptz.format.frequency import cost_bits, entropy_bits, normalise, pack_table
from ckptz.format.sources import CHUNK_VALUES, ChunkSources, chunk_bounds, n_chunks_of
from ckptz.format.values import KINDS
from ckptz.kernels.floats import F32, Counts
from ckptz.state.roles import Role

FRAME_BYTES: Final = 250  # header of a frame, and its rows in index and envelope, beside names and tables
Parts = tuple[Counts, Counts, Counts]  # occurrences [n_base_codes, n_buckets]: free, pruned, kept
CHUNK_BYTES: Final = 90  # record of a chunk, and lane states


@dataclass(frozen=True, slots=True)
class Profile:
    """The counts that the size of one lossy tensor is predicted from."""

    histogram: Histogram  # of all values
    ranked: SensitivityRanks | None  # its sensitivities, or None
    bands: NDArray[np.float64]  # upper ends of the bands of sensitivity, ascending; the last band has none
    values: NDArray[np.float64]  # what stands for each bucket that occurs, ascending [n_buckets]
    halves: NDArray[np.float64]  # half the width of each bucket; 0 where it holds one value
    buckets: NDArray[np.int64]  # the top 16 bits of the patterns in each
    below: Counts  # occurrences in all bands before one [n_base_codes, n_bands + 1, n_buckets]
    pattern_bytes: int  # width of a unit
    # those that were asked for before
    cuts: dict[Partitions, tuple[Cut, Parts]] = field(default_factory=dict)

    def n_bytes(self, wanted: Partitions) -> float:
        """Predict the size of the tensor's frame in bytes."""
        if self.ranked is None:
            wanted = wanted.by_magnitude()
        cut, parts = self._cut(wanted)
        left = parts[0].sum(axis=0)
        levels = fit_levels(self.values[left > 0], left[left > 0], wanted, cut)
        counts, kept = self._coded(parts, levels, cut)
        n_bytes = _code_bytes(counts) + 4 * len(levels) + CHUNK_BYTES * n_chunks_of(self.histogram.n_values)
        return n_bytes + self._kept_bytes(kept, wanted)

    def _cut(self, wanted: Partitions) -> tuple[Cut, Parts]:
        """Find the thresholds that cut the tensor, and count its parts, whatever the number of levels."""
        shares = replace(wanted, levels=0)
        if shares not in self.cuts:
            cut = Cut.of(wanted, self.histogram, self.ranked.histogram if self.ranked else None)
            self.cuts[shares] = cut, self._parts(cut)
        return self.cuts[shares]

    def _parts(self, cut: Cut) -> Parts:
        """Count what sensitivity leaves to values, what it prunes and keeps; its thresholds end bands."""
        by_sensitivity = cut.by_sensitivity
        n_pruned = int(np.searchsorted(self.bands, by_sensitivity.floor, side="right"))
        first_kept = 1 + int(np.searchsorted(self.bands, by_sensitivity.ceiling, side="left"))
        pruned = self.below[:, n_pruned]
        kept = self.below[:, -1] - self.below[:, first_kept]
        free = self.below[:, first_kept] - pruned
        if np.isfinite(by_sensitivity.floor_at_zero):
            at_zero = self.below[:, np.searchsorted(self.bands, 0.0, side="right")]
            stays = at_zero * (np.abs(self.values) > by_sensitivity.floor_at_zero)
            free, pruned = free + stays, pruned - stays
        return free, pruned, kept

    def _coded(self, parts: Parts, levels: NDArray[np.float64], cut: Cut) -> tuple[Counts, Counts]:
        """Count each code [n_base_codes, 256], and each bucket that is protected [n_buckets]."""
        cuts, codes = region_cuts(levels, cut)
        ends = np.append(np.searchsorted(self.values, cuts, side="left"), len(self.values))
        counts = np.zeros((len(self.below), 256), np.int64)
        all_free, all_pruned, all_kept = parts
        kept, escape, zero = all_kept.sum(axis=0), len(levels), int(np.searchsorted(levels, 0.0))
        for code, begin, end in zip(codes, np.append(0, ends), ends, strict=False):
            free, pruned = all_free[:, begin:end], all_pruned[:, begin:end]
            counts[:, code] += free.sum(axis=1)
            counts[:, escape if code == escape else zero] += pruned.sum(axis=1)
            if code == escape:  # protecting goes before pruning
                kept[begin:end] += (free + pruned).sum(axis=0)
        counts[:, escape] += all_kept.sum(axis=1)
        for cut_at, end, lower, upper in zip(cuts, ends.tolist(), codes, codes[1:], strict=False):
            self._split(counts, all_free, (cut_at, end), (lower, upper))
        return counts, kept

    def _split(self, counts: Counts, free: Counts, cut: tuple[float, int], codes: tuple[int, int]) -> None:
        """Share the bucket that a cut goes through between the codes beside it.

        The base has nearly the same cuts: elements with lower codes there are taken for the lower ones here.
        """
        cut_at, end = cut
        for k, given, other in ((end, codes[1], codes[0]), (end - 1, codes[0], codes[1])):
            if not 0 <= k < len(self.values) or not self.halves[k]:
                continue
            share = 0.5 + (cut_at - self.values[k]) / (2 * self.halves[k])
            if 0 < share < 1:
                column = free[:, k] if self.values[k] >= 0 else np.roll(free[:, k], 1)  # escapes come last
                before = np.cumsum(column) - column
                below = np.clip(round(share * int(column.sum())) - before, 0, column)
                moved = below if other == codes[0] else column - below
                moved = moved if self.values[k] >= 0 else np.roll(moved, -1)
                counts[:, given] -= moved
                counts[:, other] += moved

    def _kept_bytes(self, kept: Counts, wanted: Partitions) -> float:
        """Predict the bytes of protected values: the planes of their buckets, and those below as they are."""
        planes = (self.buckets >> 8, self.buckets & 0xFF)
        n_bytes = sum(_plane_bytes(np.bincount(plane, kept, 256).astype(np.int64)) for plane in planes)
        n_raw = 0 if wanted.protect_as_bf16 else self.pattern_bytes - 2
        return n_bytes + n_raw * int(kept.sum())


def _plane_bytes(counts: Counts) -> float:
    """Predict the bytes of a small stream, with a table of its own or as it is."""
    n = int(counts.sum())
    return min(entropy_bits(counts[None]) / 8 + len(pack_table(normalise(counts))), n) if n else 0.0


def _code_bytes(counts: Counts) -> float:
    """Predict the bytes of codes, with tables by context of the base or with one, as the planner would."""
    used = np.flatnonzero(counts.any(axis=1))
    codes = ContextCounts(used, counts[used])
    if len(counts) > 1 and entropy_bits(codes.counts) < entropy_bits(codes.total[None]):
        tables = stream_tables(codes, len(counts))
        return codes.bytes_by(tables) + sum(len(pack_table(row)) for row in tables.frequencies)
    table = normalise(codes.total)
    return cost_bits(codes.total, table) / 8 + len(pack_table(table))


def predicted_sizes(
    tensors_to_encode: Mapping[str, TensorToEncode],
    roles: Mapping[str, Role],
    configs: Iterable[Method],
    run: MapFunction = map,
) -> dict[Method, float]:
    """Predict the bytes of the file that each of some configurations gives.

    Args:
        tensors_to_encode: with what the writer knows of each, by name.
        roles: what each of them is.
        configs: what is asked for.
        run: maps a function over tensors; what one takes is let go before the next.
    """
    wanted = list(dict.fromkeys(configs))
    sizes = np.full(
        len(wanted), sum(FRAME_BYTES + 2 * len(name.encode()) for name in tensors_to_encode), float
    )
    for of_tensor in run(
        lambda name: _sizes_of(tensors_to_encode[name], roles[name], wanted), tensors_to_encode
    ):
        sizes += of_tensor
    return dict(zip(wanted, sizes.tolist(), strict=True))


def _sizes_of(tensor: TensorToEncode, role: Role, configs: Sequence[Method]) -> NDArray[np.float64]:
    """Predict the bytes of one tensor's frame for each configuration."""
    source = tensor.source
    recipes = [config.recipe(role, source.dtype, source.shape) for config in configs]
    profile = _profile(tensor, {wanted for recipe in recipes if (wanted := recipe.partitions) is not None})
    sizes: dict[Recipe, float] = {}
    for recipe in dict.fromkeys(recipes):
        if recipe.partitions is None:
            sizes[recipe] = _encoded_bytes(tensor, recipe)
        else:  # what has no profile is not finite, and stays exact
            sizes[recipe] = profile.n_bytes(recipe.partitions) if profile else _encoded_bytes(tensor, EXACT)
    return np.array([sizes[recipe] for recipe in recipes])


def _encoded_bytes(tensor: TensorToEncode, recipe: Recipe) -> float:
    """Encode the first chunk of a tensor, and take the others to be as large."""
    source, n_patterns = tensor.source, tensor.source.n_patterns
    if not n_patterns:
        return 0.0
    end = min(CHUNK_VALUES, n_patterns)
    encoding = recipe.plan(tensor)
    chunk = encode_chunk(source, encoding, ChunkSources(0, end, tensor.base))
    n_bytes = sum(len(stream) for stream in chunk.streams) * n_patterns / end
    return n_bytes + len(pack_plan(source.dtype, source.shape, encoding.plan))


def _profile(tensor: TensorToEncode, wanted: set[Partitions]) -> Profile | None:
    """Count a tensor that some configuration makes lossy, in one pass; None for the others."""
    source, n_patterns = tensor.source, tensor.source.n_patterns
    if not wanted or not n_patterns:
        return None
    kind, bounds = KINDS[source.dtype.name], list(chunk_bounds(n_patterns))
    histogram = functools.reduce(operator.add, (Histogram.of(source.patterns(*b), kind) for b in bounds))
    if not histogram.is_finite:
        return None
    by_sensitivity = [method for method in wanted if method.needs_sensitivity]
    ranked = rank(source, tensor.guide, by_sensitivity[0])[0] if by_sensitivity else None
    bands = _bands(by_sensitivity, ranked)
    buckets, values = histogram.representatives()
    place = np.zeros(len(histogram.counts), np.int64)
    place[buckets] = np.arange(len(buckets))
    cells = functools.reduce(operator.add, (_cells(tensor, ranked, bands, place, b) for b in bounds))
    below = np.concatenate([np.zeros_like(cells[:, :1]), np.cumsum(cells, axis=1)], axis=1)
    halves = np.zeros(len(values))
    if kind == F32:
        halves = 2.0 ** (np.frexp(values)[1] - 9)  # of 2^7 buckets an octave
    return Profile(histogram, ranked, bands, values, halves, buckets, below, source.dtype.pattern_bytes)


def _bands(wanted: Sequence[Partitions], ranked: SensitivityRanks | None) -> NDArray[np.float64]:
    """List all thresholds of sensitivity, and zero, from which on magnitude decides."""
    if ranked is None:
        return np.zeros(0)
    cuts = [ranked.histogram.cut(w.prunes_by_sensitivity, w.protects_by_sensitivity) for w in wanted]
    bounds = {cut.floor for cut in cuts} | {cut.ceiling for cut in cuts} | {0.0}
    return np.array(sorted(value for value in bounds if 0 <= value < np.inf))


def _cells(
    tensor: TensorToEncode,
    ranked: SensitivityRanks | None,
    bands: NDArray[np.float64],
    place: NDArray[np.int64],
    bounds: tuple[int, int],
) -> Counts:
    """Count occurrences [n_base_codes, n_bands, n_buckets] in patterns begin..end.

    `place` is the index, among the buckets that occur, of each bucket [2^16].
    """
    patterns: Any = tensor.source.patterns(*bounds)
    n_base = 1 if tensor.base is None else tensor.base.n_codes or 1
    shape = (n_base, len(bands) + 1, int(place.max()) + 1)
    cell = place[patterns >> patterns.dtype.type(8 * tensor.source.dtype.pattern_bytes - 16)]
    if ranked is not None:
        sensitivities = ranked.sensitivities(*bounds, patterns)
        cell += shape[2] * np.searchsorted(bands.astype(np.float32), sensitivities, side="left")
    if n_base > 1 and tensor.base is not None:
        labels = tensor.base.codes(*bounds)
        if labels is not None:
            cell += shape[1] * shape[2] * labels.astype(np.int64)
    return np.bincount(cell, minlength=math.prod(shape)).reshape(shape)
