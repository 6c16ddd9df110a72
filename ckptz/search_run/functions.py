"""Finds a user's evaluation function by name: `package.module:function` or `file.py:function`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ckptz.errors import ConfigError
from ckptz.search.measures import name_of

HOW = "give package.module:function or file.py:function"


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """A function that is loaded where it is called, in another process too."""

    text: str  # as the user wrote it

    def __post_init__(self) -> None:
        if not all(self.text.rpartition(":")):
            raise ConfigError(f"{self.text!r} names no function; {HOW}")

    def load(self) -> Callable[..., Any]:
        """Load the function's module and find it there.

        Raises:
            ConfigError: there is none; or its module fails to load.
        """
        return _load(self.text)

    def __call__(self, *args: Any) -> Any:
        """Call the function; what it prints goes to stderr, as stdout is for the report."""
        function = self.load()
        with contextlib.redirect_stdout(sys.stderr):
            return function(*args)

    @property
    def metric(self) -> str:
        """The metric's name in messages."""
        return name_of(self.load())

    @property
    def data_digest(self) -> Any:
        """A digest of the data, as the function gives it; None if it does not."""
        return getattr(self.load(), "data_digest", None)


@functools.cache
def _load(text: str) -> Callable[..., Any]:
    where, _, name = text.rpartition(":")
    try:
        module = _module_of_file(Path(where)) if where.endswith(".py") else _module_named(where)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{where}: {type(error).__name__} while it was loaded: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"{where}: has no function {name!r}; {HOW}")
    return found


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; {HOW}")
    _make_importable(str(path.absolute().parent))  # as if it were run as a script
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: cannot be loaded as Python; {HOW}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _module_named(name: str) -> ModuleType:
    _make_importable(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # found, and one of its own imports is missing
        raise ConfigError(f"no module {error.name!r} is found from {os.getcwd()}; {HOW}") from None


def _make_importable(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)
