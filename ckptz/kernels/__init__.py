"""Arithmetic on arrays, compiled for CPUs or for torch; the tests hold it against its definition in numpy.

`cpu()` and its neighbours are lazy doors: numba loads when the first chunk is encoded or decoded, not on
import. The first use on a machine compiles, and `notice` says so.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any


@functools.cache
def cpu() -> Any:
    """Load the compiled kernels."""
    _listen()
    return importlib.import_module("ckptz.kernels.codec_cpu")


@functools.cache
def planning() -> Any:
    """Load the compiled arithmetic of the encoder's choices."""
    _listen()
    return importlib.import_module("ckptz.kernels.planning_cpu")


@functools.cache
def wire() -> Any:
    """Load the compiled kernels of the wire."""
    _listen()
    return importlib.import_module("ckptz.kernels.wire_cpu")


@functools.cache
def sparse() -> Any:
    """Load the compiled kernels for what changes in few places."""
    _listen()
    return importlib.import_module("ckptz.kernels.sparse_cpu")


@functools.cache
def rounding() -> Any:
    """Load the compiled kernels that round to grids."""
    _listen()
    return importlib.import_module("ckptz.kernels.rounding_cpu")


@functools.cache
def _listen() -> None:
    importlib.import_module("ckptz.kernels.notice").listen()
