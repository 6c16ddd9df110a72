"""ckptz: checkpoint compression that loads like safetensors.

    from ckptz.torch import load_file, save_file
    from ckptz import safe_open

Nothing heavy loads with this module: names come when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from ckptz._version import __version__

if TYPE_CHECKING:
    from ckptz.api.safe_open import safe_open
    from ckptz.errors import CkptzError
    from ckptz.methods.grid import Grid
    from ckptz.methods.kmeans import KMeans
    from ckptz.methods.lossless import LOSSLESS, Lossless
    from ckptz.search.agreement import Agreement
    from ckptz.search.budget import Budget
    from ckptz.search.resumption import ResumeProbe
    from ckptz.store.retention import KeepPolicy, KeepRules
    from ckptz.training.checkpointer import Checkpointer

__all__ = [
    "LOSSLESS",
    "Agreement",
    "Budget",
    "Checkpointer",
    "CkptzError",
    "Grid",
    "KMeans",
    "KeepPolicy",
    "KeepRules",
    "Lossless",
    "ResumeProbe",
    "__version__",
    "safe_open",
]

_HOMES: Final = {
    "LOSSLESS": "ckptz.methods.lossless",
    "Agreement": "ckptz.search.agreement",
    "Budget": "ckptz.search.budget",
    "ResumeProbe": "ckptz.search.resumption",
    "Grid": "ckptz.methods.grid",
    "KMeans": "ckptz.methods.kmeans",
    "Lossless": "ckptz.methods.lossless",
    "CkptzError": "ckptz.errors",
    "safe_open": "ckptz.api.safe_open",
    "Checkpointer": "ckptz.training.checkpointer",
    "KeepPolicy": "ckptz.store.retention",
    "KeepRules": "ckptz.store.retention",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ckptz' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
