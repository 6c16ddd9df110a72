"""Kernels: arrays in, arrays out. `reference` is the meaning, `cpu` and `torch` are fast.

`cpu()` is the one lazy door: numba loads when the first chunk is encoded or decoded, not on import.
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any


@functools.cache
def cpu() -> Any:
    """The compiled kernels. The first call on a machine compiles them and says so on stderr."""
    cached = any((Path(__file__).parent / "__pycache__").glob("cpu.*.nbi"))
    if not cached and sys.stderr.isatty():
        print("ckptz: compiling kernels, once on this machine (about 20 s)", file=sys.stderr)
    return importlib.import_module("ckptz.kernels.cpu")


@functools.cache
def planning() -> Any:
    """The compiled arithmetic of the encoder's choices."""
    return importlib.import_module("ckptz.kernels.planning")
