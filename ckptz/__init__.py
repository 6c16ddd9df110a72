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
    from ckptz.config import LOSSLESS, KMeans, Lossless
    from ckptz.errors import CkptzError
    from ckptz.handle import safe_open

__all__ = ["LOSSLESS", "CkptzError", "KMeans", "Lossless", "__version__", "safe_open"]

_HOMES: Final = {
    "LOSSLESS": "ckptz.config",
    "KMeans": "ckptz.config",
    "Lossless": "ckptz.config",
    "CkptzError": "ckptz.errors",
    "safe_open": "ckptz.handle",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ckptz' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
