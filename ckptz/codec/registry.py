"""Loads all methods, so that `METHODS` has them.

A new method is a file and a row here, or a call of `register`.
"""

from __future__ import annotations

from typing import Final

from ckptz.codec.grid import Grid
from ckptz.codec.kmeans import KMeans
from ckptz.codec.lossless import Lossless
from ckptz.codec.method import METHODS as METHODS
from ckptz.codec.method import Method
from ckptz.codec.method import register as register
from ckptz.errors import ConfigError

for _method in (Lossless, KMeans, Grid):  # in this order, whichever was loaded first
    METHODS[_method.name] = METHODS.pop(_method.name)
AUTO: Final = "grid"  # what a search looks for unless a method is named
REFERENCE: Final = METHODS[AUTO].reference()


def method_named(name: str) -> type[Method]:
    """Look a method up.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in METHODS:
        raise ConfigError(f"there is no method {name!r}; known are {', '.join(METHODS)}")
    return METHODS[name]
