"""What a fitter may know of a tensor beside its values. Encoder only: no reader needs any of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class InputMoments:
    """Second moments of a layer's inputs, sum(x x^T): how errors of a weight's columns add up."""

    # of the weight, that the matrix belongs to: 1 for [out, in, ...] (convolutions: all dimensions behind the
    # first, flattened), 0 for weights stored as [in, out] or for embeddings
    axis: int
    n_samples: int  # input vectors summed up
    # the float32 or float64 matrix [n, n]; [n_groups, n, n] for grouped convolutions; for embeddings, whose
    # inputs are one-hot, its diagonal [n]: how often each row was looked up
    read: Callable[[], NDArray[Any]]
