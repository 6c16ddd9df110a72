"""The movement of training since a restore stays in the next file, however small it is beside the grid."""

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
def test_kernels_round_as_their_definition_says(data: st.DataObject) -> None:
    key = data.draw(st.one_of(st.just(NEAREST), st.integers(0, 2**32 - 1)))
    begin = data.draw(st.sampled_from([0, 1, 77, 2**32 - 5, 2**32, 2**40 + 3]))
    n, n_rows = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 5))
    row_patterns = -(-(begin + n) // n_rows)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    steps = np.exp2(rng.uniform(-9, 3, 3)).astype(np.float32)
    labels = rng.integers(0, 3, n_rows).astype(np.uint8)
    values = (rng.standard_normal(n) * data.draw(st.sampled_from([0.01, 1.0, 400.0]))).astype(np.float32)
    on_grid = rng.random(n) < 0.3  # ties and exact multiples too
    row_steps = steps[labels[np.arange(begin, begin + n) // row_patterns]]
    values[on_grid] = (np.rint(values / row_steps * 2) / 2 * row_steps)[on_grid]
    base = rng.standard_normal(n).astype(np.float32) if data.draw(st.booleans()) else None
    dead_zone = data.draw(st.sampled_from([0.0, 0.1, 4.0]))

    grid = (steps, labels, row_patterns)
    expected = reference.residual_codes(values, base, *grid, dead_zone, key, begin)
    got = np.empty(n, np.uint8)
    rounding().residual_codes(values, base, *grid, dead_zone, key, begin, got)
    np.testing.assert_array_equal(got, expected)
    drawn = reference.thresholds(key, begin, n)
    np.testing.assert_array_equal(rounding().thresholds(key, begin, n), drawn)
    at = n // 2
    np.testing.assert_array_equal(rounding().thresholds(key, begin + at, n - at), drawn[at:])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 700) | st.sampled_from([1 << 14, (1 << 14) - 13]), st.integers(1, 99), st.data())
def test_kernels_measure_as_numpy_does(n: int, row_patterns: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(n)
    values, base, given_squares = rng.standard_normal((3, n)).astype(np.float32)
    wide, wide_base = values.astype(np.float64), base.astype(np.float64)
    # Steps, and so the bytes of files, follow from these sums to the last bit.
    assert rounding().power(values) == (wide**2).sum()
    assert rounding().power(values, base) == ((wide - wide_base) ** 2).sum()
    assert rounding().largest(values.view(np.uint32)) == np.abs(values).max().view(np.uint32)

    begin = data.draw(st.integers(0, 200))
    rows = np.arange(begin, begin + n) // row_patterns
    is_root = data.draw(st.booleans())
    squares = given_squares if is_root else np.abs(given_squares)
    wide_squares = squares.astype(np.float64) ** (2 if is_root else 1)
    row_sums = np.zeros(rows[-1] + 1)
    energy, is_measured = rounding().sensitivities(values, squares, is_root, begin, row_patterns, row_sums)
    np.testing.assert_allclose(row_sums, np.bincount(rows, wide_squares), rtol=1e-12)
    assert (energy, is_measured) == (pytest.approx(wide_squares @ wide**2), True)
    odd = squares.copy()
    odd[-1] = data.draw(st.sampled_from([np.inf, np.nan, *([] if is_root else [-1e-20])]))
    assert not rounding().sensitivities(values, odd, is_root, begin, row_patterns, row_sums)[1]
    odd[-1] = -0.0
    assert rounding().sensitivities(values, odd, is_root, begin, row_patterns, row_sums)[1]

    labels, codes = rng.integers(0, 3, len(row_sums)).astype(np.uint8), rng.integers(0, 4, n).astype(np.uint8)
    for given_base, sizes in ((None, np.abs(wide)), (base, np.abs(wide - wide_base))):
        sums = np.zeros((3, 256))
        rounding().residual_sums(values, given_base, labels, row_patterns, begin, codes, sums)
        cells = labels[rows].astype(np.int64) * 256 + codes
        expected = np.bincount(cells, sizes, sums.size).reshape(sums.shape)
        expected[:, 0] = 0
        np.testing.assert_array_equal(sums, expected)


def test_labels_of_rows_are_those_of_each_pattern() -> None:
    rng = np.random.default_rng(0)
    for row_patterns in (1, 3, 4095, 4096, 9000):
        indices = rng.integers(0, 9, 50_000 // row_patterns + 1).astype(np.uint8)
        for begin, end in ((0, 50_000), (12_345, 45_678), (4096, 4096)):
            labels = labels_of_rows(indices, begin, end, row_patterns)
            np.testing.assert_array_equal(labels, indices[np.arange(begin, end) // row_patterns])


def test_what_has_no_level_escapes() -> None:
    values = np.array([0.0, 1.0, 128.0, -129.0, np.inf], np.float32)
    grid = (np.array([1, 0], np.float32), np.array([0], np.uint8), len(values))
    with np.errstate(all="ignore"):
        for key in (NEAREST, 5):
            codes = reference.residual_codes(values, None, *grid, 0.0, key, 0)
            assert codes.tolist() == [0, 1, ESCAPE, ESCAPE, ESCAPE]
        none = reference.residual_codes(values, None, grid[0][1:], *grid[1:], 0.0, 5, 0)
    assert (none == ESCAPE).all()
    got = np.empty(len(values), np.uint8)
    rounding().residual_codes(values, None, grid[0][1:], *grid[1:], 0.0, 5, 0, got)
    np.testing.assert_array_equal(got, none)


@pytest.mark.parametrize("key", [0, 1, 0x9E3779B9, 2**32 - 1])
def test_thresholds_are_uniform_and_neighbours_have_nothing_in_common(key: int) -> None:
    n = 1 << 16
    drawn = rounding().thresholds(key, 0, n)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = np.histogram(drawn, 64, (0, 1))[0]
    assert np.square(counts - n / 64).sum() / (n / 64) < 130  # chi-square of 63 degrees; 1 in 10^6
    others = [drawn[1:], drawn[2:], drawn[256:]]
    others += [rounding().thresholds((key + 1) % 2**32, 0, n), rounding().thresholds(key, 2**32, n)]
    for other in others:
        together = np.corrcoef(drawn[: len(other)], other)[0, 1]
        assert abs(together) < 5 / np.sqrt(n)


# --- files ----------------------------------------------------------------------------------------


def state(seed: int = 0, shape: tuple[int, int] = (160, 256)) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal(shape) * 0.02
    norm, moment = rng.uniform(1, 2, 40_000), rng.standard_normal(40_000)
    return {n: v.astype(np.float32) for n, v in {WEIGHT: weight, NORM: norm, MOMENT: moment}.items()}


def written(
    folder: Path, name: str, tensors: dict[str, Array], config: Method, base: str | None = None, jobs: int = 1
) -> dict[str, Array]:
    """Write the file of a step, and return the tensors that it restores."""
    source, target = folder / f"{name}.safetensors", folder / f"{name}.ckptz"
    save_plain(tensors, source)
    against = None if base is None else folder / f"{base}.ckptz"
    compress([source], target, config=config, base=against, jobs=jobs, force=True)
    return load_file(target)


def record_of(folder: Path, name: str, tensor: str = WEIGHT) -> LossyRecord:
    [record] = [each.lossy for each in inspect(folder / f"{name}.ckptz").tensors if each.name == tensor]
    return record


def step_of(folder: Path, name: str) -> float:
    """The step of a weight's grid, which is the same for all rows."""
    with contextlib.closing(open_checkpoint(folder / f"{name}.ckptz")) as checkpoint:
        quant_map = checkpoint.container.tensors[WEIGHT].header.plan.quant_map
        [step] = quant_map.table.scale
        return float(step)


def moved(tensors: dict[str, Array], spread: float, seed: int) -> dict[str, Array]:
    """Weights a little further; `spread` times 0.008, which is the step of the grid, or 2^-9 for the norm."""
    rng = np.random.default_rng(seed)
    found = dict(tensors)
    for name, step in ((WEIGHT, 0.008), (NORM, 2.0**-9)):
        found[name] = (tensors[name] + rng.standard_normal(tensors[name].shape) * spread * step).astype("f4")
    return found


def share_kept(exact: Array, restored: Array, start: Array) -> float:
    """Return the share of a movement that is restored: the projection on it."""
    want, got = (x.astype(np.float64) - start for x in (exact, restored))
    return float((want * got).sum() / (want * want).sum())


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
    restored = start = written(tmp_path, "0", state(), config)
    for i in range(1, 4):  # each restart begins with what the last file restores
        later = moved(restored, 0.1, i)
        found = written(tmp_path, str(i), later, config, str(i - 1))
        assert 0.9 < share_kept(later[name], found[name], restored[name]) < 1.1
        error = np.abs(found[name].astype(np.float64) - later[name]).max()
        assert error <= record_of(tmp_path, str(i), name).max_abs_error
        restored = found
    assert not np.array_equal(restored[name], start[name])


@pytest.mark.parametrize(
    ("config", "spread", "least"),
    [
        *((Grid(), spread, 0.95) for spread in (0.2, 0.3, 0.45)),
        (KMeans(levels=16), 0.2, 0.95),
        (KMeans(levels=16), 0.3, 0.7),  # such a movement looks like what levels of k-means always leave
    ],
)
def test_a_movement_of_a_good_part_of_a_step_is_kept_too(
    tmp_path: Path, config: Method, spread: float, least: float
) -> None:
    start = written(tmp_path, "0", state(), config)
    later = moved(start, spread, 1)
    found = written(tmp_path, "1", later, config, "0")
    assert least < share_kept(later[WEIGHT], found[WEIGHT], start[WEIGHT]) < 1.05


@settings(max_examples=40, deadline=None)
@given(st.floats(0.02, 0.4), st.integers(0, 2**32 - 2), st.integers(0, 100))
def test_the_seed_changes_after_a_restore_and_only_then(spread: float, key: int, seed: int) -> None:
    rng, n = np.random.default_rng(seed), 1 << 15
    movement, more = spread * rng.standard_normal((2, n))
    drawn = rounding().thresholds(key, 0, n)
    left = movement - np.floor(movement + drawn)
    rule = RoundingRule(key)
    assert choose_rounding(left + 0.3 * more, drawn, rule, key + 1) == rule
    assert choose_rounding(more, drawn, rule, key + 1) == RoundingRule(key + 1)
    half = np.full(n, 0.5, np.float32)
    assert choose_rounding(more, half, TO_NEAREST, key) == rule
    spread_out = rng.random(n) - 0.5
    assert choose_rounding(spread_out + more, half, TO_NEAREST, key) == TO_NEAREST
    assert choose_rounding(np.zeros(n), half, TO_NEAREST, key) == TO_NEAREST


def test_deltas_after_a_restore_keep_the_movement_whatever_their_steps(tmp_path: Path) -> None:
    """The first delta after a restore chooses fine steps, as little moved; others keep steps and seed."""
    config = Grid()
    restored = written(tmp_path, "0", state(), config)
    later = restored
    for i in range(1, 6):
        later = moved(later, 0.01, i)
        found = written(tmp_path, str(i), later, config, str(i - 1))
        assert 0.9 < share_kept(later[WEIGHT], found[WEIGHT], restored[WEIGHT]) < 1.1
        if i > 1:
            assert record_of(tmp_path, str(i)).settings == record_of(tmp_path, "1").settings
    faster = moved(later, 4.0, 6)  # the steps of the base are far too fine
    found = written(tmp_path, "6", faster, config, "5")
    assert 0.9 < share_kept(faster[WEIGHT], found[WEIGHT], later[WEIGHT]) < 1.1


def test_files_against_pretrained_weights_keep_the_movement_of_each_restart(tmp_path: Path) -> None:
    """The same thresholds in each of them would round values that they have rounded before."""
    config = Grid(full_step=0.175)
    restored = written(tmp_path, "pretrained", state(), LOSSLESS)
    for i in range(1, 9):
        later = moved(restored, 0.03, i)
        loaded = written(tmp_path, str(i), later, config, "pretrained")
        assert 0.85 < share_kept(later[WEIGHT], loaded[WEIGHT], restored[WEIGHT]) < 1.15
        restored = loaded


def test_a_full_file_after_a_restore_keeps_the_movement(tmp_path: Path) -> None:
    """On the grid of the file that was restored, which the same weights have again."""
    config = Grid(full_step=0.175)  # as in runs that restart
    restored = written(tmp_path, "0", state(), config)
    assert "drawn" not in record_of(tmp_path, "0").settings
    later = moved(restored, 0.02, 1)
    found = written(tmp_path, "1", later, config)
    assert 0.9 < share_kept(later[WEIGHT], found[WEIGHT], restored[WEIGHT]) < 1.1
    assert np.abs(found[WEIGHT] - later[WEIGHT]).max() <= record_of(tmp_path, "1").max_abs_error


@pytest.mark.parametrize("rows", [slice(0, 3000), slice(100, 70_000, 2500)])
@pytest.mark.parametrize("config", [Grid(), KMeans()])
def test_a_delta_keeps_the_movement_of_few_rows(tmp_path: Path, config: Method, rows: slice) -> None:
    """Such as the rows of an embedding whose tokens have occurred; none or few are in the middle chunk."""
    shape = (70_000, 32)
    assert shape[0] * shape[1] > 2 * CHUNK_VALUES
    restored = written(tmp_path, "0", state(shape=shape), config)
    later = {**restored, WEIGHT: restored[WEIGHT].copy()}
    later[WEIGHT][rows] = moved(restored, 0.1, 1)[WEIGHT][rows]
    loaded = written(tmp_path, "1", later, config, "0")
    kept = share_kept(later[WEIGHT][rows], loaded[WEIGHT][rows], restored[WEIGHT][rows])
    assert kept == pytest.approx(1, abs=0.05 if rows.step is None else 0.35)


def test_a_file_to_be_shipped_keeps_little_of_a_small_movement(tmp_path: Path) -> None:
    config = Grid(purpose="ship")
    restored = written(tmp_path, "0", state(), config)
    later = moved(restored, 0.1, 1)
    found = written(tmp_path, "1", later, config, "0")
    assert share_kept(later[WEIGHT], found[WEIGHT], restored[WEIGHT]) < 0.3
    assert "drawn" not in record_of(tmp_path, "1").settings


def test_weights_alone_are_shipped_and_their_deltas_are_not(tmp_path: Path) -> None:
    weights = {WEIGHT: state()[WEIGHT]}
    written(tmp_path, "auto", weights, Grid())
    written(tmp_path, "ship", weights, Grid(purpose="ship"))
    assert (tmp_path / "auto.ckptz").read_bytes() == (tmp_path / "ship.ckptz").read_bytes()
    full = written(tmp_path, "0", weights, Grid(purpose="resume"))
    later = {WEIGHT: moved(state() | full, 0.1, 1)[WEIGHT]}
    found = written(tmp_path, "1", later, Grid(), "0")
    assert share_kept(later[WEIGHT], found[WEIGHT], full[WEIGHT]) > 0.9


def test_thresholds_go_on_where_nothing_was_restored(tmp_path: Path) -> None:
    config = Grid()
    full = written(tmp_path, "0", state(), config)
    assert "drawn" not in record_of(tmp_path, "0").settings
    unrestored = moved(state(), 0.1, 9)
    found = written(tmp_path, "x", unrestored, config, "0")
    assert "drawn" not in record_of(tmp_path, "x").settings
    step = step_of(tmp_path, "0")
    assert np.abs(found[WEIGHT] - unrestored[WEIGHT]).max() <= step * 0.5001

    later, keys = moved(full, 0.1, 1), []
    for i in range(1, 5):
        found = written(tmp_path, str(i), later, config, str(i - 1))
        assert step_of(tmp_path, str(i)) == step
        assert np.abs(found[WEIGHT] - later[WEIGHT]).max() <= step * 1.0001
        assert 0.9 < share_kept(later[WEIGHT], found[WEIGHT], full[WEIGHT]) < 1.1
        keys.append(record_of(tmp_path, str(i)).settings["drawn"])
        later = moved(later, 0.1, 1 + i)
    assert len(set(keys)) == 1
    written(tmp_path, "6", moved(found, 0.1, 6), config, "4")  # now a restore
    assert record_of(tmp_path, "6").settings["drawn"] != keys[0]


def test_the_recorded_seed_gives_the_thresholds(tmp_path: Path) -> None:
    full = written(tmp_path, "0", state(), Grid())
    later = moved(full, 0.15, 1)
    found = written(tmp_path, "1", later, Grid(), "0")
    key, step = record_of(tmp_path, "1").settings["drawn"], step_of(tmp_path, "1")
    scaled = (later[WEIGHT] - full[WEIGHT]).reshape(-1) / np.float32(step)
    whole = np.floor(scaled)
    whole += reference.thresholds(key, 0, scaled.size) >= np.float32(1) - (scaled - whole)
    np.testing.assert_array_equal(np.rint((found[WEIGHT] - full[WEIGHT]).reshape(-1) / step), whole)


@pytest.mark.parametrize("config", [Grid(), KMeans()])
def test_jobs_and_reruns_change_no_byte(tmp_path: Path, config: Method) -> None:
    shape = (CHUNK_VALUES // 256 + 3, 256)
    full = written(tmp_path, "0", state(shape=shape), config)
    later, files = moved(full, 0.1, 1), []
    for jobs in (1, 4, 4):
        found = written(tmp_path, "1", later, config, "0", jobs)
        files.append((tmp_path / "1.ckptz").read_bytes())
    assert files[0] == files[1] == files[2]
    for rows in (slice(0, 64), slice(-64, None)):  # of both chunks
        assert 0.8 < share_kept(later[WEIGHT][rows], found[WEIGHT][rows], full[WEIGHT][rows]) < 1.2


@pytest.mark.parametrize(
    ("movement", "share"),
    [(0.2, 1), (0.07, 1), (0.03, 0.48), (0.015, 0.24), (0.001, 0.016), (0.0001, 1 / 64)],
)
def test_steps_are_finer_where_little_moves(tmp_path: Path, movement: float, share: float) -> None:
    config = Grid(purpose="resume")
    full = written(tmp_path, "0", state(), config)
    rng = np.random.default_rng(1)
    step = step_of(tmp_path, "0")
    later = full | {WEIGHT: (full[WEIGHT] + rng.choice([-1, 1], (160, 256)) * movement * step)}
    later[WEIGHT] = later[WEIGHT].astype(np.float32)
    written(tmp_path, "1", later, config, "0")
    assert step_of(tmp_path, "1") == pytest.approx(step * share, rel=0.01)


def test_steps_of_all_tensors_are_finer_together(tmp_path: Path) -> None:
    names, config = [f"model.{i}.weight" for i in range(3)], Grid(purpose="resume")
    full = written(tmp_path, "0", {n: state(i)[WEIGHT] for i, n in enumerate(names)}, config)
    steps = 0.4 * np.array([full[name].std() for name in names])
    movement = (0.0, 0.01, 0.02)  # in steps, of which one tensor is left alone
    signs = np.random.default_rng(1).choice(np.float32([-1, 1]), (160, 256))
    moves = zip(names, movement, steps, strict=True)
    later = {n: (full[n] + signs * np.float32(m * step)).astype(np.float32) for n, m, step in moves}
    written(tmp_path, "1", later, config, "0")
    shares = [record_of(tmp_path, "1", name).settings["step"] for name in names[1:]]
    assert shares[0] == shares[1] == pytest.approx(0.16, rel=0.1)


def test_more_restores_than_usual_want_finer_steps() -> None:
    given = Grid(step=0.5)
    usual, many = given.for_restarts(10), given.for_restarts(40)
    assert (usual.step, usual.full_step) == (0.25, 0.25 * FULL_SHARE)
    assert usual.moments.second_step == given.moments.second_step / 2
    assert usual.moments.first_step == given.moments.first_step / 2
    assert (many.step, many.full_step) == (usual.step / 4, usual.full_step / 4)
    assert many.moments.second_step == usual.moments.second_step / 4
    assert many.moments.first_step == usual.moments.first_step / 4
    assert replace(given, full_step=1.0).for_restarts(40).full_step == 1.0
    unguided = given.for_restarts(10, is_guided=False)
    assert (unguided.step, unguided.full_step) == (0.125, 0.125 * FULL_SHARE)
    assert unguided.moments == usual.moments


@pytest.mark.parametrize("step", [1.0, 4.0])
def test_second_moments_keep_the_mean_size_of_updates(tmp_path: Path, step: float) -> None:
    rng, name = np.random.default_rng(0), "optimizer.up.weight.exp_avg_sq"
    exact = np.exp2(rng.uniform(-30, -28, (300, 300))).astype(np.float32)
    restored = written(tmp_path, "0", {name: exact}, Grid().scaled(step / 4))[name]
    assert np.abs(np.log2(restored) - np.log2(exact)).max() <= step * 1.001
    assert np.abs(np.log2(restored) - np.log2(exact)).max() > step / 4
    assert np.sqrt(exact / restored).mean() == pytest.approx(1, rel=0.01)


# --- the Checkpointer -----------------------------------------------------------------------------


def trained(rate: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(128, 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(16, 128)).square().mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("config", [Grid(), KMeans(protect=0.0)])
def test_a_chain_of_three_restarts_keeps_the_movement(tmp_path: Path, config: Method) -> None:
    model, optimizer = trained(1e-6)
    generator, kept = torch.Generator().manual_seed(1), []
    start = model.weight.detach().numpy().astype(np.float64)
    for step in range(1, 5):  # a new process each time
        with Checkpointer(tmp_path, model, optimizer, config=config, keep=LOSSY, background=False) as saver:
            saver.save(step)
            began = model.weight.detach().numpy().astype(np.float64)
            saver.restore(step)
            restored = model.weight.detach().numpy().astype(np.float64)
        if step > 1:
            kept.append(share_kept(began, restored, start))
        start = restored
        with torch.no_grad():  # a tenth of a step of the grid
            model.weight += torch.randn(128, 128, generator=generator) * model.weight.std() * 0.04
    assert len(kept) == 3
    assert all(0.9 < share < 1.1 for share in kept), kept


def steps_recorded(folder: Path) -> list[Any]:
    """The step of the grid in each file of weights, by step."""
    return [
        record_of(folder, path.stem, "model.weight").settings["step"]
        for path in sorted(folder.glob("step-????????.ckptz"))
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1.0, 1.0]),  # the newest step is exact: nothing restarts from what is lost
        ({"keep": LOSSY}, [FULL_SHARE / 2, 0.5]),
        ({"keep": LOSSY, "restores": 20}, [FULL_SHARE / 4, 0.25]),
        ({"keep": LOSSY, "restores": 0}, [1.0, 1.0]),
        ({"restores": 5}, [FULL_SHARE / 2, 0.5]),
    ],
)
def test_steps_follow_the_restarts_that_are_expected(
    tmp_path: Path, options: dict[str, Any], expected: list[float]
) -> None:
    model, optimizer = trained(1e-4)
    with Checkpointer(tmp_path, model, optimizer, config=Grid(), background=False, **options) as saver:
        for step in (1, 2):
            saver.save(step)
    assert steps_recorded(tmp_path) == expected


def test_more_restarts_than_expected_make_steps_finer(tmp_path: Path) -> None:
    (model, optimizer), every = trained(1e-4), KeepPolicy(last=None, exact=0)
    for step in range(1, 15):
        saver = Checkpointer(tmp_path, model, optimizer, config=Grid(), keep=every, restores=10)
        with saver:  # a new process each time
            saver.restore_latest()
            saver.save(step)
    assert steps_recorded(tmp_path) == [FULL_SHARE / 2] + [0.5] * 10 + [0.25] * 3


@pytest.mark.parametrize("is_restored", [False, True])
def test_steps_against_pretrained_weights_follow_the_movement_between_saves(
    tmp_path: Path, is_restored: bool
) -> None:
    """Not all movement since the pretrained weights, which grows while training moves as far as before."""
    model, optimizer = trained(1e-6)
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
