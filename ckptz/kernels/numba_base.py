"""What every file of numba kernels shares: how they are compiled, and constants of their integers.

Integer arithmetic is written in u64 with explicit masks: numba widens small integers, and LLVM narrows
them again when it vectorises. Kernels release the GIL, so that chunks run on threads.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import uint64

from ckptz.kernels import cache

kernel = numba.njit(cache=cache.is_kept(), nogil=True, boundscheck=False, error_model="numpy")
summing = numba.njit(cache=cache.is_kept(), nogil=True, error_model="numpy", fastmath={"reassoc"})
inlined = numba.njit(inline="always")

BLOCK = 4096  # units per pass: a block and its planes stay in the first-level cache
ONE = np.uint64(1)


@inlined
def sign_fill(unit: Any, shift: Any) -> Any:
    """Give all ones where the sign bit, `shift` places up, is set."""
    return uint64(0) - (unit >> shift)
