"""The next file keeps the movement of the weights since a restore on average, however small it is."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file as save_plain

from ckptz import Checkpointer, Grid, KeepPolicy, KMeans, compress, inspect
from ckptz.codec.grid import FULL_SHARE
from ckptz.codec.lossless import LOSSLESS
from ckptz.codec.method import Method
from ckptz.codec.rounding_rule import TO_NEAREST, RoundingRule, choose_rounding
from ckptz.format.context_rules import labels_of_rows
from ckptz.format.index import LossyRecord
from ckptz.format.sources import CHUNK_VALUES
from ckptz.kernels import rounding
from ckptz.kernels.floats import ESCAPE, NEAREST
from ckptz.numpy import load_file
from ckptz.store.resolve import open_checkpoint
from tests.support import reference
from tests.support.checkpointer_support import LOSSY

Array = np.ndarray[Any, Any]
WEIGHT, NORM, MOMENT = "model.up.weight", "model.norm.weight", "optimizer.norm.weight.exp_avg"

# --- thresholds and kernels -----------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_codes_and_thresholds_of_the_kernels_equal_the_reference(data: st.DataObject) -> None:
    seed = data.draw(st.one_of(st.just(NEAREST), st.integers(0, 2**32 - 1)))
    begin = data.draw(st.sampled_from([0, 1, 77, 2**32 - 5, 2**32, 2**40 + 3]))
    n, n_rows = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 5))
    row_patterns = -(-(begin + n) // n_rows)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    steps = np.exp2(rng.uniform(-9, 3, 3)).astype(np.float32)
    labels = rng.integers(0, 3, n_rows).astype(np.uint8)
    values = (rng.standard_normal(n) * data.draw(st.sampled_from([0.01, 1.0, 400.0]))).astype(np.float32)
    row_steps = steps[labels[np.arange(begin, begin + n) // row_patterns]]
    is_half_step = rng.random(n) < 0.3  # multiples of half a step: levels and ties
    values[is_half_step] = (np.rint(values / row_steps * 2) / 2 * row_steps)[is_half_step]
    base = rng.standard_normal(n).astype(np.float32) if data.draw(st.booleans()) else None
    dead_zone = data.draw(st.sampled_from([0.0, 0.1, 4.0]))

    grid = (steps, labels, row_patterns)
    expected = reference.residual_codes(values, base, *grid, dead_zone, seed, begin)
    codes = np.empty(n, np.uint8)
    rounding().residual_codes(values, base, *grid, dead_zone, seed, begin, codes)
    np.testing.assert_array_equal(codes, expected)
    thresholds = reference.thresholds(seed, begin, n)
    np.testing.assert_array_equal(rounding().thresholds(seed, begin, n), thresholds)
    offset = n // 2
    np.testing.assert_array_equal(
        rounding().thresholds(seed, begin + offset, n - offset), thresholds[offset:]
    )


@pytest.mark.parametrize("n_groups", [1, 8])
def test_movements_of_one_size_are_found_in_any_steps(n_groups: int) -> None:
    rng = np.random.default_rng(0)
    groups = rng.integers(0, n_groups, 1 << 14).astype(np.uint8)
    movements = 0.4 * 2.0 ** (groups / 2) * rng.choice([-1.0, 1.0], len(groups))
    rule = choose_rounding(movements, None, TO_NEAREST, lambda: 1, groups=groups)
    assert rule == RoundingRule(1)
    # Errors of the base are spread evenly, over more than one step if the base's steps are larger.
    for width in (1.0, 1.3, 1.43, 1.7):
        errors = width * rng.uniform(-0.5, 0.5, len(groups))
        assert choose_rounding(errors, None, TO_NEAREST, lambda: 1, groups=groups) == TO_NEAREST


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 700) | st.sampled_from([1 << 14, (1 << 14) - 13]), st.integers(1, 99), st.data())
def test_sums_of_the_kernels_equal_those_of_numpy(n: int, row_patterns: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(n)
    values, base, gradients = rng.standard_normal((3, n)).astype(np.float32)
    wide, wide_base = values.astype(np.float64), base.astype(np.float64)
    # Exact, because grid steps, and so the bytes of files, depend on these values.
    assert rounding().power(values) == (wide**2).sum()
    assert rounding().power(values, base) == ((wide - wide_base) ** 2).sum()
    assert rounding().largest(values.view(np.uint32)) == np.abs(values).max().view(np.uint32)

    begin = data.draw(st.integers(0, 200))
    rows = np.arange(begin, begin + n) // row_patterns
    is_root = data.draw(st.booleans())  # whether the kernel gets roots of second moments (gradients)
    moments = gradients if is_root else np.abs(gradients)
    squares = moments.astype(np.float64) ** (2 if is_root else 1)
    row_sums = np.zeros(rows[-1] + 1)
    total, is_valid = rounding().sensitivities(values, moments, is_root, begin, row_patterns, row_sums)
    np.testing.assert_allclose(row_sums, np.bincount(rows, squares), rtol=1e-12)
    assert (total, is_valid) == (pytest.approx(squares @ wide**2), True)
    invalid = moments.copy()
    invalid[-1] = data.draw(st.sampled_from([np.inf, np.nan, *([] if is_root else [-1e-20])]))
    assert not rounding().sensitivities(values, invalid, is_root, begin, row_patterns, row_sums)[1]
    invalid[-1] = -0.0
    assert rounding().sensitivities(values, invalid, is_root, begin, row_patterns, row_sums)[1]

    labels, codes = rng.integers(0, 3, len(row_sums)).astype(np.uint8), rng.integers(0, 4, n).astype(np.uint8)
    for base_or_none, sizes in ((None, np.abs(wide)), (base, np.abs(wide - wide_base))):
        sums = np.zeros((3, 256))
        rounding().residual_sums(values, base_or_none, labels, row_patterns, begin, codes, sums)
        cells = labels[rows].astype(np.int64) * 256 + codes
        expected = np.bincount(cells, sizes, sums.size).reshape(sums.shape)
        expected[:, 0] = 0
        np.testing.assert_array_equal(sums, expected)


def test_every_pattern_has_the_label_of_its_row() -> None:
    rng = np.random.default_rng(0)
    for row_patterns in (1, 3, 4095, 4096, 9000):
        indices = rng.integers(0, 9, 50_000 // row_patterns + 1).astype(np.uint8)
        for begin, end in ((0, 50_000), (12_345, 45_678), (4096, 4096)):
            labels = labels_of_rows(indices, begin, end, row_patterns)
            np.testing.assert_array_equal(labels, indices[np.arange(begin, end) // row_patterns])


def test_values_beyond_all_levels_and_steps_of_zero_escape() -> None:
    values = np.array([0.0, 1.0, 128.0, -129.0, np.inf], np.float32)
    one_row = np.array([0], np.uint8), len(values)
    step, zero_step = np.array([1], np.float32), np.array([0], np.float32)
    with np.errstate(all="ignore"):
        for seed in (NEAREST, 5):
            codes = reference.residual_codes(values, None, step, *one_row, 0.0, seed, 0)
            assert codes.tolist() == [0, 1, ESCAPE, ESCAPE, ESCAPE]
        expected = reference.residual_codes(values, None, zero_step, *one_row, 0.0, 5, 0)
    assert (expected == ESCAPE).all()
    codes = np.empty(len(values), np.uint8)
    rounding().residual_codes(values, None, zero_step, *one_row, 0.0, 5, 0, codes)
    np.testing.assert_array_equal(codes, expected)


@pytest.mark.parametrize("seed", [0, 1, 0x9E3779B9, 2**32 - 1])
def test_thresholds_are_uniform_and_uncorrelated_between_elements_and_seeds(seed: int) -> None:
    n = 1 << 16
    thresholds = rounding().thresholds(seed, 0, n)
    assert thresholds.min() >= 0
    assert thresholds.max() < 1
    counts = np.histogram(thresholds, 64, (0, 1))[0]
    # Chi-square with 63 degrees of freedom exceeds 130 with a probability of 10^-6.
    assert np.square(counts - n / 64).sum() / (n / 64) < 130
    samples = [thresholds[1:], thresholds[2:], thresholds[256:]]
    samples += [rounding().thresholds((seed + 1) % 2**32, 0, n), rounding().thresholds(seed, 2**32, n)]
    for sample in samples:
        correlation = np.corrcoef(thresholds[: len(sample)], sample)[0, 1]
        assert abs(correlation) < 5 / np.sqrt(n)


# --- files ----------------------------------------------------------------------------------------


def state(seed: int = 0, shape: tuple[int, int] = (160, 256)) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal(shape) * 0.02
    norm, moment = rng.uniform(1, 2, 40_000), rng.standard_normal(40_000)
    return {n: v.astype(np.float32) for n, v in {WEIGHT: weight, NORM: norm, MOMENT: moment}.items()}


def write_step(
    folder: Path, name: str, tensors: dict[str, Array], config: Method, base: str | None = None, jobs: int = 1
) -> dict[str, Array]:
    """Compress tensors to `name`.ckptz, as a delta if `base` names another step; returns restored tensors."""
    source, target = folder / f"{name}.safetensors", folder / f"{name}.ckptz"
    save_plain(tensors, source)
    base_path = None if base is None else folder / f"{base}.ckptz"
    compress([source], target, config=config, base=base_path, jobs=jobs, force=True)
    return load_file(target)


def record_of(folder: Path, name: str, tensor_name: str = WEIGHT) -> LossyRecord:
    tensors = inspect(folder / f"{name}.ckptz").tensors
    [record] = [tensor.lossy for tensor in tensors if tensor.name == tensor_name]
    return record


def step_of(folder: Path, name: str) -> float:
    """Return the grid step of WEIGHT in a file, which is the same for all rows."""
    with contextlib.closing(open_checkpoint(folder / f"{name}.ckptz")) as checkpoint:
        quant_map = checkpoint.container.tensors[WEIGHT].header.plan.quant_map
        [step] = quant_map.table.scale
        return float(step)


def moved(tensors: dict[str, Array], spread: float, seed: int) -> dict[str, Array]:
    """Return tensors after random movements with standard deviation `spread` grid steps.

    A grid step is 0.008 for the weight and 2^-9 for the norm.
    """
    rng = np.random.default_rng(seed)
    later = dict(tensors)
    for name, step in ((WEIGHT, 0.008), (NORM, 2.0**-9)):
        later[name] = (tensors[name] + rng.standard_normal(tensors[name].shape) * spread * step).astype("f4")
    return later


def share_kept(exact: Array, restored: Array, start: Array) -> float:
    """Return the projection of the restored movement since `start` on the exact one; 1 if all is kept."""
    exact_movement, restored_movement = (values.astype(np.float64) - start for values in (exact, restored))
    return float((exact_movement * restored_movement).sum() / np.square(exact_movement).sum())


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (Grid(), WEIGHT),
        (Grid(step=1.5), WEIGHT),
        (Grid(purpose="resume", moments=None), WEIGHT),
        (KMeans(levels=16), WEIGHT),
        (KMeans(levels=8, protect=0.05, protect_as="bf16"), WEIGHT),
        (Grid(), NORM),
    ],
)
def test_a_delta_after_a_restore_keeps_the_movement(tmp_path: Path, config: Method, name: str) -> None:
    restored = start = write_step(tmp_path, "0", state(), config)
    for i in range(1, 4):  # each restart continues from the restored tensors of the last file
        later = moved(restored, 0.1, i)
        delta = write_step(tmp_path, str(i), later, config, str(i - 1))
        assert 0.9 < share_kept(later[name], delta[name], restored[name]) < 1.1
        error = np.abs(delta[name].astype(np.float64) - later[name]).max()
        assert error <= record_of(tmp_path, str(i), name).max_abs_error
        restored = delta
    assert not np.array_equal(restored[name], start[name])


@pytest.mark.parametrize(
    ("config", "spread", "min_share"),
    [
        *((Grid(), spread, 0.95) for spread in (0.2, 0.3, 0.45)),
        (KMeans(levels=16), 0.2, 0.95),
        (KMeans(levels=16), 0.3, 0.7),  # hard to distinguish from the rounding errors of k-means
    ],
)
def test_a_movement_of_up_to_half_a_step_is_kept(
    tmp_path: Path, config: Method, spread: float, min_share: float
) -> None:
    start = write_step(tmp_path, "0", state(), config)
    later = moved(start, spread, 1)
    delta = write_step(tmp_path, "1", later, config, "0")
    assert min_share < share_kept(later[WEIGHT], delta[WEIGHT], start[WEIGHT]) < 1.05


@pytest.mark.parametrize("movement", [0.1, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75])
def test_movements_of_equal_size_are_kept(tmp_path: Path, movement: float) -> None:
    """Such as those of Lion; rounding to nearest would lose all below half a step, and enlarge others."""
    start = write_step(tmp_path, "0", state(), Grid())
    signs = np.random.default_rng(1).choice([-1, 1], start[WEIGHT].shape)
    later = start | {WEIGHT: (start[WEIGHT] + movement * step_of(tmp_path, "0") * signs).astype(np.float32)}
    delta = write_step(tmp_path, "1", later, Grid(), "0")
    assert share_kept(later[WEIGHT], delta[WEIGHT], start[WEIGHT]) == pytest.approx(1, abs=0.05)


@settings(max_examples=40, deadline=None)
@given(st.floats(0.02, 0.4), st.integers(0, 2**32 - 2), st.integers(0, 100))
def test_the_dither_seed_changes_only_after_a_restore(
    spread: float, dither_seed: int, random_seed: int
) -> None:
    rng, n = np.random.default_rng(random_seed), 1 << 15
    last_movement, movement = spread * rng.standard_normal((2, n))
    thresholds = rounding().thresholds(dither_seed, 0, n)
    rounding_errors = last_movement - np.floor(last_movement + thresholds)
    rule, new_rule = RoundingRule(dither_seed), RoundingRule(dither_seed + 1)
    explained = rounding_errors + 0.3 * movement
    assert choose_rounding(explained, thresholds, rule, lambda: dither_seed + 1) == rule
    assert choose_rounding(movement, thresholds, rule, lambda: dither_seed + 1) == new_rule
    assert choose_rounding(movement, None, TO_NEAREST, lambda: dither_seed) == rule
    nearest_errors = rng.random(n) - 0.5
    assert choose_rounding(nearest_errors + movement, None, TO_NEAREST, lambda: dither_seed) == TO_NEAREST
    assert choose_rounding(np.zeros(n), None, TO_NEAREST, lambda: dither_seed) == TO_NEAREST


def test_deltas_after_a_restore_keep_the_movement_for_any_step(tmp_path: Path) -> None:
    """The first delta after a restore gets fine steps, because little moved; the next ones keep its steps."""
    config = Grid()
    restored = write_step(tmp_path, "0", state(), config)
    later = restored
    for i in range(1, 6):
        later = moved(later, 0.01, i)
        delta = write_step(tmp_path, str(i), later, config, str(i - 1))
        assert 0.9 < share_kept(later[WEIGHT], delta[WEIGHT], restored[WEIGHT]) < 1.1
        if i > 1:
            assert record_of(tmp_path, str(i)).settings == record_of(tmp_path, "1").settings
    faster = moved(later, 4.0, 6)  # 400 times as far, so that new steps are chosen
    delta = write_step(tmp_path, "6", faster, config, "5")
    assert 0.9 < share_kept(faster[WEIGHT], delta[WEIGHT], later[WEIGHT]) < 1.1


def test_deltas_to_pretrained_weights_keep_the_movement_of_each_restart(tmp_path: Path) -> None:
    """Each delta has a new dither seed: with the last one, restored values would be rounded to themselves."""
    config = Grid(full_step=0.175)
    restored = write_step(tmp_path, "pretrained", state(), LOSSLESS)
    for i in range(1, 9):
        later = moved(restored, 0.03, i)
        delta = write_step(tmp_path, str(i), later, config, "pretrained")
        assert 0.85 < share_kept(later[WEIGHT], delta[WEIGHT], restored[WEIGHT]) < 1.15
        restored = delta


def test_a_full_file_after_a_restore_keeps_the_movement(tmp_path: Path) -> None:
    """Its grid is that of the restored file, because the weights are nearly the same."""
    config = Grid(full_step=0.175)  # as in runs that restart
    restored = write_step(tmp_path, "0", state(), config)
    assert "drawn" not in record_of(tmp_path, "0").settings
    later = moved(restored, 0.02, 1)
    loaded = write_step(tmp_path, "1", later, config)
    assert 0.9 < share_kept(later[WEIGHT], loaded[WEIGHT], restored[WEIGHT]) < 1.1
    assert np.abs(loaded[WEIGHT] - later[WEIGHT]).max() <= record_of(tmp_path, "1").max_abs_error


@pytest.mark.parametrize("rows", [slice(0, 3000), slice(100, 70_000, 2500)])
@pytest.mark.parametrize("config", [Grid(), KMeans()])
def test_a_delta_keeps_the_movement_of_few_rows(tmp_path: Path, config: Method, rows: slice) -> None:
    """In an embedding, only rows of tokens that occurred move: here no or few rows of the middle chunk."""
    shape = (70_000, 32)
    assert shape[0] * shape[1] > 2 * CHUNK_VALUES
    restored = write_step(tmp_path, "0", state(shape=shape), config)
    later = {**restored, WEIGHT: restored[WEIGHT].copy()}
    later[WEIGHT][rows] = moved(restored, 0.1, 1)[WEIGHT][rows]
    delta = write_step(tmp_path, "1", later, config, "0")
    share = share_kept(later[WEIGHT][rows], delta[WEIGHT][rows], restored[WEIGHT][rows])
    assert share == pytest.approx(1, abs=0.05 if rows.step is None else 0.35)


def test_deltas_with_purpose_ship_round_small_movements_to_zero(tmp_path: Path) -> None:
    config = Grid(purpose="ship")
    restored = write_step(tmp_path, "0", state(), config)
    later = moved(restored, 0.1, 1)
    delta = write_step(tmp_path, "1", later, config, "0")
    assert share_kept(later[WEIGHT], delta[WEIGHT], restored[WEIGHT]) < 0.3
    assert "drawn" not in record_of(tmp_path, "1").settings


def test_purpose_auto_means_ship_for_weights_only_and_resume_for_deltas(tmp_path: Path) -> None:
    weights = {WEIGHT: state()[WEIGHT]}
    write_step(tmp_path, "auto", weights, Grid())
    write_step(tmp_path, "ship", weights, Grid(purpose="ship"))
    assert (tmp_path / "auto.ckptz").read_bytes() == (tmp_path / "ship.ckptz").read_bytes()
    full = write_step(tmp_path, "0", weights, Grid(purpose="resume"))
    later = {WEIGHT: moved(state() | full, 0.1, 1)[WEIGHT]}
    delta = write_step(tmp_path, "1", later, Grid(), "0")
    assert share_kept(later[WEIGHT], delta[WEIGHT], full[WEIGHT]) > 0.9


def test_deltas_keep_the_dither_seed_until_a_restore(tmp_path: Path) -> None:
    config = Grid()
    full = write_step(tmp_path, "0", state(), config)
    assert "drawn" not in record_of(tmp_path, "0").settings
    unrestored = moved(state(), 0.1, 9)
    delta = write_step(tmp_path, "x", unrestored, config, "0")
    assert "drawn" not in record_of(tmp_path, "x").settings
    step = step_of(tmp_path, "0")
    assert np.abs(delta[WEIGHT] - unrestored[WEIGHT]).max() <= step * 0.5001

    later, seeds = moved(full, 0.1, 1), []
    for i in range(1, 5):
        delta = write_step(tmp_path, str(i), later, config, str(i - 1))
        assert step_of(tmp_path, str(i)) == step
        assert np.abs(delta[WEIGHT] - later[WEIGHT]).max() <= step * 1.0001
        assert 0.9 < share_kept(later[WEIGHT], delta[WEIGHT], full[WEIGHT]) < 1.1
        seeds.append(record_of(tmp_path, str(i)).settings["drawn"])
        later = moved(later, 0.1, 1 + i)
    assert len(set(seeds)) == 1
    after_restore = moved(delta, 0.1, 6)
    write_step(tmp_path, "6", after_restore, config, "4")
    assert record_of(tmp_path, "6").settings["drawn"] != seeds[0]


def test_rounding_is_reproduced_from_the_recorded_seed(tmp_path: Path) -> None:
    full = write_step(tmp_path, "0", state(), Grid())
    later = moved(full, 0.15, 1)
    delta = write_step(tmp_path, "1", later, Grid(), "0")
    seed, step = record_of(tmp_path, "1").settings["drawn"], step_of(tmp_path, "1")
    scaled = (later[WEIGHT] - full[WEIGHT]).reshape(-1) / np.float32(step)
    expected = np.floor(scaled)
    expected += reference.thresholds(seed, 0, scaled.size) >= np.float32(1) - (scaled - expected)
    np.testing.assert_array_equal(np.rint((delta[WEIGHT] - full[WEIGHT]).reshape(-1) / step), expected)


@pytest.mark.parametrize("config", [Grid(), KMeans()])
def test_jobs_and_reruns_change_no_byte(tmp_path: Path, config: Method) -> None:
    shape = (CHUNK_VALUES // 256 + 3, 256)
    full = write_step(tmp_path, "0", state(shape=shape), config)
    later, files = moved(full, 0.1, 1), []
    for jobs in (1, 4, 4):
        delta = write_step(tmp_path, "1", later, config, "0", jobs)
        files.append((tmp_path / "1.ckptz").read_bytes())
    assert files[0] == files[1] == files[2]
    for rows in (slice(0, 64), slice(-64, None)):  # one in each chunk
        assert 0.8 < share_kept(later[WEIGHT][rows], delta[WEIGHT][rows], full[WEIGHT][rows]) < 1.2


@pytest.mark.parametrize(
    ("movement", "share"),
    [(0.2, 1), (0.07, 1), (0.03, 0.48), (0.015, 0.24), (0.001, 0.016), (0.0001, 1 / 64)],
)
def test_steps_of_deltas_are_finer_if_little_moves(tmp_path: Path, movement: float, share: float) -> None:
    """Steps are at most 16 mean movements, and at least 1/64 of the steps of the base."""
    config = Grid(purpose="resume")
    full = write_step(tmp_path, "0", state(), config)
    rng = np.random.default_rng(1)
    step = step_of(tmp_path, "0")
    later = full | {WEIGHT: (full[WEIGHT] + rng.choice([-1, 1], (160, 256)) * movement * step)}
    later[WEIGHT] = later[WEIGHT].astype(np.float32)
    write_step(tmp_path, "1", later, config, "0")
    assert step_of(tmp_path, "1") == pytest.approx(step * share, rel=0.01)


def test_steps_of_all_tensors_follow_their_mean_movement(tmp_path: Path) -> None:
    names, config = [f"model.{i}.weight" for i in range(3)], Grid(purpose="resume")
    full = write_step(tmp_path, "0", {name: state(i)[WEIGHT] for i, name in enumerate(names)}, config)
    signs = np.random.default_rng(1).choice(np.float32([-1, 1]), (160, 256))
    later = {}
    for name, movement in zip(names, (0.0, 0.01, 0.02), strict=True):  # in grid steps
        step = 0.4 * full[name].std()
        later[name] = (full[name] + signs * np.float32(movement * step)).astype(np.float32)
    write_step(tmp_path, "1", later, config, "0")
    steps = [record_of(tmp_path, "1", name).settings["step"] for name in names[1:]]
    assert steps[0] == steps[1] == pytest.approx(0.16, rel=0.1)


def test_more_restarts_than_usual_have_finer_steps() -> None:
    config = Grid(step=0.5)
    usual, many = config.for_restarts(10), config.for_restarts(40)
    assert (usual.step, usual.full_step) == (0.25, 0.25 * FULL_SHARE)
    assert usual.moments.second_step == config.moments.second_step / 2
    assert usual.moments.first_step == config.moments.first_step / 2
    assert (many.step, many.full_step) == (usual.step / 4, usual.full_step / 4)
    assert many.moments.second_step == usual.moments.second_step / 4
    assert many.moments.first_step == usual.moments.first_step / 4
    assert replace(config, full_step=1.0).for_restarts(40).full_step == 1.0
    unguided = config.for_restarts(10, is_guided=False)
    assert (unguided.step, unguided.full_step) == (0.125, 0.125 * FULL_SHARE)
    assert unguided.moments == usual.moments


@pytest.mark.parametrize("step", [1.0, 4.0])
def test_second_moments_keep_the_mean_size_of_updates(tmp_path: Path, step: float) -> None:
    rng, name = np.random.default_rng(0), "optimizer.up.weight.exp_avg_sq"
    exact = np.exp2(rng.uniform(-30, -28, (300, 300))).astype(np.float32)
    restored = write_step(tmp_path, "0", {name: exact}, Grid().scaled(step / 4))[name]
    assert np.abs(np.log2(restored) - np.log2(exact)).max() <= step * 1.001
    assert np.abs(np.log2(restored) - np.log2(exact)).max() > step / 4
    assert np.sqrt(exact / restored).mean() == pytest.approx(1, rel=0.01)


# --- the Checkpointer -----------------------------------------------------------------------------


def train_layer(learning_rate: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Train a linear layer [128, 128] for five steps of AdamW."""
    torch.manual_seed(0)
    model = torch.nn.Linear(128, 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(16, 128)).square().mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("config", [Grid(), KMeans(protect=0.0)])
def test_a_chain_of_three_restarts_keeps_the_movement(tmp_path: Path, config: Method) -> None:
    model, optimizer = train_layer(1e-6)
    generator, shares = torch.Generator().manual_seed(1), []
    start = model.weight.detach().numpy().astype(np.float64)
    for step in range(1, 5):  # each with a new Checkpointer, as after a restart
        with Checkpointer(tmp_path, model, optimizer, config=config, keep=LOSSY, background=False) as saver:
            saver.save(step)
            exact = model.weight.detach().numpy().astype(np.float64)
            saver.restore(step)
            restored = model.weight.detach().numpy().astype(np.float64)
        if step > 1:
            shares.append(share_kept(exact, restored, start))
        start = restored
        with torch.no_grad():  # a tenth of a grid step
            model.weight += torch.randn(128, 128, generator=generator) * model.weight.std() * 0.04
    assert len(shares) == 3
    assert all(0.9 < share < 1.1 for share in shares), shares


def steps_recorded(folder: Path) -> list[Any]:
    """Return the grid step of the weight in each file, in the order of training steps."""
    return [
        record_of(folder, path.stem, "model.weight").settings["step"]
        for path in sorted(folder.glob("step-????????.ckptz"))
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1.0, 1.0]),  # the newest step is exact, so restarts lose nothing
        ({"keep": LOSSY}, [FULL_SHARE / 2, 0.5]),
        ({"keep": LOSSY, "restores": 20}, [FULL_SHARE / 4, 0.25]),
        ({"keep": LOSSY, "restores": 0}, [1.0, 1.0]),
        ({"restores": 5}, [FULL_SHARE / 2, 0.5]),
    ],
)
def test_steps_follow_the_expected_number_of_restarts(
    tmp_path: Path, options: dict[str, Any], expected: list[float]
) -> None:
    model, optimizer = train_layer(1e-4)
    with Checkpointer(tmp_path, model, optimizer, config=Grid(), background=False, **options) as saver:
        for step in (1, 2):
            saver.save(step)
    assert steps_recorded(tmp_path) == expected


def test_more_restarts_than_expected_make_steps_finer(tmp_path: Path) -> None:
    (model, optimizer), every = train_layer(1e-4), KeepPolicy(last=None, exact=0)
    for step in range(1, 15):
        saver = Checkpointer(tmp_path, model, optimizer, config=Grid(), keep=every, restores=10)
        with saver:  # a new Checkpointer each time, as after a restart
            saver.restore_latest()
            saver.save(step)
    assert steps_recorded(tmp_path) == [FULL_SHARE / 2] + [0.5] * 10 + [0.25] * 3


@pytest.mark.parametrize("is_restored", [False, True])
def test_steps_against_pretrained_weights_follow_the_movement_between_saves(
    tmp_path: Path, is_restored: bool
) -> None:
    """The movement since the pretrained weights grows, but the one between saves is constant."""
    model, optimizer = train_layer(1e-6)
    pretrained, folder = tmp_path / "pretrained.safetensors", tmp_path / "run"
    save_plain({name: value.detach().numpy() for name, value in model.state_dict().items()}, pretrained)
    options: dict[str, Any] = {"config": Grid(), "keep": LOSSY, "base": pretrained, "full_every": 1}
    direction = torch.randn(128, 128, generator=torch.Generator().manual_seed(1)) * model.weight.std()
    steps = []
    with Checkpointer(folder, model, optimizer, background=False, **options) as saver:
        for step in range(1, 9):
            with torch.no_grad():
                model.weight += direction * 1e-3
            saver.save(step)
            steps.append(record_of(folder, f"step-{step:08d}", "weight").settings["step"])
            if is_restored:
                saver.restore(step)
    assert steps == pytest.approx([steps[0]] * 8, rel=0.25)


@pytest.mark.parametrize("is_restored", [False, True])
def test_steps_of_later_full_files_follow_the_movement(tmp_path: Path, is_restored: bool) -> None:
    """Down to half of the first one's; its step would undo that deltas follow the movement."""
    model, optimizer = train_layer(1e-6)
    generator, steps = torch.Generator().manual_seed(1), []
    with Checkpointer(
        tmp_path, model, optimizer, config=Grid(), keep=LOSSY, background=False, full_every=3
    ) as saver:
        for step in range(1, 8):
            saver.save(step)
            steps.append(record_of(tmp_path, f"step-{step:08d}", "model.weight").settings["step"])
            if is_restored or step == 1:
                saver.restore(step)
            with torch.no_grad():
                model.weight += torch.randn(128, 128, generator=generator) * model.weight.std() * 1e-3
    assert steps[0] == FULL_SHARE / 2
    assert [steps[3], steps[6]] == pytest.approx([FULL_SHARE / 4] * 2)
    assert max(steps[1:]) < 0.1


@pytest.mark.parametrize("n_between", [1, 3])
@pytest.mark.parametrize("config", [Grid(), Grid(step=4), KMeans(), KMeans(levels=8, protect=0, prune=0.3)])
def test_full_files_preserve_the_movement_since_a_restore(
    tmp_path: Path, config: Method, n_between: int
) -> None:
    """Also of weights of one dimension, and whether or not the newest file was restored."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 4096)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    generator, shares = torch.Generator().manual_seed(1), []
    options: dict[str, Any] = {"config": config, "keep": LOSSY, "background": False, "full_every": 1}
    start = None
    for step in range(1, 4 * n_between + 2):
        with Checkpointer(tmp_path, model, optimizer, **options) as saver:
            saver.save(step)
        saved = load_file(tmp_path / f"step-{step:08d}.ckptz")
        if start is not None:
            shares += [
                share_kept(value.detach().numpy(), saved[name], start[name])
                for name, value in model.named_parameters()
            ]
        if step % n_between == 0:
            with Checkpointer(tmp_path, model, optimizer, **options) as saver:
                saver.restore(step)
            start = saved
        with torch.no_grad():
            for value in model.parameters():
                value += torch.randn(value.shape, generator=generator) * value.std() * 0.02
    assert len(shares) > 4
    assert np.mean(shares) == pytest.approx(1, abs=0.08)
    assert shares == pytest.approx([1] * len(shares), abs=0.35)


def test_full_files_without_optimizer_state_keep_the_movement(tmp_path: Path) -> None:
    """As of SGD without momentum: a run that restarts never writes files for evaluation only."""
    torch.manual_seed(0)
    model, shares = torch.nn.Linear(128, 128, bias=False), []
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 5):
        start = model.weight.detach().numpy().copy()
        with torch.no_grad():
            model.weight += torch.randn(128, 128, generator=generator) * model.weight.std() * 0.02
        exact = model.weight.detach().numpy().copy()
        with Checkpointer(tmp_path, model, config=Grid(), keep=LOSSY, full_every=1) as saver:
            saver.save(step)
            saver.restore(step)
        shares.append(share_kept(exact, model.weight.detach().numpy(), start))
    assert shares[1:] == pytest.approx([1] * 3, abs=0.15)


@pytest.mark.parametrize("damage", ["truncated", "a flipped bit", "deleted"])
def test_a_damaged_newest_file_does_not_prevent_a_save(tmp_path: Path, damage: str) -> None:
    model, optimizer = train_layer(1e-4)
    options: dict[str, Any] = {"config": Grid(), "keep": LOSSY, "background": False, "full_every": 2}
    with Checkpointer(tmp_path, model, optimizer, **options) as saver:
        for step in (1, 2):
            saver.save(step)
    newest = tmp_path / "step-00000002.ckptz"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content if damage == "a flipped bit" else content[: len(content) // 2])
    if damage == "deleted":
        newest.unlink()
    with Checkpointer(tmp_path, model, optimizer, **options) as saver:  # a new process
        saver.save(3)
        notes = saver.wait().notes
    path = tmp_path / "step-00000003.ckptz"
    assert any("cannot be read" in note for note in notes) == (damage != "deleted")
    assert inspect(path).depth == int(damage == "deleted")  # a delta to step 1
    error = np.abs(load_file(path)["weight"] - model.weight.detach().numpy()).max()
    assert error <= record_of(tmp_path, path.stem, "model.weight").max_abs_error


def test_movements_of_many_steps_are_rounded_to_nearest() -> None:
    """Stochastic rounding would double the variance of the error, and nothing is lost."""
    movements = 40 * np.random.default_rng(0).standard_normal(1 << 14)
    assert choose_rounding(movements, None, TO_NEAREST, lambda: 1) == TO_NEAREST


@pytest.mark.parametrize("movement", [1e-4, 3e-4, 6e-4])
@pytest.mark.parametrize("base", ["0", None])
def test_gains_near_one_keep_the_movement(tmp_path: Path, movement: float, base: str | None) -> None:
    """Their step follows from 10 bits, 2^-9, which is above the one of the statistics of gains so close."""
    rng = np.random.default_rng(0)
    tensors = state()
    for name in (WEIGHT, NORM):
        second = name.replace("model", "optimizer") + ".exp_avg_sq"
        tensors[second] = np.full(tensors[name].shape, 1e-8, np.float32)
    tensors[NORM] = (1 + 1e-3 * rng.standard_normal(40_000)).astype(np.float32)
    restored = write_step(tmp_path, "0", tensors, Grid())[NORM]
    later = tensors | {NORM: (restored + movement * rng.standard_normal(40_000)).astype(np.float32)}
    loaded = write_step(tmp_path, "1", later, Grid(), base)[NORM]
    assert share_kept(later[NORM], loaded, restored) == pytest.approx(1, abs=0.1)


def test_a_restart_between_uneven_levels_draws_a_new_dither_seed(tmp_path: Path) -> None:
    """Weights that were 4-bit codes have levels in pairs, whose elements were rounded over one wide gap."""
    rng = np.random.default_rng(0)
    weight = (rng.integers(-4, 5, (192, 256)) * 0.0143 + rng.standard_normal((192, 256)) * 3e-4).astype("f4")
    restored = write_step(tmp_path, "0", {WEIGHT: weight}, KMeans())[WEIGHT]
    seeds = []
    for i in range(1, 6):
        later = (restored + rng.standard_normal(weight.shape) * 3e-4).astype(np.float32)
        restored = write_step(tmp_path, str(i), {WEIGHT: later}, KMeans(), str(i - 1))[WEIGHT]
        seeds.append(record_of(tmp_path, str(i)).settings["drawn"])
    assert len(set(seeds)) == 5


def test_frozen_weights_of_k_means_do_not_change(tmp_path: Path) -> None:
    """Levels that are fitted again to the values of 16 levels differ from these."""
    restored = write_step(tmp_path, "0", state(), KMeans())[WEIGHT]
    for i in (1, 2, 3):
        frozen = state() | {WEIGHT: restored}
        np.testing.assert_array_equal(
            write_step(tmp_path, str(i), frozen, KMeans(), str(i - 1))[WEIGHT], restored
        )
