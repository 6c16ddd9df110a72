"""Messages between pipeline stages, with the same codec as the files.

Implements spec/08-wire.md.

    from ckptz.wire import LinkPolicy, CompressLink, CompressedPipelineStage, TopK, Uniform

Names come when they are asked for, so that only what needs torch loads it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ckptz.wire.ddp import LoCo, loco_hook, shard_with
    from ckptz.wire.endpoint import Link
    from ckptz.wire.link import CompressLink, TensorLink, simulate
    from ckptz.wire.policy import (
        PRESETS,
        RAW,
        LinkPolicy,
        PolicyWarning,
        Raw,
        Tiled,
        TopK,
        Uniform,
        check_policy,
        policy_metadata,
        policy_of,
    )
    from ckptz.wire.stage import CompressedPipelineStage

__all__ = [
    "PRESETS",
    "RAW",
    "CompressLink",
    "CompressedPipelineStage",
    "Link",
    "LinkPolicy",
    "LoCo",
    "PolicyWarning",
    "Raw",
    "TensorLink",
    "Tiled",
    "TopK",
    "Uniform",
    "check_policy",
    "loco_hook",
    "policy_metadata",
    "policy_of",
    "shard_with",
    "simulate",
]

_HOMES: Final = ("policy", "endpoint", "link", "stage", "ddp")  # the last three need torch


def __getattr__(name: str) -> Any:
    for home in _HOMES if name in __all__ else ():
        module = importlib.import_module(f"ckptz.wire.{home}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module 'ckptz.wire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
