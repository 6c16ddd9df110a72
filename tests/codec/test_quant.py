"""Histograms, k-means partitions and roles: exactness, error bounds and the code of every value."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptz.codec.histogram import RELATIVE_ERROR, Histogram
from ckptz.codec.kmeans import Clusters, KMeans
from ckptz.codec.lossless import EXACT, LOSSLESS
from ckptz.codec.partitions import Partitions, fit_centroids, fit_partitions, sample_weights
from ckptz.format.dtypes import dtype_of
from ckptz.kernels import floats
from ckptz.state.roles import Role, role_of

WEIGHT = Role("weight", "a.weight", "linear")


def f32_histogram(values: Any) -> Histogram:
    return Histogram.of(np.asarray(values, np.float32).view(np.uint32), floats.F32)


def gaussian(n: int) -> Any:
    """Return seeded normal values with standard deviation 0.02, float32 [n]."""
    return (np.random.default_rng(0).standard_normal(n) * 0.02).astype(np.float32)


def test_representatives_are_within_the_stated_relative_error() -> None:
    values = np.abs(gaussian(20_000)) * np.float32(10.0) ** np.random.default_rng(1).integers(-9, 9, 20_000)
    for value in values[:2000]:
        representative = f32_histogram([value]).occupied()[0][0]
        assert abs(representative - value) <= RELATIVE_ERROR * abs(value)


def test_histograms_of_parts_add_up() -> None:
    values = gaussian(10_000)
    histogram, total = f32_histogram(values), f32_histogram(values[:3000]) + f32_histogram(values[3000:])
    np.testing.assert_array_equal(histogram.counts, total.counts)
    assert histogram.n_values == 10_000


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_histogram_detects_values_that_are_not_finite(value: float) -> None:
    assert f32_histogram([1.0, 2.0]).is_finite
    assert not f32_histogram([1.0, value]).is_finite


@pytest.mark.parametrize("kind", [floats.BF16, floats.F16])
def test_sixteen_bit_histograms_are_exact(kind: int) -> None:
    patterns = floats.from_f32(gaussian(5000).view(np.uint32), kind)
    values, counts = Histogram.of(patterns, kind).occupied()
    exact, exact_counts = np.unique(floats.widen_f64(floats.to_f32(patterns, kind)), return_counts=True)
    np.testing.assert_array_equal(values, exact)
    np.testing.assert_array_equal(counts, exact_counts)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_quantiles_contain_their_share_of_magnitudes(share: float) -> None:
    values = gaussian(50_000)
    limit = f32_histogram(values).magnitude_quantile(share)
    assert np.mean(np.abs(values) <= limit * (1 + 2 * RELATIVE_ERROR)) >= share
    assert np.mean(np.abs(values) < limit * (1 - 2 * RELATIVE_ERROR)) < share


def weighted_error(values: Any, weights: Any, centroids: Any) -> float:
    """Return the weighted mean square distance of values to their nearest centroid."""
    distances = np.abs(values[:, None] - centroids[None]).min(axis=1)
    return float(np.average(distances**2, weights=weights))


@given(
    st.lists(st.integers(-50, 50), min_size=3, max_size=9, unique=True), st.integers(1, 4), st.integers(0, 99)
)
@settings(max_examples=60, deadline=None)
def test_centroids_are_the_best_of_all_partitions(numbers: list[int], n_levels: int, seed: int) -> None:
    values = np.sort(np.array(numbers, np.float64))
    weights = np.random.default_rng(seed).random(len(values)) + 0.01
    error = weighted_error(values, weights, fit_centroids(values, weights, n_levels))
    errors = []
    for borders in itertools.combinations(range(1, len(values)), min(n_levels, len(values)) - 1):
        parts = zip(np.split(values, borders), np.split(weights, borders), strict=True)
        means = np.array([np.average(part, weights=part_weights) for part, part_weights in parts])
        errors.append(weighted_error(values, weights, means))
    assert error <= min(errors) + 1e-12


@pytest.mark.parametrize("n_levels", [4, 16])
def test_centroids_of_a_histogram_have_at_most_one_percent_more_error(n_levels: int) -> None:
    values = gaussian(40_000)
    exact_values, counts = np.unique(values.astype(np.float64), return_counts=True)
    weights = sample_weights(exact_values, counts, 1.0)
    best = weighted_error(exact_values, weights, fit_centroids(exact_values, weights, n_levels))
    buckets, bucket_counts = f32_histogram(values).occupied()
    centroids = fit_centroids(buckets, sample_weights(buckets, bucket_counts, 1.0), n_levels)
    error = weighted_error(exact_values, weights, centroids)
    assert error <= 1.01 * best
    rms = float(np.sqrt(np.mean(values.astype(np.float64) ** 2)))
    # Replacing values by representatives changes the RMS error of centroids by at most RELATIVE_ERROR * rms
    # (triangle inequality): once when centroids are fitted to them, once when values are compared.
    assert np.sqrt(error) <= np.sqrt(best) + 2 * RELATIVE_ERROR * rms


def test_sample_weights_mix_shares_of_counts_and_of_magnitudes() -> None:
    weights = sample_weights(np.array([-1.0, 3.0]), np.array([30, 10]), 0.2)
    np.testing.assert_allclose(weights, [0.2 * 0.75 + 0.8 * 0.25, 0.2 * 0.25 + 0.8 * 0.75])


PARTITIONS = [
    *map(Partitions, (16, 2, 255)),
    Partitions(16, prune=0.3),
    Partitions(8, protect=0.01),
    Partitions(4, prune=0.4, protect=0.005),
]


@pytest.mark.parametrize("partitions", PARTITIONS, ids=str)
@pytest.mark.parametrize("kind", [floats.F32, floats.BF16, floats.F16])
def test_the_smallest_values_are_pruned_the_largest_protected_and_others_rounded_to_nearest(
    partitions: Partitions, kind: int
) -> None:
    patterns = floats.from_f32(gaussian(30_000).view(np.uint32), kind)
    values = floats.widen_f64(floats.to_f32(patterns, kind))
    quant_map, quantizer = fit_partitions(Histogram.of(patterns, kind), partitions)
    codes = quantizer.codes(0, len(patterns), patterns)
    levels = floats.widen_f64(quant_map.table.expand()[0])
    has_escape = quant_map.escape_code is not None
    is_escaped = (codes == quant_map.escape_code) & has_escape
    assert quant_map.n_codes - has_escape <= partitions.levels
    assert abs(is_escaped.mean() - partitions.protect) <= 0.1 * partitions.protect
    assert np.abs(values[is_escaped]).min(initial=np.inf) >= np.abs(values[~is_escaped]).max()
    is_pruned = (levels[codes] == 0) & ~is_escaped
    if partitions.prune:
        assert partitions.prune <= is_pruned.mean() <= partitions.prune + 0.02
        assert np.abs(values[is_pruned]).max() < np.abs(values[~is_pruned]).min()
    is_rounded = ~is_escaped & ~is_pruned
    candidates = levels[: partitions.levels]
    if partitions.prune:
        candidates = candidates[candidates != 0]
    smallest_errors = np.abs(values[is_rounded][:, None] - candidates[None, :]).min(axis=1)
    errors = np.abs(values[is_rounded] - levels[codes[is_rounded]])
    np.testing.assert_allclose(errors, smallest_errors, rtol=1e-6, atol=1e-12)


def test_each_distinct_value_has_a_level_if_there_are_enough_levels() -> None:
    values = np.resize(np.array([-1.5, 0.25, 3.0], np.float32), 9000)
    histogram = f32_histogram(values)
    quant_map, quantizer = fit_partitions(histogram, Partitions(16))
    assert quant_map.n_codes == 3
    codes = quantizer.codes(0, 9000, values.view(np.uint32))
    restored = floats.widen_f64(quant_map.table.expand()[0])[codes]
    assert np.abs(restored - values).max() <= RELATIVE_ERROR * 3.0


def test_one_distinct_value_takes_one_code() -> None:
    histogram = f32_histogram(np.full(5000, 0.5, np.float32))
    assert fit_partitions(histogram, Partitions(16))[0].n_codes == 1
    everything_pruned = fit_partitions(histogram, Partitions(16, prune=0.2))[0]
    assert everything_pruned.n_codes == 1
    assert everything_pruned.table.expand()[0][0] == 0


def test_only_large_float_weights_become_lossy() -> None:
    config = KMeans(levels=16, embedding_levels=32, prune=0.1, protect=0.0, layer_prune=(("head", 0.0),))
    f32, i64 = dtype_of("F32"), dtype_of("I64")
    assert config.recipe(WEIGHT, f32, (64, 64)) == Clusters(Partitions(16, 0.1))
    assert LOSSLESS.recipe(WEIGHT, f32, (64, 64)) == EXACT
    assert config.recipe(WEIGHT, f32, (4096,)) == EXACT
    assert config.recipe(WEIGHT, f32, (8, 8)) == EXACT
    assert config.recipe(WEIGHT, i64, (64, 64)) == EXACT
    assert config.recipe(Role("exp_avg", "a", "linear"), f32, (64, 64)) == EXACT
    assert config.recipe(Role("weight", "a", "embedding"), f32, (64, 64)) == Clusters(Partitions(32, 0.1))
    assert config.recipe(Role("weight", "a", "head"), f32, (64, 64)) == Clusters(Partitions(16, 0.0))


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.blocks.0.attn.qkv.weight", (3, 3), ("weight", "blocks.0.attn.qkv.weight", "attention")),
        ("model.token.weight", (3, 3), ("weight", "token.weight", "embedding")),
        ("transformer.wte.weight", (3, 3), ("weight", "transformer.wte.weight", "embedding")),
        ("lm_head.weight", (3, 3), ("weight", "lm_head.weight", "head")),
        ("layer1.0.conv2.weight", (3, 3, 3, 3), ("weight", "layer1.0.conv2.weight", "conv")),
        ("encoder.layer.0.output.LayerNorm.weight", (3,), ("weight", None, "norm")),
        ("blocks.0.up.weight", (3, 3), ("weight", "blocks.0.up.weight", "linear")),
        ("optimizer.blocks.0.up.weight.exp_avg", (3, 3), ("exp_avg", "blocks.0.up.weight", "linear")),
        ("exp_avg_sq.up.weight", (3, 3), ("exp_avg_sq", "up.weight", "linear")),
        ("optimizer.state.up.weight.exp_avg_sq", (3, 3), ("exp_avg_sq", "up.weight", "linear")),
        ("up.weight.momentum_buffer", (3, 3), ("momentum", "up.weight", "linear")),
        ("optimizer.up.weight.step", (), ("other", "up.weight", "other")),
    ],
)
def test_roles_come_from_names_and_shapes(
    name: str, shape: tuple[int, ...], expected: tuple[str, str | None, str]
) -> None:
    role = role_of(name, shape, True)
    assert (role.role, role.layer_type) == (expected[0], expected[2])
    assert expected[1] is None or role.parameter == expected[1]
