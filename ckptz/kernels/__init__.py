"""Arithmetic on arrays, compiled for CPUs or for torch; the tests hold it against its definition in numpy.

`cpu()` and its neighbours are lazy doors: numba loads when the first chunk is encoded or decoded, not on
import. The first use on a machine compiles, and `notice` says so.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any


def _door(module: str) -> Callable[[], Any]:
    """Make what loads compiled kernels when they are first needed."""

    @functools.cache
    def load() -> Any:
        importlib.import_module("ckptz.kernels.notice").listen()
        return importlib.import_module(f"ckptz.kernels.{module}")

    return load


cpu = _door("codec_cpu")
planning = _door("planning_cpu")  # arithmetic of the encoder's choices
wire = _door("wire_cpu")
sparse = _door("sparse_cpu")  # for what changes in few places
rounding = _door("rounding_cpu")  # to grids
moments = _door("moments_cpu")  # of optimizers
