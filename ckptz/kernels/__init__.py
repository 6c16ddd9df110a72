"""Array arithmetic, compiled for CPUs or in torch; tests compare it with its definition in numpy.

`cpu()` is a lazy door, as those of `doors` are: numba loads when it pays, not on import, and small work is
done without it. The first use on a machine compiles, and `notice` says so.
"""

from __future__ import annotations

from typing import Any

from ckptz import lazy
from ckptz.kernels import plain
from ckptz.kernels.doors import codec
from ckptz.kernels.doors import moments as moments
from ckptz.kernels.doors import rounding as rounding
from ckptz.kernels.doors import wire as wire


def compiled() -> Any:
    """Return the compiled codec kernels, and use them from now on."""
    plain.retire()
    return codec()


def cpu() -> Any:
    """Return the codec kernels: numpy for small work, compiled ones after that."""
    return plain if plain.suffices() else codec()


planning = cpu  # arithmetic of the encoder's choices


def silently() -> None:
    """Turn off the notice of compilation in this process, which compiles because it was asked to."""
    lazy.module("ckptz.kernels.cache").be_silent()


def kept_in() -> str | None:
    """Return the folder that keeps compiled kernels for later processes; None if there is none."""
    folder = lazy.module("ckptz.kernels.cache").written_to()
    return None if folder is None else str(folder)
