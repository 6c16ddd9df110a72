"""Error-compensated rounding of one matrix: seconds by size, and how much less error it leaves.

    python -m bench.product.rounding        results/rounding.csv; under a minute on two cores

The weights are Laplacian, the inputs correlated as those of a trained layer are: a few directions hold most
of their power. "error" is the square root of e H e^T over that of plain rounding with the same steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.core.measure import machine, save_rows, timed, verdict
from bench.core.report import finish
from ckptz.kernels.floats import ESCAPE
from ckptz.quant.rounding import ColumnGrid, Feedback

SIZES = ((512, 512), (1024, 1024), (2048, 2048), (4096, 1024))  # inputs, outputs
TARGET_SIZE, TARGET_SECONDS = (2048, 2048), 5.0
STEP, MOST, ROUNDS = 0.5, 30, 3

Array = np.ndarray[Any, Any]


def inputs(n: int) -> Array:
    """Second moments [n, n] of inputs whose power falls with the square of the direction's number."""
    rng = np.random.default_rng(n)
    directions, _ = np.linalg.qr(rng.standard_normal((n, n)).astype(np.float32))
    power = 1 / (1 + np.arange(n) / 16) ** 2 + 1e-3
    moments = (directions * power.astype(np.float32)) @ directions.T
    return (moments + moments.T) / 2


def restored(codes: Array, grid: ColumnGrid, columns: Array) -> Array:
    """What a reader gets."""
    return np.where(codes == ESCAPE, columns, grid.values[0][np.where(codes == ESCAPE, 0, codes)])


def loss(columns: Array, codes: Array, grid: ColumnGrid, moments: Array) -> float:
    """Square root of the sum of e H e^T over the rows."""
    errors = columns - restored(codes, grid, columns)
    return float(np.sqrt(np.sum((moments @ errors) * errors, dtype=np.float64)))


def row(n: int, n_rows: int) -> dict[str, object]:
    """One size."""
    columns = np.random.default_rng(0).laplace(size=(n, n_rows)).astype(np.float32)
    magnitudes = np.arange(1, MOST + 1, dtype=np.float32) * np.float32(STEP)
    levels = np.concatenate([[0], np.stack([magnitudes, -magnitudes], axis=1).reshape(-1)])
    steps, labels = np.full((1, n_rows), STEP, np.float32), np.zeros((1, n_rows), np.uint8)
    grid = ColumnGrid(steps, labels, levels[None].astype(np.float32), 0.0, MOST)
    moments = inputs(n)
    seconds = min(timed(lambda: Feedback.of(moments).round(columns, grid)) for _ in range(ROUNDS))
    compensated = loss(columns, Feedback.of(moments).round(columns, grid), grid, moments)
    plain = loss(columns, Feedback.of(np.eye(n, dtype=np.float32)).round(columns, grid), grid, moments)
    is_target = (n, n_rows) == TARGET_SIZE
    return {
        "inputs": n,
        "outputs": n_rows,
        "seconds": f"{seconds:.2f}",
        "M weights/s": f"{n * n_rows / seconds / 1e6:.1f}",
        "error": f"{compensated / plain:.3f}",
        "target": f"under {TARGET_SECONDS:g} s: {verdict(seconds < TARGET_SECONDS)}" if is_target else "",
    }


def main() -> None:
    """Command line."""
    save_rows("rounding", [row(*size) for size in SIZES])
    finish("rounding", machine())


if __name__ == "__main__":
    main()
