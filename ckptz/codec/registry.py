"""The table of methods: importing this module registers the built-in ones in `METHODS`.

A new built-in method is a file and an entry here; other packages call `register`.
"""

from __future__ import annotations

from ckptz.codec.grid import Grid
from ckptz.codec.kmeans import KMeans
from ckptz.codec.lossless import Lossless
from ckptz.codec.method import METHODS as METHODS
from ckptz.codec.method import Method
from ckptz.codec.method import register as register
from ckptz.errors import ConfigError

for _method in (Lossless, KMeans, Grid):  # fixes the order, whichever module was imported first
    METHODS[_method.name] = METHODS.pop(_method.name)


def method_named(name: str) -> type[Method]:
    """Return the method of a name.

    Raises:
        ConfigError: no method has this name.
    """
    if name not in METHODS:
        raise ConfigError(f"there is no method {name!r}; known are {', '.join(METHODS)}")
    return METHODS[name]
