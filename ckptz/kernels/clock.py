"""A clock that stands still while kernels are compiled, so that no speed counts what is done once."""

from __future__ import annotations

import time

_compiled = [0.0]  # seconds


def working_seconds() -> float:
    """Read the clock: differences are seconds of work."""
    return time.perf_counter() - _compiled[0]


def compiled_seconds() -> float:
    """Return the seconds of this process that went into compilation."""
    return _compiled[0]


def stand_still(seconds: float) -> None:
    """Take back seconds that went into compilation."""
    _compiled[0] += seconds
