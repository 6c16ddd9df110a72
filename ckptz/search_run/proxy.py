"""The error that stands in for a quality where there is no evaluation: sensitivity-weighted, relative, RMS.

    sqrt( sum(g^2 * (w - w')^2) / sum(g^2 * w^2) )     over all lossy tensors

with averages of gradients g; tensors without one have the mean square of the others, or 1 if none has
one. It is a proxy, and is called so wherever it is shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from ckptz.codec.units import TensorSource, chunk_bounds
from ckptz.codec.values import KINDS
from ckptz.encoding.subject import NO_GUIDE, Guide, GuidedSensitivities, MapFunction, sensitivities_of
from ckptz.quant.sensitivity import floats_of
from ckptz.search.judgement import Limit, Reading
from ckptz.search_run.evaluation import Judge, TrialFile, measured_here
from ckptz.search_run.quality import Readings

METRIC: Final = "proxy: sensitivity-weighted relative RMS error"


def _weighted(
    source: TensorSource, gradients: GuidedSensitivities | None, decoded: TensorSource | None
) -> float:
    """Sum up squares of g * (w - w'), g being 1 where it is not known, w' 0 where nothing is decoded."""
    total, kind = 0.0, KINDS[source.dtype.name]
    for begin, end in source.chunk_bounds():
        values = floats_of(source.units(begin, end), kind)
        if decoded is not None:
            values = values - floats_of(decoded.units(begin, end), kind)
        if gradients is not None:
            values = gradients.gradients_of(begin, end) * values
        wide = values.astype(np.float64)
        total += float(wide @ wide)
    return total


class ProxyMeter:
    """Measures trials against the original tensors that become lossy; `run` maps a function over tensors."""

    def __init__(
        self, tensors: Mapping[str, TensorSource], guides: Mapping[str, Guide], run: MapFunction = map
    ) -> None:
        self._run = run
        known = {n: sensitivities_of(source, guides.get(n, NO_GUIDE)) for n, source in tensors.items()}
        found = run(_mean_square, [(tensors[name], gradients) for name, gradients in known.items()])
        squares = dict(zip(known, found, strict=True))
        usable = {name: square for name, square in squares.items() if math.isfinite(square)}
        sizes = {name: tensors[name].n_units for name in usable}
        mean = sum(usable[n] * sizes[n] for n in usable) / max(sum(sizes.values()), 1) if usable else 1.0
        self._tensors = {n: (source, known[n] if n in usable else None) for n, source in tensors.items()}
        self._scale = {name: 1.0 if name in usable else mean for name in tensors}
        self._power = self._sum({})

    def __call__(self, file: TrialFile) -> Readings:
        """Measure the error of the tensors decoded from a trial."""
        with file.opened() as decoded:
            error = self._sum(decoded)
        return (_reading(math.sqrt(error / self._power) if self._power else 0.0),)

    def _sum(self, decoded: Mapping[str, TensorSource]) -> float:
        """Weighted sum of squares of the errors, or of the originals where nothing is decoded."""

        def one(name: str) -> float:
            return self._scale[name] * _weighted(*self._tensors[name], decoded.get(name))

        return sum(self._run(one, self._tensors))


def _reading(error: float) -> Reading:
    return Reading(METRIC, np.array([error]), lower_is_better=True)


def _mean_square(item: tuple[TensorSource, GuidedSensitivities | None]) -> float:
    """Compute the mean square of the gradients of one tensor; NaN where none are known."""
    source, gradients = item
    if gradients is None:
        return math.nan
    n_units = source.n_units
    total = 0.0
    for begin, end in chunk_bounds(n_units):
        found = gradients.gradients_of(begin, end).astype(np.float64)
        total += float(found @ found)
    return total / max(n_units, 1)


def proxy_judge(
    limit: float, tensors: Mapping[str, TensorSource], guides: Mapping[str, Guide], run: MapFunction
) -> Judge:
    """Make a judge that wants the error to be at most `limit`."""
    meter = ProxyMeter(tensors, guides, run)
    exact = (_reading(0.0),)
    return Judge((Limit(limit, False),), exact, ("rmse",), measured_here(meter), (None,), (0.0,), (None,))
