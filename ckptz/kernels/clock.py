"""A clock that stops while kernels are compiled, so that reported speeds do not include compilation."""

from __future__ import annotations

import time

_compiled = [0.0]  # seconds


def working_seconds() -> float:
    """Return a time in seconds whose differences exclude compilation."""
    return time.perf_counter() - _compiled[0]


def compiled_seconds() -> float:
    """Return the seconds that this process has spent on compilation."""
    return _compiled[0]


def exclude(seconds: float) -> None:
    """Subtract seconds of compilation from `working_seconds`."""
    _compiled[0] += seconds
