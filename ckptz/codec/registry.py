"""The table of methods: importing this module loads all of them into `METHODS`.

A new method is a file and a row here, or a call of `register`.
"""

from __future__ import annotations

from ckptz.codec.grid import Grid
from ckptz.codec.kmeans import KMeans
from ckptz.codec.lossless import Lossless
from ckptz.codec.method import METHODS as METHODS
from ckptz.codec.method import Method
from ckptz.codec.method import register as register
from ckptz.errors import ConfigError

for _method in (Lossless, KMeans, Grid):  # in this order, whichever was loaded first
    METHODS[_method.name] = METHODS.pop(_method.name)


def method_named(name: str) -> type[Method]:
    """Return the method of a name.

    Raises:
        ConfigError: there is none.
    """
    if name not in METHODS:
        raise ConfigError(f"there is no method {name!r}; known are {', '.join(METHODS)}")
    return METHODS[name]
