"""Arithmetic on arrays, compiled for CPUs or for torch; the tests hold it against its definition in numpy.

`cpu()` and its neighbours are lazy doors: numba loads when it pays, not on import, and small work is done
without it. The first use on a machine compiles, and `notice` says so.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from ckptz.kernels import plain


def _door(module: str) -> Callable[[], Any]:
    """Make what loads compiled kernels when they are first needed."""

    @functools.cache
    def load() -> Any:
        importlib.import_module("ckptz.kernels.cache").listen()
        return importlib.import_module(f"ckptz.kernels.{module}")

    return load


_codec = _door("codec_cpu")
wire = _door("wire_cpu")
rounding = _door("rounding_cpu")  # to grids
moments = _door("moments_cpu")  # of optimizers


def compiled() -> Any:
    """Return the compiled codec kernels, and use them from now on."""
    plain.retire()
    return _codec()


def cpu() -> Any:
    """Return the codec kernels: numpy for small work, compiled ones after that."""
    return plain if plain.suffices() else _codec()


planning = cpu  # arithmetic of the encoder's choices


def silently() -> None:
    """Turn off the notice of compilation in this process, which compiles because it was asked to."""
    importlib.import_module("ckptz.kernels.cache").be_silent()


def kept_in() -> str | None:
    """Name the folder in which compiled kernels are kept for later processes; None if there is none."""
    folder = importlib.import_module("ckptz.kernels.cache").written_to()
    return None if folder is None else str(folder)
