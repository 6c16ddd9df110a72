"""The compiled kernels, each module of which loads with its first use: numba takes a third of a second."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ckptz import lazy


def _door(module: str) -> Callable[[], Any]:
    @functools.cache
    def load() -> Any:
        lazy.module("ckptz.kernels.cache").listen()
        return lazy.module(f"ckptz.kernels.{module}")

    return load


codec = _door("codec_cpu")
wire = _door("wire_cpu")
rounding = _door("rounding_cpu")  # to grids
moments = _door("moments_cpu")  # of optimizers
