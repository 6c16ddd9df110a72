"""Lossy optimizer state of the grid method: second moments, first moments by context, small tensors."""

import contextlib
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file as save_plain

from ckptz import compress, inspect
from ckptz.codec.grid import Grid
from ckptz.codec.moment_codes import LogLevelQuantizer, Prediction
from ckptz.codec.moment_maps import (
    MAX_LEVELS,
    LevelSums,
    LogLevels,
    LogSums,
    best_log_levels,
    bits_by_phase,
    level_range_of,
    log_level_step,
    row_labels,
)
from ckptz.codec.moments import FineRounding, Moments, SecondMoment
from ckptz.codec.restored import CachedTensor
from ckptz.codec.rounding_rule import RoundingRule
from ckptz.codec.tensor import TensorToEncode
from ckptz.codec.tensor_plan import TensorPlan
from ckptz.format.caches import CachedChunks, LRUCache
from ckptz.format.context_rules import Magnitude, Row
from ckptz.format.dtypes import dtype_of
from ckptz.format.frame import outer_bytes, pack_plan
from ckptz.format.plan import Plan, Predictor, exact_plan
from ckptz.format.sources import CHUNK_VALUES, ArraySource, TensorSource
from ckptz.kernels import floats, moments
from ckptz.numpy import load_file, save_file
from ckptz.store.resolve import open_checkpoint
from ckptz.verbs.compress import CompressReport
from tests.support import reference
from tests.support.cli_support import relative_error
from tests.support.frame_support import Case, round_trip

Array = np.ndarray[Any, Any]

KINDS = {"F32": floats.F32, "BF16": floats.BF16, "F16": floats.F16}
ARRAYS = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}
SECOND, FIRST, WEIGHT = "optimizer.up.weight.exp_avg_sq", "optimizer.up.weight.exp_avg", "model.up.weight"


def state(shape: tuple[int, ...] = (96, 80), seed: int = 0, scale: float = 1.0) -> dict[str, Array]:
    """Return a weight, second moments of rank one times noise, and first moments scaled by their root."""
    rng = np.random.default_rng(seed)
    rows, columns = np.exp2(rng.uniform(-30, -12, shape[0])), np.exp2(rng.uniform(-4, 4, shape[1:]))
    second = np.multiply.outer(rows, columns) * np.exp2(rng.standard_normal(shape)) * scale
    first = rng.standard_normal(shape) * 0.4 * np.sqrt(second)
    weight = rng.standard_normal(shape) * 0.05
    tensors = {WEIGHT: weight, FIRST: first, SECOND: second}
    return {name: values.astype(np.float32) for name, values in tensors.items()}


def save_and_load(folder: Path, tensors: dict[str, Array], **moments: Any) -> dict[str, Array]:
    """Save tensors with settings of `Moments`, and return the restored ones."""
    save_file(tensors, folder / "state.ckptz", config=Grid(moments=Moments(**moments)))
    return load_file(folder / "state.ckptz")


def plan_of(folder: Path, name: str, file: str = "state.ckptz") -> Plan:
    with contextlib.closing(open_checkpoint(folder / file)) as checkpoint:
        return checkpoint.container.tensors[name].header.plan


def orders(values: Array) -> Array:
    """Return ordered bit patterns, int64, whose differences are distances in units of the last place."""
    pattern = np.uint32 if values.dtype == np.float32 else np.uint16
    return floats.order(values.view(pattern)).astype(np.int64)


# --- second moments -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("step", [0.01, 1.0, 4.0])
def test_errors_of_second_moments_are_at_most_a_step_and_zeros_stay_zero(
    tmp_path: Path, dtype: str, step: float
) -> None:
    rng = np.random.default_rng(1)
    exponents = rng.uniform(-24 if dtype == "F16" else -149, 15, (70, 90))
    values = np.exp2(exponents).astype(ARRAYS[dtype])
    values[rng.random(values.shape) < 0.2] = 0
    restored = save_and_load(tmp_path, {SECOND: values}, second_step=step)[SECOND]
    assert restored.dtype == values.dtype
    assert np.array_equal(restored == 0, values == 0)
    assert np.isfinite(restored.astype(np.float64)).all()
    assert not np.signbit(restored.astype(np.float64)).any()
    distance = np.abs(orders(restored) - orders(values)).max()
    assert distance <= max(log_level_step(step, KINDS[dtype]), 1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_nonzero_second_moments_are_never_restored_as_zero_or_infinity(data: st.DataObject) -> None:
    """Elements whose nearest level is zero or infinite are stored exactly, whatever the base predicts."""
    dtype = data.draw(st.sampled_from(sorted(ARRAYS)))
    kind, pattern = KINDS[dtype], np.uint32 if dtype == "F32" else np.uint16
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    largest = {"F32": 0x7F7FFFFF, "BF16": 0x7F7F, "F16": 0x7BFF}[dtype]  # finite pattern
    spread = data.draw(st.sampled_from([largest, 1000, 60]))
    low = data.draw(st.integers(0, largest - spread))
    patterns = rng.integers(low, low + spread, 40 * 20, endpoint=True).astype(pattern)
    base = rng.integers(0, np.iinfo(pattern).max, len(patterns), endpoint=True).astype(pattern)
    if data.draw(st.booleans()):
        near = patterns.astype(np.int64) + rng.integers(-9, 9, len(patterns))
        base = np.clip(near, 0, largest).astype(pattern)
    source = ArraySource(dtype_of(dtype), (40, 20), patterns)
    base_source = ArraySource(dtype_of(dtype), (40, 20), base) if data.draw(st.booleans()) else None
    recipe = SecondMoment(data.draw(st.sampled_from([0.25, 4.0, 60.0])))
    encoding = recipe.plan(TensorToEncode(source, base_source))
    assert encoding.plan.predictor is not Predictor.BASE or base_source is not None
    restored = round_trip(Case(source, encoding, base_source, source))
    assert np.array_equal(restored == 0, patterns == 0)
    assert (restored <= largest).all()
    assert floats.all_finite(restored, kind)


def test_the_prediction_with_the_fewest_bits_is_chosen(tmp_path: Path) -> None:
    tensors = state((256, 256))
    noise = np.random.default_rng(5).uniform(-20, 20, (256, 256))
    tensors["optimizer.noise.exp_avg_sq"] = np.exp2(noise).astype(np.float32)
    save_and_load(tmp_path, tensors, second_step=2)
    assert plan_of(tmp_path, SECOND).predictor is Predictor.OUTER
    assert plan_of(tmp_path, "optimizer.noise.exp_avg_sq").predictor is Predictor.ZERO


def test_outer_product_vectors_are_packed_in_few_bits(tmp_path: Path) -> None:
    save_and_load(tmp_path, state((512, 384)))
    plan = plan_of(tmp_path, SECOND)
    without_vectors = replace(plan, predictor=Predictor.ZERO, outer=None)
    with_bytes, without_bytes = (
        len(pack_plan(dtype_of("F32"), (512, 384), p)) for p in (plan, without_vectors)
    )
    assert outer_bytes(plan.outer) == with_bytes - without_bytes
    # Of 32 bits, four or five of the exponent vary here, and two of the mantissa are kept.
    assert outer_bytes(plan.outer) < 0.35 * 4 * (512 + 384)


def test_outer_products_with_vectors_over_the_limit_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    second = state((96, 80))[SECOND]
    source = ArraySource(dtype_of("F32"), second.shape, second.reshape(-1).view(np.uint32))
    for limit, predictor in ((96 + 80, Predictor.OUTER), (96 + 79, Predictor.ZERO)):
        monkeypatch.setattr("ckptz.codec.moments.MAX_OUTER", limit)
        assert SecondMoment(1.0).plan(TensorToEncode(source)).plan.predictor is predictor


def compress_state(
    folder: Path, tensors: dict[str, Array], name: str, base: str | None = None
) -> CompressReport:
    save_plain(tensors, folder / f"{name}.safetensors")
    [report] = compress(
        [folder / f"{name}.safetensors"],
        folder / f"{name}.ckptz",
        config=Grid(moments=Moments(second_step=2)),
        base=None if base is None else folder / base,
    )
    return report


def test_a_base_that_predicts_better_is_used(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    second = np.exp2(rng.uniform(-40, -5, (200, 64))).astype(np.float32)
    later = (second * np.exp2(rng.uniform(-0.3, 0.3, second.shape))).astype(np.float32)
    compress_state(tmp_path, {SECOND: second}, "a")
    report = compress_state(tmp_path, {SECOND: later}, "b", "a.ckptz")
    assert report.n_deltas == 1
    assert report.stored_bytes < (tmp_path / "a.ckptz").stat().st_size / 1.5
    restored = load_file(tmp_path / "b.ckptz")[SECOND]
    assert np.abs(np.log2(restored) - np.log2(later)).max() < 2.01


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (np.nan, "NaN or infinity"),
        (np.inf, "NaN or infinity"),
        (-1e-9, "negative second moments"),
        (-0.0, "negative second moments"),
    ],
)
def test_invalid_second_moments_stay_lossless(tmp_path: Path, value: float, reason: str) -> None:
    """The first moment is lossy nevertheless."""
    tensors = state()
    tensors[SECOND][3, 4] = value
    report = compress_state(tmp_path, tensors, "odd")
    assert any(SECOND in note and reason in note and "lossless" in note for note in report.notes)
    restored = load_file(tmp_path / "odd.ckptz")
    np.testing.assert_array_equal(restored[SECOND].view(np.uint32), tensors[SECOND].view(np.uint32))
    assert np.abs(restored[FIRST] - tensors[FIRST]).max() > 0


def test_a_first_moment_that_is_not_finite_stays_lossless(tmp_path: Path) -> None:
    tensors = state()
    tensors[FIRST][0, 0] = np.inf
    report = compress_state(tmp_path, tensors, "odd")
    assert any(FIRST in note and "lossless" in note for note in report.notes)
    restored = load_file(tmp_path / "odd.ckptz")
    np.testing.assert_array_equal(restored[FIRST], tensors[FIRST])


# --- first moments ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_steps_of_first_moments_follow_the_root_of_the_restored_second(tmp_path: Path, dtype: str) -> None:
    tensors = {n: v.astype(ARRAYS[dtype]) for n, v in state(scale=2.0**14).items()}
    restored = save_and_load(tmp_path, tensors, second_step=1, first_step=0.25, first_dead_zone=0.1)
    rule = plan_of(tmp_path, FIRST).rules[0]
    assert rule == Magnitude(SECOND)
    second, first = (restored[n].astype(np.float64) for n in (SECOND, FIRST))
    # A context spans one octave of second moments and has the step of its middle.
    error = np.abs(first - tensors[FIRST].astype(np.float64))
    is_normal = second >= 2.0**-14
    assert (error <= 0.25 * np.sqrt(second) * 1.5)[is_normal].all()
    assert (first != 0).mean() > 0.5


def test_first_moments_in_the_dead_zone_are_zero_and_levels_are_means(tmp_path: Path) -> None:
    tensors = state()
    restored = save_and_load(tmp_path, tensors, second_step=0.25, first_step=0.5, first_dead_zone=0.3)
    is_nonzero = restored[FIRST] != 0
    assert 0.05 < is_nonzero.mean() < 0.5
    assert (np.sign(restored[FIRST]) == np.sign(tensors[FIRST]))[is_nonzero].all()
    roots = np.sqrt(restored[SECOND][is_nonzero])
    exact, lossy = (np.abs(values[FIRST][is_nonzero]) / roots for values in (tensors, restored))
    assert abs(exact.mean() - lossy.mean()) < 0.004  # 0.008 if levels were multiples of the step


@pytest.mark.parametrize(
    "first", ["exp_avg.up.weight", "up.weight.exp_avg", "optimizer.state.up.weight.exp_avg"]
)
def test_moments_of_a_parameter_are_matched_in_all_naming_schemes(tmp_path: Path, first: str) -> None:
    tensors = state()
    second = first.replace("exp_avg", "exp_avg_sq")
    save_and_load(tmp_path, {"up.weight": tensors[WEIGHT], first: tensors[FIRST], second: tensors[SECOND]})
    assert plan_of(tmp_path, first).rules == (Magnitude(second),)


def test_second_moments_of_another_shape_are_no_contexts(tmp_path: Path) -> None:
    tensors = state()
    tensors[SECOND] = tensors[SECOND][:, :40].copy()
    restored = save_and_load(tmp_path, tensors, first_step=0.5)
    assert not any(isinstance(rule, Magnitude) for rule in plan_of(tmp_path, FIRST).rules)
    assert relative_error(restored[FIRST], tensors[FIRST]) < 0.6


@pytest.mark.parametrize(
    ("name", "most"),
    [("optimizer.w.momentum_buffer", 0.05), ("optimizer.w.exp_avg", 0.5)],  # Muon needs small elements too
)
def test_steps_follow_the_spread_of_rows_without_second_moments(
    tmp_path: Path, name: str, most: float
) -> None:
    rng = np.random.default_rng(0)
    spread = np.exp2(rng.uniform(-12, 0, 64))
    values = (rng.standard_normal((64, 96)) * spread[:, None]).astype(np.float32)
    restored = save_and_load(tmp_path, {name: values}, first_step=0.5)[name]
    assert isinstance(plan_of(tmp_path, name).rules[0], Row)
    errors = np.linalg.norm(restored - values, axis=1) / np.linalg.norm(values, axis=1)
    assert errors.max() < most


def test_first_moments_equal_to_the_root_are_restored_within_half_of_it(tmp_path: Path) -> None:
    tensors = state()
    tensors[FIRST] = np.sqrt(tensors[SECOND])
    restored = save_and_load(tmp_path, tensors, second_step=0.5, first_step=0.2, first_dead_zone=0.1)
    ratio = restored[FIRST] / tensors[FIRST]
    assert (ratio.min(), ratio.max()) == pytest.approx((1, 1), abs=0.5)


def test_first_moments_of_zeros_have_no_contexts(tmp_path: Path) -> None:
    tensors = state()
    tensors[FIRST][:] = 0
    assert not save_and_load(tmp_path, tensors)[FIRST].any()
    assert plan_of(tmp_path, FIRST).rules == ()


def test_first_moments_take_at_most_30_percent_more_bytes_early_in_training(tmp_path: Path) -> None:
    """After 15 updates with beta2 = 0.999, second moments are 1.5 % of the mean squared gradient."""

    def bytes_of_first(second_factor: float) -> int:
        tensors = state((300, 400))
        tensors[SECOND] *= np.float32(second_factor)
        save_and_load(tmp_path, tensors)
        report = inspect(tmp_path / "state.ckptz")
        return next(tensor.stored_bytes for tensor in report.tensors if tensor.name == FIRST)

    assert bytes_of_first(1 - 0.999**15) < 1.3 * bytes_of_first(1.0)


@pytest.mark.parametrize("scale", [2.0**-9, 2.0**9])
def test_first_moments_that_are_unrelated_to_the_root_have_no_contexts_by_it(
    tmp_path: Path, scale: float
) -> None:
    """Some optimizers average updates, which are already divided by the root, instead of gradients."""
    tensors = state()
    roots = np.sqrt(tensors[SECOND])
    tensors[FIRST] = (tensors[FIRST] / roots * np.median(roots) * scale).astype(np.float32)
    restored = save_and_load(tmp_path, tensors, first_step=0.5)
    assert not any(isinstance(rule, Magnitude) for rule in plan_of(tmp_path, FIRST).rules)
    assert relative_error(restored[FIRST], tensors[FIRST]) < 0.5


def test_first_moments_with_second_moments_of_zero_are_stored_exactly(tmp_path: Path) -> None:
    tensors = state()
    tensors[SECOND][:5] = 0
    restored = save_and_load(tmp_path, tensors)
    assert (restored[SECOND][:5] == 0).all()
    np.testing.assert_array_equal(restored[FIRST][:5], tensors[FIRST][:5])


# --- small tensors, records ---------------------------------------------------------------------


def test_small_trained_weights_are_rounded_and_untrained_tensors_are_exact(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(300) * np.exp2(rng.uniform(-120, 3, 300))).astype(np.float32)
    values[:4] = [0.0, -0.0, 1e-42, np.finfo(np.float32).max]
    tensors = {
        "model.norm.weight": values,
        "optimizer.norm.weight.exp_avg": values * 1e-3,
        "optimizer.norm.weight.exp_avg_sq": np.square(values * 1e-20),
        "optimizer.norm.weight.step": np.array(17, np.float32),
        "optimizer.norm.weight.row_var": np.abs(values[:40]),
        "optimizer.norm.weight.unknown": values,
        "model.rotary.inv_freq": values,
        "step": np.array(17),
    }
    restored = save_and_load(tmp_path, tensors)
    untrained = (
        "optimizer.norm.weight.step",
        "optimizer.norm.weight.unknown",
        "model.rotary.inv_freq",
        "step",
    )
    for name in untrained:
        assert restored[name].tobytes() == tensors[name].tobytes(), name
    for name in ("model.norm.weight", "optimizer.norm.weight.row_var"):
        exact, rounded = tensors[name], restored[name]
        assert (rounded != exact).mean() > 0.8
        errors = np.abs(rounded.astype(np.float64) - exact)
        assert (errors <= np.abs(exact.astype(np.float64)) * 2.0**-10).all()
        assert np.array_equal(np.signbit(rounded), np.signbit(exact))
    save_file(tensors, tmp_path / "exact.ckptz", config=Grid(moments=None))
    restored = load_file(tmp_path / "exact.ckptz")
    assert all(restored[name].tobytes() == tensors[name].tobytes() for name in tensors)


@pytest.mark.parametrize(("root", "is_limited"), [(1e-3, False), (1e-7, True)])
def test_steps_of_small_weights_follow_their_second_moments_up_to_an_eighth_of_the_spread(
    tmp_path: Path, root: float, is_limited: bool
) -> None:
    rng = np.random.default_rng(0)
    matrix, bias = rng.standard_normal((64, 64)) / 8, 1 + rng.standard_normal(600) / 8
    tensors = {"model.a.weight": matrix, "model.a.bias": bias}
    tensors |= {
        f"optimizer.a.{name}.exp_avg": tensors[f"model.a.{name}"] * 1e-5 for name in ("weight", "bias")
    }
    tensors["optimizer.a.weight.exp_avg_sq"] = np.full(matrix.shape, 1e-6)
    tensors["optimizer.a.bias.exp_avg_sq"] = np.full(bias.shape, root**2)
    tensors = {name: values.astype(np.float32) for name, values in tensors.items()}
    save_file(tensors, tmp_path / "a.ckptz", config=Grid())
    [record] = [t.lossy for t in inspect(tmp_path / "a.ckptz").tensors if t.name == "model.a.bias"]
    assert record is not None
    size = float(record.settings["size"])
    # An eighth of the step with the same expected loss change as that of large weights; 1/8 of the spread.
    expected = min(0.125 * 0.4 * (1e-3 / 8) / root, 0.125 / 8)
    assert expected / 2 * 0.95 < size < expected * 1.05  # steps are powers of two
    assert (expected == 0.125 / 8) == is_limited
    exact, rounded = tensors["model.a.bias"], load_file(tmp_path / "a.ckptz")["model.a.bias"]
    assert np.abs(rounded - exact).max() <= size / 2
    assert not np.modf(rounded / size)[0].any()


@pytest.mark.parametrize("size", [0.0, 2.0**-9])
def test_stochastic_rounding_of_small_weights_keeps_movement_on_average(size: float) -> None:
    values = np.full(1 << 16, 0.7, np.float32)
    moved = values + np.float32(1e-4)
    rounded = (
        FineRounding(size=size, rounding_rule=RoundingRule(11))
        .rounded(moved.view(np.uint32), floats.F32, 0)
        .view(np.float32)
    )
    assert len(np.unique(rounded)) == 2
    assert rounded.astype(np.float64).mean() == pytest.approx(0.7001, abs=2e-5)


@pytest.mark.parametrize("kind", [floats.F32, floats.BF16, floats.F16])
def test_rounding_is_idempotent_with_relative_errors_up_to_2_to_the_minus_10(kind: int) -> None:
    pattern = np.uint32 if kind == floats.F32 else np.uint16
    integers = np.random.default_rng(0).integers(0, np.iinfo(pattern).max, 10000, endpoint=True)
    patterns = integers.astype(pattern)
    once = FineRounding().rounded(patterns, kind, 0)
    np.testing.assert_array_equal(FineRounding().rounded(once, kind, 0), once)
    np.testing.assert_array_equal(FineRounding(rounding_rule=RoundingRule(7)).rounded(once, kind, 0), once)
    is_number = ~np.isnan(floats.to_f32(patterns, kind).view(np.float32))
    exact, rounded = (
        floats.to_f32(u, kind).view(np.float32)[is_number].astype(np.float64) for u in (patterns, once)
    )
    with np.errstate(invalid="ignore"):
        assert not (np.abs(rounded - exact) > np.abs(exact) * 2.0**-10).any()


def test_the_file_records_settings_and_measured_errors_of_moments(tmp_path: Path) -> None:
    tensors = state()
    save_file(tensors, tmp_path / "a.ckptz", config=Grid())
    records = {tensor.name: tensor.lossy for tensor in inspect(tmp_path / "a.ckptz").tensors}
    second, first = records[SECOND], records[FIRST]
    assert (second.method, second.role, second.settings) == ("second-moment", "exp_avg_sq", {"step": 4.0})
    assert (first.method, first.settings) == ("first-moment", {"step": 1.0, "dead_zone": 0.35})
    error = np.abs(load_file(tmp_path / "a.ckptz")[SECOND].astype(np.float64) - tensors[SECOND]).max()
    assert second.max_abs_error == pytest.approx(error, rel=2e-6)  # seven digits, rounded up


def test_moments_without_a_parameter_of_their_name_are_lossy(tmp_path: Path) -> None:
    tensors = state()
    moments = {"optimizer.state.0.exp_avg": tensors[FIRST], "optimizer.state.0.exp_avg_sq": tensors[SECOND]}
    restored = save_and_load(tmp_path, {WEIGHT: tensors[WEIGHT], **moments})
    for name, values in moments.items():
        assert not np.array_equal(restored[name], values)
        assert plan_of(tmp_path, name).quant_map is not None


# --- large tensors, threads, bounded memory -----------------------------------------------------


def test_jobs_and_order_change_no_byte_and_chunks_agree(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shape = (CHUNK_VALUES // 512 + 3, 512)
    second = np.exp2(rng.uniform(-30, -20, shape)).astype(np.float32)
    first = (rng.standard_normal(shape) * np.sqrt(second)).astype(np.float32)
    tensors = {FIRST: first, SECOND: second, **{f"optimizer.{i}.exp_avg": first[:64] for i in range(6)}}
    tensors |= {f"optimizer.{i}.exp_avg_sq": second[:64] for i in range(6)}
    save_plain(tensors, tmp_path / "a.safetensors")
    files = []
    config = Grid(moments=Moments(first_step=0.25))
    for jobs in (1, 4):
        compress([tmp_path / "a.safetensors"], tmp_path / "a.ckptz", config=config, jobs=jobs, force=True)
        files.append((tmp_path / "a.ckptz").read_bytes())
    assert files[0] == files[1]
    restored = load_file(tmp_path / "a.ckptz")
    assert np.abs(np.log2(restored[SECOND]) - np.log2(second)).max() < 4.01
    for i in (0, 3):
        assert relative_error(restored[f"optimizer.{i}.exp_avg"], first[:64]) < 0.7


def test_threads_that_need_a_plan_at_the_same_time_compute_it_once() -> None:
    plans, computed, barrier = LRUCache(9, lambda _: 1), [], threading.Barrier(4)

    def compute() -> TensorPlan:
        computed.append("a")
        return TensorPlan(exact_plan(dtype_of("F32")))

    def get() -> None:
        barrier.wait()
        plans.get("a", compute)

    threads = [threading.Thread(target=get) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert computed == ["a"]


def test_the_least_recently_used_plans_are_dropped() -> None:
    computed, names = list[str](), ["a", "b", "c"]
    plans, encoding = LRUCache(2, lambda _: 1), TensorPlan(exact_plan(dtype_of("F32")))
    for name in (*names, "c", "a", "c", "b"):
        plans.get(name, lambda name=name: computed.append(name) or encoding)
    assert computed == [*names, "a", "b"]


class CountingSource(TensorSource):
    """A tensor of patterns 0, 1, 2, ... with codes, which counts decoded chunks in `n_read`."""

    dtype, n_codes = dtype_of("F32"), 3
    n_read = 0

    def __init__(self, n_patterns: int) -> None:
        self.shape = (n_patterns,)

    def patterns(self, begin: int, end: int) -> Array:
        raise AssertionError("patterns and codes are decoded together")

    def patterns_and_codes(self, begin: int, end: int) -> tuple[Array, Array]:
        self.n_read += 1
        return np.arange(begin, end, dtype=np.uint32), np.arange(begin, end).astype(np.uint8)


def test_chunks_of_a_cached_base_are_decoded_once() -> None:
    source = CountingSource(CHUNK_VALUES + 4)
    chunks = CachedChunks()
    for tensor in (CachedTensor(source, "base", chunks), CachedTensor(source, "base", chunks)):
        for begin in (0, CHUNK_VALUES):
            assert tensor.codes(begin, begin + 4).tolist() == [0, 1, 2, 3]
            assert tensor.patterns(begin + 1, begin + 3).tolist() == [begin + 1, begin + 2]
        assert (tensor.n_codes, source.n_read) == (3, 2)


# --- logarithmic levels ------------------------------------------------------------------------------------


# Patterns of finite positive float32 values, with many subnormal and many large ones.
POSITIVE = st.integers(1, 0x7F7FFFFF) | st.integers(1, 200) | st.integers(0x7F000000, 0x7F7FFFFF)


@pytest.mark.parametrize("kind", [floats.F32, floats.BF16, floats.F16])
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_codes_and_sums_of_logarithmic_levels_equal_the_reference(kind: int, data: st.DataObject) -> None:
    patterns = np.array(data.draw(st.lists(POSITIVE | st.just(0), min_size=1, max_size=60)), np.uint32)
    width = 32 if kind == floats.F32 else 16
    if kind != floats.F32:
        patterns = (patterns >> np.uint32(16)).astype(np.uint16)
    if kind == floats.F16:
        patterns %= np.uint16(0x7C00)
    n_predicted = data.draw(st.sampled_from([0, len(patterns)]))
    any_pattern = st.integers(0, (1 << width) - 1)
    predicted_list = data.draw(st.lists(any_pattern, min_size=n_predicted, max_size=n_predicted))
    predicted = np.array(predicted_list, patterns.dtype)
    step = data.draw(st.integers(1, 1 << (width - 3)))
    log_levels = LogLevels(step, data.draw(st.integers(0, step - 1)))
    quantizer = LogLevelQuantizer(Prediction(kind), log_levels)
    indices, is_level, ratios = reference.log_level_indices(patterns, predicted, quantizer.levels, kind)

    level_indices, index_counts = np.unique(indices[is_level & (patterns != 0)], return_counts=True)
    level_range = level_range_of(level_indices, index_counts, int((patterns == 0).sum()), 1)
    codes = np.empty(len(patterns), np.uint8)
    zero_code, escape_code = level_range.zero_code or 0, level_range.escape_code or 0
    codes_of = (level_range.lowest, level_range.n_levels, zero_code, escape_code)
    moments().log_level_codes(patterns, predicted, quantizer.levels, codes_of, codes)
    expected = np.where(is_level, indices - level_range.lowest, -1)
    expected[(expected < 0) | (expected >= level_range.n_levels)] = level_range.escape_code
    expected[patterns == 0] = zero_code
    np.testing.assert_array_equal(codes, expected)

    first, n = level_range.lowest - 1, 300
    sums = np.zeros((4, n + 2), np.int64), np.zeros((4, n + 2))
    moments().log_level_sums(patterns, predicted, quantizer.levels, kind, first, *sums)
    counts, roots = (partial.sum(axis=0) for partial in sums)
    is_counted = is_level & (patterns != 0) & (indices >= first) & (indices < first + n)
    cells = indices[is_counted] - first
    np.testing.assert_array_equal(counts[:n], np.bincount(cells, minlength=n))
    np.testing.assert_allclose(roots[:n], np.bincount(cells, ratios[is_counted], n), rtol=1e-12)
    assert counts[n:].tolist() == [(patterns == 0).sum(), ((patterns != 0) & ~is_counted).sum()]


@given(st.lists(POSITIVE | st.just(0), min_size=1, max_size=80), st.integers(1, 9), st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_sums_of_logarithms_equal_the_reference(integers: list[int], n_columns: int, begin: int) -> None:
    patterns = np.array(integers, np.uint32)
    shape = ((begin + len(patterns)) // n_columns + 1, n_columns)
    expected_rows, expected_columns = reference.log_sums(patterns, begin, shape)
    sums = LogSums.of(patterns, begin, shape)
    np.testing.assert_allclose(sums.rows, expected_rows, rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(sums.columns, expected_columns, rtol=1e-12, atol=1e-9)


def test_sums_of_logarithms_of_many_values_do_not_overflow() -> None:
    """The kernel multiplies mantissas before it takes their logarithm."""
    patterns = np.full(3000, 0x3FFFFFFF, np.uint32)  # just below 2
    sums = LogSums.of(patterns, 0, (1, 3000)) + LogSums.of(patterns[::-1], 0, (1, 3000))
    assert sums.rows.tolist() == [[pytest.approx(6000)], [6000]]
    assert LogSums.of(patterns, 0, (3000, 1)).columns.tolist() == [[pytest.approx(3000)], [3000]]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_codes_and_sums_of_first_moments_equal_the_reference(data: st.DataObject) -> None:
    integers = data.draw(st.lists(POSITIVE | st.just(0), min_size=1, max_size=60))
    n = len(integers)
    signs = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    patterns = np.array(integers, np.uint32) | (np.array(signs, np.uint32) << np.uint32(31))
    labels = np.array(data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)), np.uint8)
    values = floats.widen_f64(patterns)
    steps = np.array([0.0, np.abs(values).max() / 20, 1e-3])
    dead_zone = data.draw(st.sampled_from([0.0, 0.35, 1.0]))
    indices = reference.level_indices(values, steps[labels], dead_zone)

    sums = LevelSums.of(patterns, labels, steps, dead_zone)
    cells, size = labels.astype(np.int64) * 257 + indices + 128, 3 * 257
    np.testing.assert_array_equal(sums.counts.reshape(-1), np.bincount(cells, minlength=size))
    ratios = np.where(indices != 0, values / np.where(steps > 0, steps, 1.0)[labels], 0.0)
    np.testing.assert_array_equal(sums.sums.reshape(-1), np.bincount(cells, ratios, size))

    codes = np.empty(n, np.uint8)
    codes_of = (-2, 7, 9, 128)  # lowest level, number of levels, escape code, index beyond all levels
    moments().level_codes(patterns, patterns.view(np.float32), labels, steps, dead_zone, codes_of, codes)
    expected = indices + 2
    expected[(expected < 0) | (expected >= 7)] = 9
    np.testing.assert_array_equal(codes, expected)


def test_bits_of_logarithmic_levels_count_distances_at_their_nearest_level() -> None:
    distances = np.arange(-42.0, 38.0)  # levels at 3, 13, 23 and so on: eight of ten distances each
    assert LogLevels(step=10, phase=3).bits(distances) == 80 * 3


@pytest.mark.parametrize("n_labels", [1, 7])
def test_bits_by_phase_equal_the_entropy_of_each_label(n_labels: int) -> None:
    rng = np.random.default_rng(n_labels)
    distances = rng.normal(0, 3000, 999).round()
    labels = rng.integers(0, n_labels, len(distances)).astype(np.uint8)
    phases = [0, 17, 99]
    for phase, bits in zip(phases, bits_by_phase(distances, 100, phases, labels), strict=True):
        levels = np.floor((distances + 50 - phase) / 100)
        expected = 0.0
        for label in range(n_labels):
            _, counts = np.unique(levels[labels == label], return_counts=True)
            expected += float((counts * np.log2(counts.sum() / counts)).sum())
        assert bits == pytest.approx(expected)


def test_contexts_with_too_many_levels_to_count_have_infinite_bits() -> None:
    distances, labels = np.array([0.0, 2.0**31]), np.array([0, 1], np.uint8)
    assert bits_by_phase(distances, 1, [0], labels).tolist() == [np.inf]
    assert np.isfinite(bits_by_phase(distances, 1, [0])).all()


def test_the_kernel_marks_moments_beyond_their_bound() -> None:
    values = np.array([1.0, -1.0, 0.5, 1e-30, 3.0, np.nan], np.float32)
    squares = np.array([1.0, 4.0, 0.25, 0.0, np.nan, 1.0], np.float32)
    is_beyond = np.empty(6, np.bool_)
    moments().beyond(values, squares, 0.9, is_beyond)
    assert is_beyond.tolist() == [True, False, True, True, False, False]


def test_the_best_phase_needs_one_level_if_all_moments_grew_by_a_similar_factor() -> None:
    distances = np.random.default_rng(0).integers(1450, 1550, 500).astype(np.float64)
    log_levels = best_log_levels(distances, 1000)
    assert log_levels.bits(distances) == 0
    assert LogLevels(1000, 0).bits(distances) > 300


def test_codes_are_assigned_to_the_most_frequent_range_of_levels() -> None:
    indices = np.array([0, 1, 5000, 5001, 5002, 9000])
    counts = np.array([1, 1, 9, 9, 9, 1])
    level_range = level_range_of(indices, counts, n_zeros=4, n_exceptions=0)
    assert (level_range.lowest, level_range.n_levels) == (5000, 3)
    assert (level_range.zero_code, level_range.escape_code, level_range.n_codes) == (3, 4, 5)
    limited = level_range_of(np.arange(MAX_LEVELS + 9), np.ones(MAX_LEVELS + 9, np.int64), 0, 0)
    assert limited.n_levels == MAX_LEVELS
    assert limited.escape_code == MAX_LEVELS


def test_rows_within_half_an_octave_share_a_label() -> None:
    labels, spreads = row_labels(np.array([1.0, 1.05, 4.0, 0.0, 4.1]))
    assert labels[0] == labels[1] != labels[2] == labels[4]
    assert spreads[labels[2]] / spreads[labels[0]] == pytest.approx(4.0)
    assert row_labels(np.zeros(3))[0].tolist() == [0, 0, 0]
