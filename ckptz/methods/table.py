"""The table of methods: one row for each. A new method is a file and a row, or a call of `register`."""

from __future__ import annotations

from typing import Final

from ckptz.errors import ConfigError
from ckptz.methods.grid import Grid
from ckptz.methods.kmeans import KMeans
from ckptz.methods.lossless import Lossless
from ckptz.methods.method import Method

METHODS: Final[dict[str, type[Method]]] = {method.name: method for method in (Lossless, KMeans, Grid)}
AUTO: Final = "grid"  # what a search looks for unless a method is named
REFERENCE: Final = METHODS[AUTO].reference()


def register(method: type[Method]) -> type[Method]:
    """Add a method from elsewhere to the table; usable as a decorator.

    Raises:
        ConfigError: its name is taken.
    """
    if METHODS.setdefault(method.name, method) is not method:
        raise ConfigError(f"a method called {method.name!r} is registered already")
    return method


def method_named(name: str) -> type[Method]:
    """Look a method up.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in METHODS:
        raise ConfigError(f"there is no method {name!r}; known are {', '.join(METHODS)}")
    return METHODS[name]


def checked(config: object) -> Method:
    """Require a configuration of a method of the table.

    Raises:
        ConfigError: it is something else, or of a method that was not registered.
    """
    if not isinstance(config, Method):
        raise ConfigError(f"config must be a configuration such as ckptz.LOSSLESS, got {config!r}")
    if METHODS.get(config.name) is not type(config):
        raise ConfigError(f"method {config.name!r} is not registered; call ckptz.register")
    return config
