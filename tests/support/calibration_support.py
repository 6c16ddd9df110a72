"""Small models for calibrations, and the expected sums."""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from ckptz.hooks import Calibration

Array = np.ndarray[Any, np.dtype[Any]]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def recorded(model: nn.Module, *batches: torch.Tensor, memory_cap: int = 1 << 30) -> Calibration:
    calibration = Calibration(model, memory_cap=memory_cap)
    with calibration:
        for batch in batches:
            model(batch)
    return calibration


def covariance_of(vectors: Array) -> Array:
    """Return sum(x x^T) of the rows x of `vectors` [n, width], in float64 [width, width]."""
    wide = np.asarray(vectors, np.float64)
    total: Array = wide.T @ wide
    return total


def check_covariance(actual: torch.Tensor, expected: Array) -> None:
    assert actual.dtype == torch.float32
    assert torch.equal(actual, actual.mT)
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def stack(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


def cap_for(*widths: int) -> int:
    """Return the smallest memory cap for layers of these input widths: sums of a batch and of all batches."""
    return 2 * 4 * sum(n * n for n in widths)


class Attention(nn.Module):
    """Layers with equal inputs; a call such as "q0" means layer q and the first of three inputs."""

    def __init__(self, calls: Iterable[str]) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        self.calls = list(calls)

    def forward(self, batch: torch.Tensor) -> None:
        inputs = [batch, batch + 1, batch.clone()]
        for call in self.calls:
            getattr(self, call[0])(inputs[int(call[1])])
