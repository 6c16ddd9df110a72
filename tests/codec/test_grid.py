"""The grid method: steps by sensitivity, levels, deltas, and weights or second moments that it cannot use."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_plain
from safetensors.numpy import save_file as save_plain

from ckptz import KMeans, safe_open
from ckptz.codec.column_rounding import ColumnGrid
from ckptz.codec.grid import Grid
from ckptz.codec.grid_steps import (
    MAX_ROW_CLASSES,
    REFERENCE_NOISE,
    SPREAD_CAP,
    fit_levels,
    largest_magnitude,
    row_steps,
)
from ckptz.codec.method import Method
from ckptz.errors import FormatError
from ckptz.kernels.floats import ESCAPE
from ckptz.numpy import load_file, save_file
from ckptz.torch import load_file as load_torch
from ckptz.torch import save_file as save_torch
from tests.support.cli_support import ckptz, relative_error, sets, tensors_in

Array = np.ndarray[Any, Any]
WEIGHT, MOMENT = "model.up.weight", "optimizer.up.weight.exp_avg_sq"
WEIGHTS_ONLY = Grid(moments=None)


# --- steps --------------------------------------------------------------------------------------


def test_the_largest_step_shrinks_with_steps_below_the_reference() -> None:
    sensitivity = np.array([1.0, 1e-12])  # the second row is like that of a rare token
    largest = row_steps(1.0, 1.0, sensitivity, 1.0).steps.max()
    assert SPREAD_CAP / 2**0.5 <= largest <= SPREAD_CAP  # steps are half octaves apart
    for step in (0.35, 0.05):
        assert row_steps(step, 1.0, sensitivity, 1.0).steps.max() == pytest.approx(largest * step)
    assert row_steps(4.0, 1.0, sensitivity, 1.0).steps.max() <= SPREAD_CAP


def test_steps_are_proportional_to_the_root_of_sensitivity_within_a_quarter_octave() -> None:
    sensitivity = np.exp(np.random.default_rng(0).normal(size=300))
    rows = row_steps(1.0, 1.0, sensitivity, 1.0)
    ideal = REFERENCE_NOISE / np.sqrt(sensitivity)
    np.testing.assert_array_less(np.abs(np.log2(rows.steps[rows.labels] / ideal)), 0.2501)
    np.testing.assert_allclose(np.log2(rows.steps / rows.steps[0]) * 2 % 1, 0, atol=1e-9)


@pytest.mark.parametrize("factor", [0.3, 1.7, 100.0])
def test_steps_scale_with_their_multiplier_and_the_weights_but_not_with_gradients(factor: float) -> None:
    sensitivity = np.exp(np.random.default_rng(0).normal(size=50))
    rows = row_steps(0.01, 1.0, sensitivity, 1.0)
    for scaled_rows in (
        row_steps(0.01 * factor, 1.0, sensitivity, 1.0),
        row_steps(0.01, factor, sensitivity, factor**2),
        row_steps(0.01, factor, sensitivity * factor**4, factor**6),
    ):
        expected = rows.steps[rows.labels] * factor
        np.testing.assert_allclose(scaled_rows.steps[scaled_rows.labels], expected, rtol=1e-9)


def test_equally_sensitive_weights_get_the_same_step_as_weights_without_sensitivity() -> None:
    spread, sensitivity = 0.02, np.full(10, 3e-7)
    guided = row_steps(0.7, spread, sensitivity, 3e-7 * spread**2)
    unguided = row_steps(0.7, spread, None, None)
    np.testing.assert_allclose(guided.steps, unguided.steps)
    np.testing.assert_allclose(unguided.steps, [0.7 * REFERENCE_NOISE * spread])


def test_rows_with_tiny_gradients_get_the_largest_step() -> None:
    sensitivity = np.array([1e-300, 1e-12, 1.0, 1e30])
    rows = row_steps(1.0, 0.5, sensitivity, 0.25)
    steps = rows.steps[rows.labels]
    assert (steps > 0).all()
    assert steps.max() <= SPREAD_CAP * 0.5
    assert steps[0] == steps[1] == steps.max() > SPREAD_CAP * 0.5 / 1.42
    assert len(rows.steps) <= MAX_ROW_CLASSES


def test_rows_without_gradients_get_the_step_of_weights_without_sensitivity() -> None:
    for step in (0.25, 1.0, 20.0):
        rows = row_steps(step, 0.5, np.array([0, 1e-12, 1.0, 0]), 0.25)
        [unguided_step] = row_steps(step, 0.5, np.zeros(4), 0.25).steps
        assert unguided_step == min(step * REFERENCE_NOISE, SPREAD_CAP) * 0.5
        np.testing.assert_allclose(rows.steps[rows.labels][[0, 3]], unguided_step)


def grid_codes(scaled: Array, dead_zone: float, max_magnitude: int = 127) -> Array:
    """Round values [n] in units of grid steps to codes, uint8 [n], as `ColumnGrid` does."""
    steps, labels = np.ones((1, 1), np.float32), np.zeros((1, len(scaled)), np.uint8)
    grid = ColumnGrid(steps, labels, np.zeros((1, 256), np.float32), dead_zone, max_magnitude)
    return grid.round(0, scaled, scaled)[0]


def test_codes_are_numbered_by_magnitude_and_the_dead_zone_only_widens_zero() -> None:
    scaled = np.array([0, 0.49, 0.51, -0.51, 0.69, -0.71, 1.4, 1.6, -1.6, 5.6, -300, np.inf], np.float32)
    np.testing.assert_array_equal(grid_codes(scaled, 0.0, 5), [0, 0, 1, 2, 1, 2, 1, 3, 4, *[ESCAPE] * 3])
    np.testing.assert_array_equal(grid_codes(scaled, 0.2, 5), [0, 0, 0, 0, 0, 2, 1, 3, 4, *[ESCAPE] * 3])
    assert grid_codes(np.array([127.2, -127.2], np.float32), 0.0).tolist() == [253, 254]


def test_levels_are_mean_magnitudes_of_their_codes() -> None:
    rng = np.random.default_rng(0)
    steps, values = np.array([0.1, 1.0]), rng.laplace(size=(2, 4000))
    values[0] *= 0.1
    codes = np.stack([grid_codes(scaled, 0.2) for scaled in (values / steps[:, None]).astype(np.float32)])
    counts = np.stack([np.bincount(c, minlength=256) for c in codes])
    sums = np.stack([np.bincount(c, np.abs(v), 256) for c, v in zip(codes, values, strict=True)])
    levels = fit_levels(steps, counts, sums, 3)
    restored = levels.expand().view(np.float32)
    for k in range(2):
        for magnitude in (1, 2, 3):
            mean = sums[k, 2 * magnitude - 1 : 2 * magnitude + 1].sum()
            mean /= counts[k, 2 * magnitude - 1 : 2 * magnitude + 1].sum()
            assert restored[k, 2 * magnitude - 1] == pytest.approx(mean, rel=0.03)
            assert restored[k, 2 * magnitude] == -restored[k, 2 * magnitude - 1]


def test_rare_outliers_escape_and_common_ones_have_levels() -> None:
    counts = np.zeros(256, np.int64)
    counts[:5], counts[160] = 1000, 2
    assert largest_magnitude(counts) == 2
    counts[160] = 100_000
    assert largest_magnitude(counts) == 80
    assert largest_magnitude(np.zeros(256, np.int64)) == 0


# --- files --------------------------------------------------------------------------------------


def state(step: int = 0, seed: int = 0) -> dict[str, Array]:
    """Return a small model after some training steps, with second moments.

    Rows 0 to 7 of WEIGHT have 1000 times smaller second moments than the others.
    """
    rng, drift = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    tensors = {
        "model.token.weight": rng.standard_normal((96, 64)) * 0.02,
        WEIGHT: rng.laplace(size=(128, 96)) * 0.05,
        "model.norm.weight": rng.standard_normal(64) + 1,
    }
    for _ in range(step):
        for value in tensors.values():
            value += 0.04 * value.std() * drift.laplace(size=value.shape)
    row_scales = np.ones((128, 1))
    row_scales[:8] = 1e-3
    tensors[MOMENT] = rng.standard_normal((128, 96)) ** 2 * 1e-8 * row_scales
    return {name: value.astype(np.float32) for name, value in tensors.items()}


def weights_of(tensors: dict[str, Array]) -> dict[str, Array]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}


def write_step(folder: Path, step: int = 0, name: str = "step", **changes: Array) -> Path:
    """Write a state as a safetensors file, with some tensors replaced by `changes`, and return its path."""
    path = folder / f"{name}-{step}.safetensors"
    save_plain({**state(step), **changes}, path)
    return path


def save_and_load(folder: Path, tensors: dict[str, Array], config: Grid = WEIGHTS_ONLY) -> dict[str, Array]:
    save_file(tensors, folder / "a.ckptz", config=config)
    return load_file(folder / "a.ckptz")


def test_a_file_records_its_settings_and_errors_and_a_note_reports_missing_calibration(
    tmp_path: Path,
) -> None:
    source, out = write_step(tmp_path), tmp_path / "out.ckptz"
    save_plain(weights_of(state()), source)
    options = ("--method", "grid", *sets(step=1.5, dead_zone=0.25))
    run = ckptz("compress", source, "-o", out, *options)
    assert "no calibration" in run.stderr
    record = tensors_in(out)[WEIGHT]["lossy"]
    assert (record["method"], record["promise"], record["n_pruned"]) == ("grid", "none", 0)
    assert record["settings"] == {"step": 1.5, "dead_zone": 0.25}
    exact, restored = state()[WEIGHT], load_file(out)[WEIGHT]
    assert record["max_abs_error"] == pytest.approx(np.abs(restored - exact).max(), rel=1e-6)
    assert record["rms_error"] == pytest.approx(np.sqrt(np.mean((restored - exact) ** 2)), rel=1e-4)
    assert "grid, linear, step 1.5" in ckptz("inspect", out, "--tensors").stdout
    ckptz("verify", out, "--against", source)


def test_smaller_steps_have_smaller_errors_and_larger_files(tmp_path: Path) -> None:
    errors, sizes = [], []
    for step in (0.1, 0.5, 2.0, 8.0):
        restored = save_and_load(tmp_path, weights_of(state()), Grid(step=step, moments=None))
        errors.append(relative_error(restored[WEIGHT], state()[WEIGHT]))
        sizes.append((tmp_path / "a.ckptz").stat().st_size)
    assert errors == sorted(errors)
    assert sizes == sorted(sizes, reverse=True)
    assert errors[0] < 0.02


def test_second_moments_in_the_file_make_errors_of_insensitive_rows_larger(tmp_path: Path) -> None:
    exact = state()[WEIGHT]
    guided_error = np.abs(save_and_load(tmp_path, state())[WEIGHT] - exact)
    unguided_error = np.abs(save_and_load(tmp_path, weights_of(state()))[WEIGHT] - exact)
    assert guided_error[:8].mean() > 2 * guided_error[8:].mean()
    assert unguided_error[:8].mean() < 1.2 * unguided_error[8:].mean()


def test_second_moments_may_come_from_another_file(tmp_path: Path) -> None:
    full_state, weights = write_step(tmp_path), tmp_path / "weights.safetensors"
    save_plain(weights_of(state()), weights)
    ckptz("compress", weights, "--method", "grid", "--set", f"guide.moments_from={full_state}")
    restored = load_file(tmp_path / "weights.ckptz")
    assert MOMENT not in restored
    shipped = save_and_load(tmp_path, state(), Grid(purpose="ship"))[WEIGHT]
    np.testing.assert_array_equal(restored[WEIGHT], shipped)


def test_second_moments_may_come_from_a_torch_file_with_numbered_parameters(tmp_path: Path) -> None:
    tensors = state()
    weights = {name: tensors[name] for name in ("model.token.weight", WEIGHT)}
    moments = {0: np.full((96, 64), 1e-9, np.float32), 1: tensors[MOMENT]}
    numbered = {i: {"exp_avg_sq": torch.from_numpy(m), "step": torch.tensor(3.0)} for i, m in moments.items()}
    torch.save({"state": numbered, "param_groups": [{"params": [0, 1]}]}, tmp_path / "optimizer.pt")
    save_plain(weights, tmp_path / "model.safetensors")
    options = ("--method", "grid", "--set", f"guide.moments_from={tmp_path}/optimizer.pt")
    ckptz("compress", tmp_path / "model.safetensors", *options)
    error = np.abs(load_file(tmp_path / "model.ckptz")[WEIGHT] - weights[WEIGHT])
    assert error[:8].mean() > 2 * error[8:].mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", [WEIGHTS_ONLY, KMeans(levels=16, protect=0.0)], ids=["grid", "kmeans"])
def test_restored_weights_have_their_float_dtype(tmp_path: Path, config: Method, dtype: torch.dtype) -> None:
    first, second = (
        {name: torch.from_numpy(tensor).to(dtype) for name, tensor in weights_of(state(step)).items()}
        for step in (0, 1)
    )
    save_torch(first, tmp_path / "a.ckptz", config=config)
    save_torch(second, tmp_path / "b.ckptz", config=config, base=tmp_path / "a.ckptz")
    for path, tensors in (("a.ckptz", first), ("b.ckptz", second)):
        restored = load_torch(tmp_path / path)[WEIGHT]
        assert restored.dtype == dtype
        assert 0 < relative_error(restored.float().numpy(), tensors[WEIGHT].float().numpy()) < 0.25


def test_errors_do_not_add_up_over_a_chain(tmp_path: Path) -> None:
    paths = [write_step(tmp_path, step) for step in range(6)]
    ckptz("compress", *paths, "--chain", "-o", tmp_path / "run", "--method", "grid", *sets(step=2))
    errors, bits = [], []
    for step, path in enumerate(paths):
        out = tmp_path / "run" / f"step-{step}.ckptz"
        ckptz("verify", out, "--against", path)
        errors.append(relative_error(load_file(out)[WEIGHT], load_plain(path)[WEIGHT]))
        bits.append(tensors_in(out)[WEIGHT]["bits_per_element"])
    assert max(errors) < 1.3 * errors[0]
    assert max(bits[1:]) < 0.75 * bits[0]
    assert tensors_in(tmp_path / "run" / "step-5.ckptz")[WEIGHT]["predictor"] == "base"


@pytest.mark.parametrize("method", ["plain", "lossless", "kmeans", "grid"])
def test_the_base_may_be_plain_or_compressed_by_any_method(tmp_path: Path, method: str) -> None:
    first, second = write_step(tmp_path, 0), write_step(tmp_path, 1)
    base = first
    if method != "plain":
        base = tmp_path / "base.ckptz"
        ckptz("compress", first, "-o", base, "--method", method)
    ckptz("compress", second, "--base", base, "--method", "grid")
    delta = tmp_path / "step-1.ckptz"
    assert tensors_in(delta)[WEIGHT]["predictor"] == "base"
    assert relative_error(load_file(delta)[WEIGHT], state(1)[WEIGHT]) < 0.25
    ckptz("verify", delta, "--against", second)


def test_a_base_of_unrelated_weights_is_not_used(tmp_path: Path) -> None:
    unrelated = write_step(tmp_path, name="other", **weights_of(state(seed=7)))
    ckptz("compress", unrelated, "--method", "grid")
    ckptz("compress", write_step(tmp_path), "--base", tmp_path / "other-0.ckptz", "--method", "grid")
    assert tensors_in(tmp_path / "step-0.ckptz")[WEIGHT]["predictor"] == "zero"


def test_weights_are_decoded_without_the_second_moments_that_guided_them(tmp_path: Path) -> None:
    path = tmp_path / "a.ckptz"
    save_file(state(), path, config=WEIGHTS_ONLY)
    restored, moment_frame = load_file(path), load_plain(path)[MOMENT].tobytes()
    path.write_bytes(path.read_bytes().replace(moment_frame, bytes(len(moment_frame))))
    with safe_open(path, framework="numpy") as file:
        np.testing.assert_array_equal(file.get_tensor(WEIGHT), restored[WEIGHT])
        with pytest.raises(FormatError):
            file.get_tensor(MOMENT)


def test_weights_of_two_chunks_have_small_errors_in_full_files_and_deltas(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shape = (1040, 1030)  # the border of the chunks is inside a row
    first = (rng.laplace(size=shape) * 0.02).astype(np.float32)
    second = first + (rng.laplace(size=shape) * 0.001).astype(np.float32)
    moments = (np.exp(rng.normal(size=(1040, 1))) * np.ones(shape)).astype(np.float32)
    a, b = tmp_path / "a.ckptz", tmp_path / "b.ckptz"
    save_file({WEIGHT: first, MOMENT: moments}, a, config=WEIGHTS_ONLY)
    save_file({WEIGHT: second, MOMENT: moments}, b, config=WEIGHTS_ONLY, base=a)
    for path, exact in ((a, first), (b, second)):
        assert relative_error(load_file(path)[WEIGHT], exact) < 0.25
        assert tensors_in(path)[WEIGHT]["n_chunks"] == 2


def test_outliers_are_stored_exactly(tmp_path: Path) -> None:
    tensors = weights_of(state())
    tensors[WEIGHT][3, 5], tensors[WEIGHT][9, 9] = 50, -1e4
    restored = save_and_load(tmp_path, tensors, Grid(step=0.01, moments=None))
    assert restored[WEIGHT][9, 9] == -1e4
    assert tensors_in(tmp_path / "a.ckptz")[WEIGHT]["lossy"]["n_protected"] >= 2


def test_weights_of_a_single_value_have_small_errors(tmp_path: Path) -> None:
    constant = np.full((64, 64), 0.375, np.float32)
    np.testing.assert_allclose(save_and_load(tmp_path, {"one": constant})["one"], constant, rtol=0.2)


def test_weights_with_short_rows_or_extreme_shapes_have_small_errors(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for shape in ((512, 1, 3, 3), (1, 5000), (5000, 1), (64, 3, 5, 7)):
        weight = rng.standard_normal(shape).astype(np.float32)
        moments = (np.exp(rng.normal(size=shape))).astype(np.float32)
        restored = save_and_load(tmp_path, {WEIGHT: weight, MOMENT: moments})
        assert relative_error(restored[WEIGHT], weight) < 0.3, shape


# --- weights and second moments that cannot be used ---------------------------------------------


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        *((name, value, "NaN or infinity") for name in ("grid", "kmeans") for value in (np.nan, np.inf)),
        ("grid", 3e38, "near the limit of F32"),
    ],
)
def test_weights_with_values_beyond_all_levels_stay_lossless_and_are_named(
    tmp_path: Path, method: str, value: float, message: str
) -> None:
    tensor = state()[WEIGHT]
    tensor[1, 1] = value
    run = ckptz("compress", write_step(tmp_path, **{WEIGHT: tensor}), "--method", method)
    assert f"'{WEIGHT}'" in run.stderr
    assert message in run.stderr
    np.testing.assert_array_equal(load_file(tmp_path / "step-0.ckptz")[WEIGHT], tensor)


def test_weights_whose_base_is_not_finite_stay_lossless_and_are_named(tmp_path: Path) -> None:
    tensor = state()[WEIGHT]
    tensor[1, 1] = np.inf
    first, second = write_step(tmp_path, 0, **{WEIGHT: tensor}), write_step(tmp_path, 1)
    run = ckptz("compress", second, "--base", first, "--method", "grid")
    assert f"'{WEIGHT}'" in run.stderr
    np.testing.assert_array_equal(load_file(tmp_path / "step-1.ckptz")[WEIGHT], state(1)[WEIGHT])


@pytest.mark.parametrize("scale", [0.0, 1e-36])
def test_weights_too_small_for_a_grid_stay_lossless(tmp_path: Path, scale: float) -> None:
    tensors = {WEIGHT: state()[WEIGHT] * np.float32(scale)}
    np.testing.assert_array_equal(save_and_load(tmp_path, tensors)[WEIGHT], tensors[WEIGHT])


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_weights_with_invalid_second_moments_stay_lossless_and_are_named(
    tmp_path: Path, value: float
) -> None:
    moments = state()[MOMENT]
    moments[5, 5] = value
    run = ckptz("compress", write_step(tmp_path, **{MOMENT: moments}), "--method", "grid")
    assert f"'{WEIGHT}'" in run.stderr
    assert "second moments" in run.stderr
    np.testing.assert_array_equal(load_file(tmp_path / "step-0.ckptz")[WEIGHT], state()[WEIGHT])


@pytest.mark.parametrize("rows", [slice(0, 64), slice(None)])
def test_rows_without_gradients_are_not_rounded_to_zero(tmp_path: Path, rows: slice) -> None:
    moments = state()[MOMENT]
    moments[rows] = 0
    restored = save_and_load(tmp_path, {**state(), MOMENT: moments})[WEIGHT]
    assert relative_error(restored[64:], state()[WEIGHT][64:]) < 0.25
    assert relative_error(restored[rows], state()[WEIGHT][rows]) < 1


def test_second_moments_of_another_shape_are_not_used(tmp_path: Path) -> None:
    run = ckptz("compress", write_step(tmp_path, **{MOMENT: state()[MOMENT].T.copy()}), "--method", "grid")
    assert f"another shape or type, which are not used, first '{WEIGHT}'" in run.stderr
    unguided = save_and_load(tmp_path, weights_of(state()), Grid(purpose="resume"))[WEIGHT]
    np.testing.assert_array_equal(load_file(tmp_path / "step-0.ckptz")[WEIGHT], unguided)


@pytest.mark.parametrize(
    ("moments", "message"),
    [
        ({MOMENT: state()[MOMENT].T.copy()}, "the weight has shape [128, 96]"),
        ({"optimizer.other.exp_avg_sq": state()[MOMENT]}, "has no second moment"),
    ],
)
def test_second_moments_of_another_model_are_refused(
    tmp_path: Path, moments: dict[str, Array], message: str
) -> None:
    optimizer = tmp_path / "optimizer.safetensors"
    save_plain(moments, optimizer)
    options = ("--method", "grid", "--set", f"guide.moments_from={optimizer}")
    run = ckptz("compress", write_step(tmp_path), *options, fails=True)
    assert run.exit_code == 2
    assert message in run.stderr
    assert "optimizer.safetensors" in run.stderr
    assert not list(tmp_path.glob("*.ckptz*"))
