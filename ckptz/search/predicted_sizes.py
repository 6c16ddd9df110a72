"""Predicts the file size of any k-means configuration from histograms, without encoding.

One pass counts the values of each tensor by bucket, code of the base, and band of sensitivity. A quantization
map assigns a code to each of these cells, so the frequencies of codes, by context of the base too, follow
from the counts, and the size from the tables that the planner would choose.
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

from ckptz.codec.chunk import encoded_bytes
from ckptz.codec.histogram import Histogram
from ckptz.codec.kmeans import SensitivityRanks, rank
from ckptz.codec.lossless import EXACT
from ckptz.codec.method import Method, Recipe
from ckptz.codec.partitions import Cut, Partitions, fit_kmeans_levels, region_cuts
from ckptz.codec.tensor import MapFunction, TensorToEncode
from ckptz.codec.tensor_plan import ContextCounts, stream_tables
from ckptz.format.frequency import cost_bits, entropy_bits, normalise, pack_table
from ckptz.format.sources import chunk_bounds, n_chunks_of
from ckptz.format.values import FLOAT_KINDS
from ckptz.kernels.floats import F32, Counts
from ckptz.state.roles import Role

FRAME_BYTES: Final = 250  # frame header and rows of index and envelope, without names and tables
Parts = tuple[Counts, Counts, Counts]  # values by part [n_base_codes, n_buckets]: free, pruned, protected
CHUNK_BYTES: Final = 90  # record of a chunk, and lane states


@dataclass(frozen=True, slots=True)
class Profile:
    """Counts of the values of one lossy tensor, from which its size is predicted."""

    histogram: Histogram  # of all values
    ranked: SensitivityRanks | None  # sensitivities, if known
    bands: NDArray[np.float64]  # upper ends of the bands of sensitivity, ascending; the last band has none
    values: NDArray[np.float64]  # representative value of each occurring bucket, ascending [n_buckets]
    halves: NDArray[np.float64]  # half the width of each bucket; 0 for buckets of one value
    buckets: NDArray[np.int64]  # top 16 bits of the patterns of each bucket
    below: Counts  # number of values in all lower bands [n_base_codes, n_bands + 1, n_buckets]
    pattern_bytes: int  # bytes of a pattern
    cuts: dict[Partitions, tuple[Cut, Parts]] = field(default_factory=dict)  # cache

    def n_bytes(self, partitions: Partitions) -> float:
        """Predict the size of the tensor's frame in bytes."""
        if self.ranked is None:
            partitions = partitions.by_magnitude()
        cut, parts = self._cut(partitions)
        free = parts[0].sum(axis=0)
        levels = fit_kmeans_levels(self.values[free > 0], free[free > 0], partitions, cut)
        counts, protected = self._code_counts(parts, levels, cut)
        n_bytes = _code_bytes(counts) + 4 * len(levels) + CHUNK_BYTES * n_chunks_of(self.histogram.n_values)
        return n_bytes + self._protected_bytes(protected, partitions)

    def _cut(self, partitions: Partitions) -> tuple[Cut, Parts]:
        """Return thresholds and counts of parts; they do not depend on the number of levels."""
        shares = replace(partitions, levels=0)
        if shares not in self.cuts:
            cut = Cut.of(partitions, self.histogram, self.ranked.histogram if self.ranked else None)
            self.cuts[shares] = cut, self._parts(cut)
        return self.cuts[shares]

    def _parts(self, cut: Cut) -> Parts:
        """Count the values that sensitivity leaves free, prunes and protects."""
        by_sensitivity = cut.by_sensitivity
        n_pruned = int(np.searchsorted(self.bands, by_sensitivity.floor, side="right"))
        first_protected = 1 + int(np.searchsorted(self.bands, by_sensitivity.ceiling, side="left"))
        pruned = self.below[:, n_pruned]
        protected = self.below[:, -1] - self.below[:, first_protected]
        free = self.below[:, first_protected] - pruned
        if np.isfinite(by_sensitivity.floor_at_zero):
            at_zero = self.below[:, np.searchsorted(self.bands, 0.0, side="right")]
            stays = at_zero * (np.abs(self.values) > by_sensitivity.floor_at_zero)
            free, pruned = free + stays, pruned - stays
        return free, pruned, protected

    def _code_counts(self, parts: Parts, levels: NDArray[np.float64], cut: Cut) -> tuple[Counts, Counts]:
        """Count the values of each code [n_base_codes, 256], and the protected ones by bucket [n_buckets]."""
        cuts, codes = region_cuts(levels, cut)
        ends = np.append(np.searchsorted(self.values, cuts, side="left"), len(self.values))
        counts = np.zeros((len(self.below), 256), np.int64)
        all_free, all_pruned, all_protected = parts
        protected, escape, zero = all_protected.sum(axis=0), len(levels), int(np.searchsorted(levels, 0.0))
        for code, begin, end in zip(codes, np.append(0, ends), ends, strict=False):
            free, pruned = all_free[:, begin:end], all_pruned[:, begin:end]
            counts[:, code] += free.sum(axis=1)
            counts[:, escape if code == escape else zero] += pruned.sum(axis=1)
            if code == escape:  # protection has precedence over pruning
                protected[begin:end] += (free + pruned).sum(axis=0)
        counts[:, escape] += all_protected.sum(axis=1)
        for cut_at, end, lower, upper in zip(cuts, ends.tolist(), codes, codes[1:], strict=False):
            self._split(counts, all_free, (cut_at, end), (lower, upper))
        return counts, protected

    def _split(self, counts: Counts, free: Counts, cut: tuple[float, int], codes: tuple[int, int]) -> None:
        """Divide the bucket that contains a cut between the two codes on either side.

        The base has nearly the same cuts, so values with lower codes in the base are assumed to be lower.

        Args:
            counts: values of each code [n_base_codes, 256]; changed in place.
            free: values that are neither pruned nor protected [n_base_codes, n_buckets].
            cut: its value, and the index of the first bucket above.
            codes: below and above the cut.
        """
        cut_at, end = cut
        for k, code, other in ((end, codes[1], codes[0]), (end - 1, codes[0], codes[1])):
            if not 0 <= k < len(self.values) or not self.halves[k]:
                continue
            share = 0.5 + (cut_at - self.values[k]) / (2 * self.halves[k])
            if 0 < share < 1:
                column = free[:, k] if self.values[k] >= 0 else np.roll(free[:, k], 1)  # escapes come last
                before = np.cumsum(column) - column
                below = np.clip(round(share * int(column.sum())) - before, 0, column)
                moved = below if other == codes[0] else column - below
                moved = moved if self.values[k] >= 0 else np.roll(moved, -1)
                counts[:, code] -= moved
                counts[:, other] += moved

    def _protected_bytes(self, protected: Counts, partitions: Partitions) -> float:
        """Predict the bytes of protected values: two encoded planes, and the lower planes uncompressed."""
        planes = (self.buckets >> 8, self.buckets & 0xFF)
        n_bytes = sum(_plane_bytes(np.bincount(plane, protected, 256).astype(np.int64)) for plane in planes)
        n_raw = 0 if partitions.protect_as_bf16 else self.pattern_bytes - 2
        return n_bytes + n_raw * int(protected.sum())


def _plane_bytes(counts: Counts) -> float:
    """Predict the bytes of a small stream: entropy-coded with its table, or stored."""
    n = int(counts.sum())
    return min(entropy_bits(counts[None]) / 8 + len(pack_table(normalise(counts))), n) if n else 0.0


def _code_bytes(counts: Counts) -> float:
    """Predict the bytes of codes: with a table for each context of the base, or with one table."""
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
    """Predict the file size in bytes for each configuration.

    Args:
        tensors_to_encode: tensors with base and side information, by name.
        roles: the role of each tensor.
        configs: configurations to predict.
        run: maps a function over tensors; memory of one tensor is freed before the next.
    """
    unique = list(dict.fromkeys(configs))
    overhead = sum(FRAME_BYTES + 2 * len(name.encode()) for name in tensors_to_encode)
    sizes = np.full(len(unique), overhead, float)
    for tensor_sizes in run(
        lambda name: _tensor_sizes(tensors_to_encode[name], roles[name], unique), tensors_to_encode
    ):
        sizes += tensor_sizes
    return dict(zip(unique, sizes.tolist(), strict=True))


def _tensor_sizes(tensor: TensorToEncode, role: Role, configs: Sequence[Method]) -> NDArray[np.float64]:
    """Predict the bytes of one tensor's frame for each configuration."""
    source = tensor.source
    recipes = [config.recipe(role, source.dtype, source.shape) for config in configs]
    profile = _profile(tensor, {recipe.partitions for recipe in recipes if recipe.partitions is not None})
    sizes: dict[Recipe, float] = {}
    for recipe in dict.fromkeys(recipes):
        if recipe.partitions is None:
            sizes[recipe] = _encoded_bytes(tensor, recipe)
        else:  # without a profile the tensor is not finite, and stored exactly
            sizes[recipe] = profile.n_bytes(recipe.partitions) if profile else _encoded_bytes(tensor, EXACT)
    return np.array([sizes[recipe] for recipe in recipes])


def _encoded_bytes(tensor: TensorToEncode, recipe: Recipe) -> float:
    """Predict the bytes of a frame from the first chunk of its tensor."""
    return encoded_bytes(tensor.source, tensor.base, recipe.plan(tensor)) if tensor.source.n_patterns else 0.0


def _profile(tensor: TensorToEncode, partitions: set[Partitions]) -> Profile | None:
    """Count the values of a tensor in one pass; None if it is not finite or never becomes lossy."""
    source, n_patterns = tensor.source, tensor.source.n_patterns
    if not partitions or not n_patterns:
        return None
    kind, bounds = FLOAT_KINDS[source.dtype.name], list(chunk_bounds(n_patterns))
    histogram = functools.reduce(operator.add, (Histogram.of(source.patterns(*b), kind) for b in bounds))
    if not histogram.is_finite:
        return None
    by_sensitivity = [p for p in partitions if p.needs_sensitivity]
    ranked = rank(source, tensor.guide, by_sensitivity[0])[0] if by_sensitivity else None
    bands = _bands(by_sensitivity, ranked)
    buckets, values = histogram.representatives()
    bucket_index = np.zeros(len(histogram.counts), np.int64)
    bucket_index[buckets] = np.arange(len(buckets))
    cells = functools.reduce(operator.add, (_cells(tensor, ranked, bands, bucket_index, b) for b in bounds))
    below = np.concatenate([np.zeros_like(cells[:, :1]), np.cumsum(cells, axis=1)], axis=1)
    halves = np.zeros(len(values))
    if kind == F32:
        halves = 2.0 ** (np.frexp(values)[1] - 9)  # 2^7 buckets per octave
    return Profile(histogram, ranked, bands, values, halves, buckets, below, source.dtype.pattern_bytes)


def _bands(partitions: Sequence[Partitions], ranked: SensitivityRanks | None) -> NDArray[np.float64]:
    """Return all thresholds of sensitivity, and zero, at which magnitude decides."""
    if ranked is None:
        return np.zeros(0)
    cuts = [ranked.histogram.cut(p.prunes_by_sensitivity, p.protects_by_sensitivity) for p in partitions]
    bounds = {cut.floor for cut in cuts} | {cut.ceiling for cut in cuts} | {0.0}
    return np.array(sorted(value for value in bounds if 0 <= value < np.inf))


def _cells(
    tensor: TensorToEncode,
    ranked: SensitivityRanks | None,
    bands: NDArray[np.float64],
    bucket_index: NDArray[np.int64],
    bounds: tuple[int, int],
) -> Counts:
    """Count the values in pattern bounds [n_base_codes, n_bands, n_buckets].

    Args:
        tensor: source and base.
        ranked: sensitivities, or None.
        bands: upper ends of the bands of sensitivity.
        bucket_index: index of each bucket [2^16] among the occurring ones.
        bounds: first pattern, and the end.
    """
    patterns: Any = tensor.source.patterns(*bounds)
    n_base = 1 if tensor.base is None else tensor.base.n_codes or 1
    shape = (n_base, len(bands) + 1, int(bucket_index.max()) + 1)
    cell = bucket_index[patterns >> patterns.dtype.type(8 * tensor.source.dtype.pattern_bytes - 16)]
    if ranked is not None:
        sensitivities = ranked.sensitivities(*bounds, patterns)
        cell += shape[2] * np.searchsorted(bands.astype(np.float32), sensitivities, side="left")
    if n_base > 1 and tensor.base is not None:
        labels = tensor.base.codes(*bounds)
        if labels is not None:
            cell += shape[1] * shape[2] * labels.astype(np.int64)
    return np.bincount(cell, minlength=math.prod(shape)).reshape(shape)
