"""Error-compensated rounding: what it minimises, inputs that cannot guide it, and calibrated files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_plain
from safetensors.numpy import save_file as save_plain
from torch import nn

from ckptz.codec.column_rounding import BLOCK_COLUMNS, ColumnGrid, ColumnRounding, Targets, factors
from ckptz.codec.grid import UniformGrid
from ckptz.codec.grid_steps import ESCAPE
from ckptz.codec.tensor import InputCovariance, SideInformation, TensorToEncode
from ckptz.format.dtypes import dtype_of
from ckptz.format.sources import ArraySource
from ckptz.hooks import Calibration
from ckptz.torch import load_file as load_torch
from ckptz.torch import save_file as save_torch
from tests.support.cli_support import ckptz, relative_error, sets, tensors_in

Array = np.ndarray[Any, Any]
MOST = 20


def inputs(n: int, n_samples: int, seed: int = 0) -> Array:
    """Second moments of correlated inputs."""
    rng = np.random.default_rng(seed)
    mixing = rng.standard_normal((n, n)) / np.sqrt(n) + np.eye(n)
    samples = rng.standard_normal((n_samples, n)) * np.exp(rng.standard_normal(n)) @ mixing
    return (samples.T @ samples).astype(np.float32)


def uniform(step: float, n_rows: int, dead_zone: float = 0.0, most: int = MOST) -> ColumnGrid:
    """One step for all rows."""
    magnitudes = np.arange(1, most + 1, dtype=np.float32) * np.float32(step)
    values = np.concatenate([[0], np.stack([magnitudes, -magnitudes], axis=1).reshape(-1)]).astype(np.float32)
    steps, labels = np.full((1, n_rows), step, np.float32), np.zeros((1, n_rows), np.uint8)
    return ColumnGrid(steps, labels, values[None], dead_zone, most)


def restored(codes: Array, grid: ColumnGrid, columns: Array) -> Array:
    """Return the tensors that a reader restores."""
    values = grid.values[0][np.where(codes == ESCAPE, 0, codes)]
    return np.where(codes == ESCAPE, columns, values)


def loss(columns: Array, codes: Array, grid: ColumnGrid, moments: Array) -> float:
    """Sum of e H e^T over the rows."""
    errors = (columns - restored(codes, grid, columns)).astype(np.float64)
    return float(np.einsum("ir,ij,jr->", errors, moments.astype(np.float64), errors))


def weights(n: int, n_rows: int) -> Array:
    return np.random.default_rng(1).standard_normal((n, n_rows)).astype(np.float32)


def plain(columns: Array, grid: ColumnGrid) -> Array:
    """Rounding to nearest: what compensation gives for uncorrelated inputs."""
    return ColumnRounding.of(np.eye(len(columns), dtype=np.float32)).round(columns, grid)


@pytest.mark.parametrize("n", [1, 7, BLOCK_COLUMNS, BLOCK_COLUMNS + 1, 300])
@pytest.mark.parametrize("damping", [0.01, 0.1])
def test_the_factor_gives_the_moments_back(n: int, damping: float) -> None:
    moments = inputs(n, 4 * n + 8).astype(np.float64)
    upper = factors(moments, damping)[0].astype(np.float64)
    damped = moments + damping * np.diagonal(moments).mean() * np.eye(n)
    np.testing.assert_array_equal(np.tril(upper, -1), 0)
    np.testing.assert_array_equal(np.diagonal(upper), 1)
    inverse = np.linalg.inv(upper)
    left = inverse @ damped @ inverse.T
    size = np.sqrt(np.outer(np.diagonal(left), np.diagonal(left)))
    np.testing.assert_allclose((left - np.diag(np.diagonal(left))) / size, 0, atol=2e-3)


@pytest.mark.parametrize("n", [40, BLOCK_COLUMNS + 40])
def test_correlated_inputs_lose_less_than_by_plain_rounding(n: int) -> None:
    moments, columns, grid = inputs(n, 3 * n), weights(n, 64), uniform(0.5, 64)
    guided, nearest = ColumnRounding.of(moments).round(columns, grid), plain(columns, grid)
    assert loss(columns, guided, grid, moments) < 0.5 * loss(columns, nearest, grid, moments)


def test_blocks_change_nothing_but_the_order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    moments, columns, grid = inputs(200, 800), weights(200, 32), uniform(0.5, 32)
    found = ColumnRounding.of(moments).round(columns, grid)
    monkeypatch.setattr("ckptz.codec.column_rounding.BLOCK_COLUMNS", 1)
    assert np.mean(found != ColumnRounding.of(moments).round(columns, grid)) < 0.01


def test_it_is_greedily_optimal_for_two_columns() -> None:
    # The second column takes what the first leaves: checked against all codes of the second.
    moments = np.array([[2.0, 1.5], [1.5, 2.0]], np.float32)
    columns, grid = weights(2, 200), uniform(0.8, 200)
    codes = ColumnRounding.of(moments).round(columns, grid)
    tried = []
    for code in range(2 * MOST + 1):
        candidate = codes.copy()
        candidate[1] = code
        errors = columns - restored(candidate, grid, columns)
        tried.append(np.einsum("ir,ij,jr->r", errors, moments + 0.02 * np.eye(2), errors))
    np.testing.assert_array_equal(codes[1], np.argmin(tried, axis=0))


def test_uncorrelated_inputs_give_plain_rounding() -> None:
    columns, grid = weights(64, 10), uniform(0.5, 10)
    moments = np.diag(np.arange(1, 65)).astype(np.float32)
    nearest = np.rint(columns / np.float32(0.5)) * np.float32(0.5)
    np.testing.assert_array_equal(
        restored(ColumnRounding.of(moments).round(columns, grid), grid, columns), nearest
    )


def test_dead_inputs_take_no_part() -> None:
    moments, columns, grid = inputs(50, 200), weights(50, 20), uniform(0.5, 20)
    moments[10:20], moments[:, 10:20] = 0, 0
    codes = ColumnRounding.of(moments).round(columns, grid)
    live = np.r_[0:10, 20:50]
    np.testing.assert_array_equal(codes[10:20], plain(columns, grid)[10:20])
    alone = ColumnRounding.of(moments[np.ix_(live, live)]).round(columns[live], grid)
    assert np.mean(codes[live] != alone) < 0.02


@pytest.mark.parametrize(
    "moments",
    [
        np.zeros((30, 30), np.float32),
        np.ones((30, 30), np.float32),
        np.ones((30, 30), np.float32) * 1e30,
        np.full((30, 30), np.float32(1e-38)),
        -np.eye(30, dtype=np.float32),
        np.where(np.eye(30), 1, -5).astype(np.float32),
        np.full((30, 30), np.nan, np.float32),
    ],
    ids=["zero", "rank one", "huge", "tiny", "negative", "no second moments", "nan"],
)
def test_singular_and_impossible_matrices_still_round(moments: Array) -> None:
    columns, grid = weights(30, 8), uniform(0.5, 8)
    codes = ColumnRounding.of(moments).round(columns, grid)
    errors = np.abs(columns - restored(codes, grid, columns))
    assert np.isfinite(errors).all()
    assert errors.max() < 30  # an error is pushed on, never multiplied without end


def test_a_matrix_that_float32_cannot_factor_is_factored_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    factor = np.linalg.cholesky

    def fail_in_float32(matrix: Array) -> Any:
        tried.append(matrix.dtype)
        if matrix.dtype == np.float32:
            raise np.linalg.LinAlgError
        return factor(matrix)

    moments = inputs(20, 100)
    expected = factors(moments)[0]
    monkeypatch.setattr(np.linalg, "cholesky", fail_in_float32)
    np.testing.assert_allclose(factors(moments)[0], expected, atol=1e-4)
    assert tried == [np.float32, np.float64]


def test_values_beyond_the_alphabet_escape_and_leave_no_error() -> None:
    columns, grid = weights(20, 30) * 10, uniform(0.5, 30, most=5)
    codes = ColumnRounding.of(inputs(20, 100)).round(columns, grid)
    assert (codes == ESCAPE).any()
    errors = columns - restored(codes, grid, columns)
    np.testing.assert_array_equal(errors[codes == ESCAPE], 0)
    assert ((codes <= 10) | (codes == ESCAPE)).all()


def test_steps_may_differ_by_column() -> None:
    columns, moments = weights(20, 30), inputs(20, 100)
    steps = np.where(np.arange(20) < 10, 0.01, 1.0).astype(np.float32)[:, None]
    magnitudes = np.arange(1, 128, dtype=np.float32)
    levels = np.concatenate([[0], np.stack([magnitudes, -magnitudes], axis=1).reshape(-1)]).astype(np.float32)
    labels = (np.arange(20) >= 10).astype(np.uint8)[:, None]
    grid = ColumnGrid(steps, labels, np.stack([levels * np.float32(0.01), levels]), 0.0, 127)
    codes = ColumnRounding.of(moments).round(columns, grid)
    values = grid.values[labels, np.where(codes == ESCAPE, 0, codes)]
    errors = np.abs(columns - np.where(codes == ESCAPE, columns, values))
    assert errors[10:].max() > 0.1
    assert (codes[:10] > 40).mean() > 0.5


def test_the_same_input_gives_the_same_codes() -> None:
    moments, columns, grid = inputs(150, 500), weights(150, 40), uniform(0.5, 40, dead_zone=0.2)
    first = ColumnRounding.of(moments).round(columns, grid)
    np.testing.assert_array_equal(first, ColumnRounding.of(moments.copy()).round(columns.copy(), grid))


def test_the_cost_of_a_column_is_what_its_error_alone_adds() -> None:
    # An error of the last column in the order cannot be made up for; D of the first ones is what is left
    # of their moments behind the others.
    moments = inputs(30, 200)
    found = ColumnRounding.of(moments)
    upper = found.upper.astype(np.float64)
    scale = np.diagonal(moments).astype(np.float64).mean()
    costs = found.costs[found.order].astype(np.float64) * scale
    damped = moments[np.ix_(found.order, found.order)] + 0.01 * scale * np.eye(30)
    np.testing.assert_allclose(upper @ np.diag(costs) @ upper.T, damped, rtol=1e-3, atol=1e-4 * scale)


def test_targets_of_parts_add_up() -> None:
    # With uncorrelated inputs the targets are the values themselves.
    columns, grid = weights(12, 200), uniform(0.5, 200)
    feedback_of = ColumnRounding.of(np.diag(np.arange(1, 13)).astype(np.float32))
    found = Targets.none(1)
    for part in (columns[:, :120], columns[:, 120:]):
        found.add(feedback_of, part, uniform(0.5, part.shape[1]))
    codes = feedback_of.round(columns, grid)
    np.testing.assert_array_equal(found.counts[0], np.bincount(codes.reshape(-1), minlength=256))
    for code in (0, 1, 2, 5):
        is_here = codes == code
        weighed = is_here * feedback_of.costs[:, None]
        np.testing.assert_allclose(found.weights[0, code], weighed.sum(), rtol=1e-5)
        np.testing.assert_allclose(found.sums[0, code], (weighed * np.abs(columns)).sum(), rtol=1e-5)


# --- calibrated files ---------------------------------------------------------------------------


class Layers(nn.Module):
    """One layer of each kind that a calibration knows; inputs are correlated."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Embedding(80, 64)
        self.up = nn.Linear(64, 96)
        self.conv = nn.Conv1d(96, 64, 3, padding=1, groups=2)
        self.mixing = nn.Parameter(torch.randn(64, 64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs: torch.Tensor = self.token(tokens) @ self.mixing
        hidden = torch.relu(self.up(inputs))
        found: torch.Tensor = self.conv(hidden.transpose(1, 2))
        return found


@pytest.fixture
def layers(tmp_path: Path) -> tuple[Layers, Path, torch.Tensor]:
    """A model, its calibration, and the tokens it was recorded with."""
    model, tokens = Layers(), torch.randint(0, 80, (40, 30), generator=torch.Generator().manual_seed(1))
    calibration = Calibration(model)
    with calibration, torch.no_grad():
        model(tokens)
    calibration.save(tmp_path / "calibration.safetensors")
    save_torch(dict(model.state_dict()), tmp_path / "plain.ckptz")
    save_plain({n: t.numpy() for n, t in model.state_dict().items()}, tmp_path / "model.safetensors")
    return model, tmp_path / "calibration.safetensors", tokens


def output_error(model: Layers, path: Path, tokens: torch.Tensor, names: tuple[str, ...]) -> float:
    """Relative error of the model's output with the named tensors as restored."""
    other = Layers()
    restored = load_torch(path)
    other.load_state_dict({n: restored[n] if n in names else t for n, t in model.state_dict().items()})
    with torch.no_grad():
        return relative_error(other(tokens).numpy(), model(tokens).numpy())


@pytest.mark.parametrize("name", ["up.weight", "conv.weight"])
def test_calibrated_rounding_loses_less_at_the_same_size(
    tmp_path: Path, layers: tuple[Layers, Path, torch.Tensor], name: str
) -> None:
    model, calibration, tokens = layers
    source, errors, bits = tmp_path / "model.safetensors", [], []
    for options in ([], ["--set", f"guide.calibration={calibration}"]):
        out = tmp_path / "out.ckptz"
        run = ckptz("compress", source, "-o", out, "--force", "--method", "grid", *sets(step=1.2), *options)
        assert ("no calibration given" in run.stderr) == (not options)
        errors.append(output_error(model, out, tokens, (name,)))
        bits.append(tensors_in(out)[name]["bits_per_element"])
        ckptz("verify", out, "--against", source)
    assert errors[1] < 0.75 * errors[0]
    assert bits[1] < 1.1 * bits[0]


def test_levels_are_centroids_of_what_is_rounded_to_them() -> None:
    # The errors pushed on make targets larger than values: levels at the means of the values would shrink
    # what is restored. Any common factor of the levels but about 1 loses more, by e H e^T after rounding.
    weight, moments = np.ascontiguousarray(weights(200, 300).T), inputs(200, 300)
    source = ArraySource.from_buffer(dtype_of("F32"), weight.shape, weight.tobytes())
    guide = SideInformation(inputs=InputCovariance(axis=1, n_samples=300, read=lambda: moments))
    plan = UniformGrid(4.0).plan(TensorToEncode(source, guide=guide)).plan
    values = plan.quant_map.table.expand().view(np.float32)

    def lost(factor: float) -> float:
        levels = np.ascontiguousarray(values * np.float32(factor))
        most = (levels.shape[1] - 1) // 2
        grid = ColumnGrid(np.full((1, 300), 1.6, np.float32), np.zeros((1, 300), np.uint8), levels, 0.1, most)
        codes = ColumnRounding.of(moments).round(weight.T.copy(), grid)
        return loss(weight.T, codes, grid, moments)

    assert lost(1.0) < min(lost(0.85), lost(1.2))


def test_inputs_on_the_first_axis_round_like_the_transposed_weight() -> None:
    weight, moments = weights(128, 96), inputs(128, 500)

    def codes(array: Array, axis: int) -> Array:
        source = ArraySource.from_buffer(dtype_of("F32"), array.shape, array.tobytes())
        guide = SideInformation(inputs=InputCovariance(axis=axis, n_samples=500, read=lambda: moments))
        encoding = UniformGrid().plan(TensorToEncode(source, guide=guide))
        return encoding.quantizer.codes(0, array.size, source.patterns(0, array.size)).reshape(array.shape)

    along_first, along_second = codes(weight, 0), codes(np.ascontiguousarray(weight.T), 1).T
    np.testing.assert_array_equal(along_first, along_second)


@pytest.mark.parametrize("purpose", ["auto", "resume", "ship"])
def test_deltas_are_calibrated_only_to_be_shipped(
    tmp_path: Path, purpose: str, layers: tuple[Layers, Path, torch.Tensor]
) -> None:
    model, calibration, tokens = layers
    moved = {n: t + 0.03 * t.std() * torch.randn_like(t) for n, t in model.state_dict().items()}
    save_plain({n: t.numpy() for n, t in moved.items()}, tmp_path / "moved.safetensors")
    paths = (tmp_path / "model.safetensors", tmp_path / "moved.safetensors")
    model.load_state_dict(moved)
    base = tmp_path / "base.ckptz"
    ckptz("compress", paths[0], "-o", base, "--method", "grid", *sets(purpose=purpose))
    errors = []
    for options in ([], ["--set", f"guide.calibration={calibration}"]):
        given = ("--base", base, "--force", "--method", "grid", *sets(purpose=purpose), *options)
        ckptz("compress", paths[1], "-o", tmp_path / "moved.ckptz", *given)
        errors.append(output_error(model, tmp_path / "moved.ckptz", tokens, ("up.weight",)))
        assert tensors_in(tmp_path / "moved.ckptz")["up.weight"]["predictor"] == "base"
    assert errors[1] < 0.9 * errors[0] if purpose == "ship" else errors[1] == errors[0]


def test_unmatched_modules_are_counted(tmp_path: Path, layers: tuple[Layers, Path, torch.Tensor]) -> None:
    _, calibration, _ = layers
    tensors = load_plain(tmp_path / "model.safetensors")
    del tensors["conv.weight"]
    save_plain(tensors, tmp_path / "part.safetensors")
    run = ckptz(
        "compress",
        tmp_path / "part.safetensors",
        "--method",
        "grid",
        "--set",
        f"guide.calibration={calibration}",
    )
    assert "1 of its 3 modules are not in the checkpoint, first 'conv.weight'" in run.stderr
    assert "1 weights have no calibration, first 'mixing'" in run.stderr


@pytest.mark.parametrize("how", ["shape", "names", "no calibration", "missing"])
def test_a_calibration_of_another_model_is_refused(
    tmp_path: Path, layers: tuple[Layers, Path, torch.Tensor], how: str
) -> None:
    _, calibration, _ = layers
    tensors = load_plain(tmp_path / "model.safetensors")
    if how == "shape":
        tensors["up.weight"] = tensors["up.weight"].T.copy()
    if how == "names":
        tensors = {f"other.{name}.x": tensor for name, tensor in tensors.items()}
    if how == "no calibration":
        calibration = tmp_path / "model.safetensors"
    if how == "missing":
        calibration = tmp_path / "nothing.safetensors"
    save_plain(tensors, tmp_path / "other.safetensors")
    options = ("--method", "grid", "--set", f"guide.calibration={calibration}")
    run = ckptz("compress", tmp_path / "other.safetensors", *options, fails=True)
    assert run.exit_code == (5 if how == "missing" else 2)
    assert calibration.name in run.stderr
    assert ("'up.weight'" in run.stderr) == (how == "shape")
    assert not (tmp_path / "other.ckptz").exists()
