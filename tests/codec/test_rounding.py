"""Error-compensated rounding: its loss, singular or invalid covariances of inputs, and calibrated files."""

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
from tests.support.cli_support import ckptz, relative_error, sets, tensors_in

Array = np.ndarray[Any, Any]
MAX_MAGNITUDE = 20  # of codes


def inputs(n: int, n_samples: int) -> Array:
    """Return the second moments of correlated inputs, sum(x x^T) over samples, float32 [n, n]."""
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((n, n)) / np.sqrt(n) + np.eye(n)
    samples = rng.standard_normal((n_samples, n)) * np.exp(rng.standard_normal(n)) @ mixing
    return (samples.T @ samples).astype(np.float32)


def uniform(
    step: float, n_rows: int, dead_zone: float = 0.0, max_magnitude: int = MAX_MAGNITUDE
) -> ColumnGrid:
    """Return a grid with the same step for all rows, whose levels are multiples of the step."""
    magnitudes = np.arange(1, max_magnitude + 1, dtype=np.float32) * np.float32(step)
    values = np.concatenate([[0], np.stack([magnitudes, -magnitudes], axis=1).reshape(-1)]).astype(np.float32)
    steps, labels = np.full((1, n_rows), step, np.float32), np.zeros((1, n_rows), np.uint8)
    return ColumnGrid(steps, labels, values[None], dead_zone, max_magnitude)


def restored(codes: Array, grid: ColumnGrid, columns: Array) -> Array:
    """Return the restored columns of codes: exact values for escapes, else levels of the first context."""
    values = grid.values[0][np.where(codes == ESCAPE, 0, codes)]
    return np.where(codes == ESCAPE, columns, values)


def loss(columns: Array, codes: Array, grid: ColumnGrid, moments: Array) -> float:
    """Return the sum of e H e^T over the rows, with errors e and second moments H of the inputs."""
    errors = (columns - restored(codes, grid, columns)).astype(np.float64)
    return float(np.einsum("ir,ij,jr->", errors, moments.astype(np.float64), errors))


def weights(n: int, n_rows: int) -> Array:
    """Return the columns of a normal weight, float32 [n, n_rows]."""
    return np.random.default_rng(1).standard_normal((n, n_rows)).astype(np.float32)


def nearest_codes(columns: Array, grid: ColumnGrid) -> Array:
    """Round to nearest: errors are not compensated for uncorrelated inputs."""
    return ColumnRounding.of(np.eye(len(columns), dtype=np.float32)).round(columns, grid)


@pytest.mark.parametrize("n", [1, 7, BLOCK_COLUMNS, BLOCK_COLUMNS + 1, 300])
@pytest.mark.parametrize("damping", [0.01, 0.1])
def test_the_factor_diagonalizes_the_damped_moments(n: int, damping: float) -> None:
    moments = inputs(n, 4 * n + 8).astype(np.float64)
    upper = factors(moments, damping)[0].astype(np.float64)
    damped = moments + damping * np.diagonal(moments).mean() * np.eye(n)
    np.testing.assert_array_equal(np.tril(upper, -1), 0)
    np.testing.assert_array_equal(np.diagonal(upper), 1)
    inverse = np.linalg.inv(upper)
    middle = inverse @ damped @ inverse.T
    diagonal = np.diagonal(middle)
    off_diagonal = (middle - np.diag(diagonal)) / np.sqrt(np.outer(diagonal, diagonal))
    np.testing.assert_allclose(off_diagonal, 0, atol=2e-3)


@pytest.mark.parametrize("n", [40, BLOCK_COLUMNS + 40])
def test_compensated_rounding_has_less_than_half_the_loss_for_correlated_inputs(n: int) -> None:
    moments, columns, grid = inputs(n, 3 * n), weights(n, 64), uniform(0.5, 64)
    compensated, nearest = ColumnRounding.of(moments).round(columns, grid), nearest_codes(columns, grid)
    assert loss(columns, compensated, grid, moments) < 0.5 * loss(columns, nearest, grid, moments)


def test_the_size_of_blocks_only_changes_the_order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    moments, columns, grid = inputs(200, 800), weights(200, 32), uniform(0.5, 32)
    codes = ColumnRounding.of(moments).round(columns, grid)
    monkeypatch.setattr("ckptz.codec.column_rounding.BLOCK_COLUMNS", 1)
    assert np.mean(codes != ColumnRounding.of(moments).round(columns, grid)) < 0.01


def test_the_code_of_the_last_column_has_the_least_loss_of_all_codes() -> None:
    moments = np.array([[2.0, 1.5], [1.5, 2.0]], np.float32)
    columns, grid = weights(2, 200), uniform(0.8, 200)
    codes = ColumnRounding.of(moments).round(columns, grid)
    losses = []
    for code in range(2 * MAX_MAGNITUDE + 1):
        candidate = codes.copy()
        candidate[1] = code
        errors = columns - restored(candidate, grid, columns)
        losses.append(np.einsum("ir,ij,jr->r", errors, moments + 0.02 * np.eye(2), errors))
    np.testing.assert_array_equal(codes[1], np.argmin(losses, axis=0))


def test_weights_of_uncorrelated_inputs_are_rounded_to_nearest() -> None:
    columns, grid = weights(64, 10), uniform(0.5, 10)
    moments = np.diag(np.arange(1, 65)).astype(np.float32)
    nearest = np.rint(columns / np.float32(0.5)) * np.float32(0.5)
    np.testing.assert_array_equal(
        restored(ColumnRounding.of(moments).round(columns, grid), grid, columns), nearest
    )


def test_inputs_that_are_always_zero_are_ignored() -> None:
    moments, columns, grid = inputs(50, 200), weights(50, 20), uniform(0.5, 20)
    moments[10:20], moments[:, 10:20] = 0, 0
    codes = ColumnRounding.of(moments).round(columns, grid)
    nonzero = np.r_[0:10, 20:50]
    np.testing.assert_array_equal(codes[10:20], nearest_codes(columns, grid)[10:20])
    expected = ColumnRounding.of(moments[np.ix_(nonzero, nonzero)]).round(columns[nonzero], grid)
    assert np.mean(codes[nonzero] != expected) < 0.02


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
def test_errors_stay_bounded_for_singular_and_invalid_matrices(moments: Array) -> None:
    """Compensated errors must not grow from column to column."""
    columns, grid = weights(30, 8), uniform(0.5, 8)
    codes = ColumnRounding.of(moments).round(columns, grid)
    errors = np.abs(columns - restored(codes, grid, columns))
    assert np.isfinite(errors).all()
    assert errors.max() < 30


def test_a_matrix_that_float32_cannot_factor_is_factored_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes = []
    factor = np.linalg.cholesky

    def fail_in_float32(matrix: Array) -> Any:
        dtypes.append(matrix.dtype)
        if matrix.dtype == np.float32:
            raise np.linalg.LinAlgError
        return factor(matrix)

    moments = inputs(20, 100)
    expected = factors(moments)[0]
    monkeypatch.setattr(np.linalg, "cholesky", fail_in_float32)
    np.testing.assert_allclose(factors(moments)[0], expected, atol=1e-4)
    assert dtypes == [np.float32, np.float64]


def test_values_beyond_the_largest_code_escape_and_have_no_error() -> None:
    columns, grid = weights(20, 30) * 10, uniform(0.5, 30, max_magnitude=5)
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


def test_rounding_is_deterministic() -> None:
    moments, columns, grid = inputs(150, 500), weights(150, 40), uniform(0.5, 40, dead_zone=0.2)
    codes = ColumnRounding.of(moments).round(columns, grid)
    np.testing.assert_array_equal(codes, ColumnRounding.of(moments.copy()).round(columns.copy(), grid))


def test_costs_and_factor_multiply_to_the_damped_moments() -> None:
    """H = U D U^T, where D are the costs of columns in the order of rounding."""
    moments = inputs(30, 200)
    column_rounding = ColumnRounding.of(moments)
    order, upper = column_rounding.order, column_rounding.upper.astype(np.float64)
    scale = np.diagonal(moments).astype(np.float64).mean()
    costs = column_rounding.costs[order].astype(np.float64) * scale
    damped = moments[np.ix_(order, order)] + 0.01 * scale * np.eye(30)
    np.testing.assert_allclose(upper @ np.diag(costs) @ upper.T, damped, rtol=1e-3, atol=1e-4 * scale)


def test_targets_of_parts_add_up() -> None:
    """Targets of uncorrelated inputs are the values themselves."""
    columns, grid = weights(12, 200), uniform(0.5, 200)
    column_rounding = ColumnRounding.of(np.diag(np.arange(1, 13)).astype(np.float32))
    targets = Targets.none(1)
    for part in (columns[:, :120], columns[:, 120:]):
        targets.add(column_rounding, part, uniform(0.5, part.shape[1]))
    codes = column_rounding.round(columns, grid)
    np.testing.assert_array_equal(targets.counts[0], np.bincount(codes.reshape(-1), minlength=256))
    for code in (0, 1, 2, 5):
        costs = (codes == code) * column_rounding.costs[:, None]
        np.testing.assert_allclose(targets.weights[0, code], costs.sum(), rtol=1e-5)
        np.testing.assert_allclose(targets.sums[0, code], (costs * np.abs(columns)).sum(), rtol=1e-5)


# --- calibrated files ---------------------------------------------------------------------------


class Layers(nn.Module):
    """An embedding, a linear layer and a grouped convolution with correlated inputs."""

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
        outputs: torch.Tensor = self.conv(hidden.transpose(1, 2))
        return outputs


@pytest.fixture
def layers(tmp_path: Path) -> tuple[Layers, Path, torch.Tensor]:
    """Return a model, the path of its calibration, and the tokens that the calibration was recorded with."""
    model, tokens = Layers(), torch.randint(0, 80, (40, 30), generator=torch.Generator().manual_seed(1))
    calibration = Calibration(model)
    with calibration, torch.no_grad():
        model(tokens)
    calibration.save(tmp_path / "calibration.safetensors")
    save_plain({n: t.numpy() for n, t in model.state_dict().items()}, tmp_path / "model.safetensors")
    return model, tmp_path / "calibration.safetensors", tokens


def output_error(model: Layers, path: Path, tokens: torch.Tensor, name: str) -> float:
    """Return the relative error of the model's output if one tensor is replaced by the restored one."""
    lossy_model = Layers()
    lossy_model.load_state_dict(model.state_dict() | {name: load_torch(path)[name]})
    with torch.no_grad():
        return relative_error(lossy_model(tokens).numpy(), model(tokens).numpy())


@pytest.mark.parametrize("name", ["up.weight", "conv.weight"])
def test_calibration_reduces_the_output_error_by_a_quarter_at_similar_size(
    tmp_path: Path, layers: tuple[Layers, Path, torch.Tensor], name: str
) -> None:
    model, calibration, tokens = layers
    source, errors, bits = tmp_path / "model.safetensors", [], []
    for options in ([], ["--set", f"guide.calibration={calibration}"]):
        out = tmp_path / "out.ckptz"
        run = ckptz("compress", source, "-o", out, "--force", "--method", "grid", *sets(step=1.2), *options)
        assert ("no calibration given" in run.stderr) == (not options)
        errors.append(output_error(model, out, tokens, name))
        bits.append(tensors_in(out)[name]["bits_per_element"])
        ckptz("verify", out, "--against", source)
    assert errors[1] < 0.75 * errors[0]
    assert bits[1] < 1.1 * bits[0]


def test_levels_multiplied_by_a_factor_have_a_larger_loss() -> None:
    """Levels are means of rounding targets, which are larger than the values by the compensated errors."""
    weight, moments = np.ascontiguousarray(weights(200, 300).T), inputs(200, 300)
    source = ArraySource.from_buffer(dtype_of("F32"), weight.shape, weight.tobytes())
    guide = SideInformation(inputs=InputCovariance(axis=1, n_samples=300, read=lambda: moments))
    plan = UniformGrid(4.0).plan(TensorToEncode(source, guide=guide)).plan
    values = plan.quant_map.table.expand().view(np.float32)

    def loss_with(factor: float) -> float:
        levels = np.ascontiguousarray(values * np.float32(factor))
        max_magnitude = (levels.shape[1] - 1) // 2
        steps, labels = np.full((1, 300), 1.6, np.float32), np.zeros((1, 300), np.uint8)
        grid = ColumnGrid(steps, labels, levels, 0.1, max_magnitude)
        codes = ColumnRounding.of(moments).round(weight.T.copy(), grid)
        return loss(weight.T, codes, grid, moments)

    assert loss_with(1.0) < min(loss_with(0.85), loss_with(1.2))


def test_weights_stored_as_in_out_have_the_codes_of_their_transpose() -> None:
    weight, moments = weights(128, 96), inputs(128, 500)

    def codes(array: Array, axis: int) -> Array:
        source = ArraySource.from_buffer(dtype_of("F32"), array.shape, array.tobytes())
        guide = SideInformation(inputs=InputCovariance(axis=axis, n_samples=500, read=lambda: moments))
        encoding = UniformGrid().plan(TensorToEncode(source, guide=guide))
        return encoding.quantizer.codes(0, array.size, source.patterns(0, array.size)).reshape(array.shape)

    along_first, along_second = codes(weight, 0), codes(np.ascontiguousarray(weight.T), 1).T
    np.testing.assert_array_equal(along_first, along_second)


@pytest.mark.parametrize("purpose", ["auto", "resume", "ship"])
def test_deltas_use_a_calibration_only_for_purpose_ship(
    tmp_path: Path, purpose: str, layers: tuple[Layers, Path, torch.Tensor]
) -> None:
    model, calibration, tokens = layers
    later = {name: t + 0.03 * t.std() * torch.randn_like(t) for name, t in model.state_dict().items()}
    save_plain({name: t.numpy() for name, t in later.items()}, tmp_path / "later.safetensors")
    model.load_state_dict(later)
    grid = ("--force", "--method", "grid", *sets(purpose=purpose))
    base, delta = tmp_path / "base.ckptz", tmp_path / "delta.ckptz"
    ckptz("compress", tmp_path / "model.safetensors", "-o", base, *grid)
    errors = []
    for options in ([], ["--set", f"guide.calibration={calibration}"]):
        ckptz("compress", tmp_path / "later.safetensors", "-o", delta, "--base", base, *grid, *options)
        errors.append(output_error(model, delta, tokens, "up.weight"))
        assert tensors_in(delta)["up.weight"]["predictor"] == "base"
    assert errors[1] < 0.9 * errors[0] if purpose == "ship" else errors[1] == errors[0]


def test_modules_and_weights_without_a_counterpart_are_reported(
    tmp_path: Path, layers: tuple[Layers, Path, torch.Tensor]
) -> None:
    _, calibration, _ = layers
    tensors = load_plain(tmp_path / "model.safetensors")
    del tensors["conv.weight"]
    save_plain(tensors, tmp_path / "part.safetensors")
    options = ("--method", "grid", "--set", f"guide.calibration={calibration}")
    run = ckptz("compress", tmp_path / "part.safetensors", *options)
    assert "1 of its 3 modules are not in the checkpoint, first 'conv.weight'" in run.stderr
    assert "1 weights have no calibration, first 'mixing'" in run.stderr


@pytest.mark.parametrize("fault", ["shape", "names", "no calibration", "missing"])
def test_a_calibration_of_another_model_is_refused(
    tmp_path: Path, layers: tuple[Layers, Path, torch.Tensor], fault: str
) -> None:
    _, calibration, _ = layers
    tensors = load_plain(tmp_path / "model.safetensors")
    if fault == "shape":
        tensors["up.weight"] = tensors["up.weight"].T.copy()
    if fault == "names":
        tensors = {f"other.{name}.x": tensor for name, tensor in tensors.items()}
    if fault == "no calibration":
        calibration = tmp_path / "model.safetensors"
    if fault == "missing":
        calibration = tmp_path / "nothing.safetensors"
    save_plain(tensors, tmp_path / "other.safetensors")
    options = ("--method", "grid", "--set", f"guide.calibration={calibration}")
    run = ckptz("compress", tmp_path / "other.safetensors", *options, fails=True)
    assert run.exit_code == (5 if fault == "missing" else 2)
    assert calibration.name in run.stderr
    assert ("'up.weight'" in run.stderr) == (fault == "shape")
    assert not (tmp_path / "other.ckptz").exists()
