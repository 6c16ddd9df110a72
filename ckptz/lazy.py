"""Imports on first use: of optional libraries, and of modules that few calls need.

No other module imports by name, so that the architecture test can find every such import.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def module(name: str) -> Any:
    """Import a module by its full name.

    Raises:
        ImportError: the module is not installed, or cannot be loaded.
    """
    return importlib.import_module(name)


def needs_extra(error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    """Return the error for a missing library with the command that installs it."""
    return ModuleNotFoundError(f"{error}; install it with: pip install 'ckptz[{extra}]'", name=error.name)


def exports(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package whose public names are imported on first use.

    Args:
        package: name of the package.
        homes: by public name, the module below the package that defines it.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(module(f"{package}.{homes[name]}"), name)
        except ModuleNotFoundError as error:
            raise needs_extra(error, "torch") if error.name == "torch" else error from None

    def names() -> list[str]:
        return sorted({*vars(module(package)), *homes})

    return get, names
