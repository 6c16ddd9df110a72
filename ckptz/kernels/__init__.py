"""Array arithmetic, compiled for CPUs or in torch; tests compare it with its definition in numpy.

Numba is not imported with this package: `cpu()` returns the numpy kernels for small work, and imports the
compiled ones when a process has more to do. Their first use on a machine compiles them, with a notice.
"""

from __future__ import annotations

from typing import Any

from ckptz import lazy
from ckptz.kernels import plain
from ckptz.kernels.loaders import codec
from ckptz.kernels.loaders import moments as moments
from ckptz.kernels.loaders import rounding as rounding
from ckptz.kernels.loaders import wire as wire


def compiled() -> Any:
    """Return the compiled codec kernels, which `cpu()` returns as well from now on."""
    plain.retire()
    return codec()


def cpu() -> Any:
    """Return the codec kernels: numpy for small work, compiled ones after that."""
    return plain if plain.suffices() else codec()


def silence_notice() -> None:
    """Turn off the notice of compilation in this process, as for `ckptz warm-up`."""
    lazy.module("ckptz.kernels.cache").silence_notice()


def cache_folder() -> str | None:
    """Return the folder where compiled kernels are stored for later processes; None if there is none."""
    folder = lazy.module("ckptz.kernels.cache").writable_folder()
    return None if folder is None else str(folder)
