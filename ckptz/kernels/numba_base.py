"""Decorators and integer constants shared by all numba kernels.

Integer arithmetic is written in u64 with explicit masks: numba widens small integers, and LLVM narrows
them again when it vectorises. Kernels release the GIL, so that threads process chunks in parallel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import uint64

from ckptz.kernels.cache import CachedKernels


def _compiled(**options: Any) -> Callable[[Any], Any]:
    """Return a decorator that compiles a function on its first call and caches the result on disk."""
    options |= {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}  # never called from C

    def of(function: Any) -> Any:
        dispatcher: Any = numba.njit(**options)(function)
        dispatcher._cache = CachedKernels(function)  # numba's is keyed by path and time of a source file
        return dispatcher

    return of


kernel = _compiled(boundscheck=False)
part = _compiled(boundscheck=False, no_cpython_wrapper=True)  # called by kernels only, not from Python
summing = _compiled(fastmath={"reassoc"})
summing_part = _compiled(fastmath={"reassoc"}, no_cpython_wrapper=True)
inlined = numba.njit(inline="always")

BLOCK = 4096  # patterns per pass: a block and its planes stay in the first-level cache
ONE = np.uint64(1)


@inlined
def sign_fill(pattern: Any, shift: Any) -> Any:
    """Return a word of all ones if the sign bit, bit number `shift`, is set; else 0."""
    return uint64(0) - (pattern >> shift)
