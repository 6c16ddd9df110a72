"""Whether the parts of a tensor make it whole: each inside of it, none over another, no hole between."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

Box = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins, and its shape
MAX_CELLS: Final = 1 << 26  # of a grid whose lines are the edges of all parts

MAX_ELEMENTS: Final = (1 << 63) - 1


def problem_of_parts(shape: tuple[int, ...], parts: Sequence[Box]) -> str:
    """Say what is wrong with the parts of a tensor, or nothing.

    Takes time and memory by the number of parts or cells of their grid, never by the size of the tensor.
    """
    if math.prod(shape) > MAX_ELEMENTS:
        return "has more than 2^63 elements"
    for begin, sizes in parts:
        if not len(begin) == len(sizes) == len(shape):
            return "a part has another number of dimensions"
        if any(b < 0 or n < 0 or b + n > whole for b, n, whole in zip(begin, sizes, shape, strict=True)):
            return "a part lies outside of it"
    full = [(begin, sizes) for begin, sizes in parts if math.prod(sizes)]
    if sum(math.prod(sizes) for _, sizes in full) != math.prod(shape):
        return "its parts do not make it whole"
    return _overlap(shape, full)


def _overlap(shape: tuple[int, ...], parts: Sequence[Box]) -> str:
    """Paint the parts onto the grid of their edges, one boolean for each cell."""
    if len(parts) < 2:
        return ""
    begins, sizes = (np.array([part[i] for part in parts], np.int64) for i in (0, 1))
    edges = [
        np.unique([0, whole, *low, *(low + n)])
        for whole, low, n in zip(shape, begins.T, sizes.T, strict=True)
    ]
    cut = [i for i, lines in enumerate(edges) if len(lines) > 2]
    if math.prod(len(edges[i]) - 1 for i in cut) > MAX_CELLS:
        return "its parts are cut in too many different ways"
    first = [np.searchsorted(edges[i], begins[:, i]).tolist() for i in cut]
    last = [np.searchsorted(edges[i], (begins + sizes)[:, i]).tolist() for i in cut]
    painted = np.zeros([len(edges[i]) - 1 for i in cut], np.bool_)
    for low, high in zip(zip(*first, strict=True), zip(*last, strict=True), strict=True):
        cells = painted[tuple(map(slice, low, high))]
        if cells.any():
            return "its parts overlap"
        cells[...] = True
    return ""
