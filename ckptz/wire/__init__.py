"""Messages between pipeline stages, with the same codec as the files.

Implements spec/08-wire.md.

    from ckptz.wire import LinkPolicy, CompressLink, CompressedPipelineStage, TopK, Uniform

Names are imported lazily: only those that need torch load it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptz import lazy

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

# The module of each public name.
_HOMES: Final = {
    "CompressedPipelineStage": "stage",
    "Link": "endpoint",
    **dict.fromkeys(("LoCo", "loco_hook", "shard_with"), "ddp"),
    **dict.fromkeys(("CompressLink", "TensorLink", "simulate"), "link"),
    **dict.fromkeys(
        (
            *("PRESETS", "RAW", "LinkPolicy", "PolicyWarning", "Raw", "Tiled", "TopK", "Uniform"),
            *("check_policy", "policy_metadata", "policy_of"),
        ),
        "policy",
    ),
}
__getattr__, __dir__ = lazy.exports(__name__, _HOMES)
