"""Loaders of the modules of compiled kernels, imported on first use: numba takes a third of a second."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ckptz import lazy


def _loader(module: str) -> Callable[[], Any]:
    @functools.cache
    def load() -> Any:
        lazy.module("ckptz.kernels.cache").listen()
        return lazy.module(f"ckptz.kernels.{module}")

    return load


codec = _loader("codec_cpu")
wire = _loader("wire_cpu")
rounding = _loader("rounding_cpu")
moments = _loader("moments_cpu")
