"""Levels of optimizer state on a GPU, as `ckptz.kernels.moments_cpu` finds them, in torch's operations.

Integers and doubles, whose quotients are rounded alike everywhere. A number of the host is not divided by:
on a GPU, torch would multiply by its reciprocal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch

from ckptz.codec.on_device import FLOATS, moved
from ckptz.encoding.planes_on_device import host_of
from ckptz.kernels import values_on_gpu
from ckptz.kernels.floats import NEAREST
from ckptz.kernels.torch import ordered
from ckptz.quant.moment_codes import LadderQuantizer, StepQuantizer
from ckptz.quant.moments import MAX_INDEX, Rungs

Array = np.ndarray[Any, Any]
LARGEST: Final = MAX_INDEX + 1  # level of a first moment that stands for all beyond
N_LEVELS: Final = 2 * LARGEST + 1


def ladder_levels(
    quantizer: LadderQuantizer, units: torch.Tensor, predicted: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the level of each second moment.

    Args:
        quantizer: says which there are.
        units: torch's integers [n].
        predicted: the same [n], or None for a prediction of zero.

    Returns:
        Levels int64 [n]; whether a level restores the element, which is not zero [n]; and roots of elements
        in roots of their levels, which are float32, as float64 [n].
    """
    (step, phase, zero, _, largest), kind = quantizer.levels, quantizer.prediction.kind
    half = step // 2
    origin = zero if predicted is None else ordered(predicted)
    levels = (ordered(units) - origin + (half - phase)).div(step, rounding_mode="floor")
    restored = levels * step + phase + origin
    has_level = (units != 0) & (restored <= zero + largest - half)
    if predicted is not None:
        has_level &= restored - half > zero
    nominal = (restored - zero).clamp(1, largest).to(units.dtype)
    exact, level = (part.view(FLOATS[kind]).to(torch.float32) for part in (units, nominal))
    roots = (exact / level).to(torch.float64).sqrt()  # of float32, torch rounds roots in its own way on CPUs
    return levels, has_level, roots.to(torch.float32).to(torch.float64)


def step_levels(
    quantizer: StepQuantizer, values: torch.Tensor, labels: torch.Tensor | None, begin: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the levels of first moments, float32 [n] from element `begin` on, by labels [n] if there are any.

    Returns:
        Levels int64 [n], and the values in steps, float64 [n].
    """
    steps = moved(quantizer.classes.steps, values.device)
    step = steps[0] if labels is None else steps[labels.to(torch.int64)]
    size = values.to(torch.float64).abs()
    ratios = size / torch.where(step > 0, step, 1.0)
    scaled = torch.where((step > 0) | (size == 0), ratios, torch.inf)
    if quantizer.key == NEAREST:
        magnitudes = torch.where(scaled < 0.5 + quantizer.dead_zone, 0.0, scaled.round().clamp(1, LARGEST))
        levels = torch.copysign(magnitudes, values)
    else:
        scaled = torch.copysign(scaled.clamp(max=LARGEST), values)
        levels = scaled.floor()
        drawn = values_on_gpu().thresholds(quantizer.key, begin, len(values), values.device)
        levels += drawn.to(torch.float64) >= 1.0 - (scaled - levels)
    return levels.to(torch.int64), torch.copysign(ratios, values)


def ladder_codes(
    quantizer: LadderQuantizer, levels: torch.Tensor, has_level: torch.Tensor, is_zero: torch.Tensor
) -> torch.Tensor:
    """Give the codes uint8 [n] of second moments, by their levels if they have one, and of exact zeros."""
    rungs = quantizer.rungs
    assert rungs is not None
    codes = codes_of(rungs, torch.where(has_level, levels, rungs.lowest - 1))
    return codes.masked_fill_(is_zero, rungs.zero_code or 0)


def codes_of(rungs: Rungs | None, levels: torch.Tensor) -> torch.Tensor:
    """Give the codes uint8 [n] of levels int64 [n]: the escape code for all that have none."""
    assert rungs is not None
    codes = levels - rungs.lowest
    is_rung = (codes >= 0) & (codes < rungs.n_levels)
    return torch.where(is_rung, codes, rungs.escape_code or 0).to(torch.uint8)


def sums_by_cell(
    cells: torch.Tensor, values: torch.Tensor, n_cells: int, n_chunks: int
) -> Iterator[tuple[Array, Array]]:
    """Add up values float64 [n] by their cells int64 [n], one after another in each.

    Cells of a chunk are numbered behind those of the one before. Of each chunk it gives on the host how often
    its cells occur, and their sums, both [n_cells].
    """
    grouped = torch.sort(cells, stable=True)
    used, n_used = torch.unique_consecutive(grouped.values, return_counts=True)
    found = values_on_gpu().sums_of_runs(values[grouped.indices], n_used.cumsum(0))
    at, *parts = map(host_of, (used, n_used, found))
    ends = np.searchsorted(at, np.arange(n_chunks + 1) * n_cells)
    for i, own in enumerate(map(slice, ends[:-1], ends[1:])):
        counts, sums = np.zeros(n_cells, np.int64), np.zeros(n_cells)
        for whole, part in zip((counts, sums), parts, strict=True):
            whole[at[own] - i * n_cells] = part[own]
        yield counts, sums
