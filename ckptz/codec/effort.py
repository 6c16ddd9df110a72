"""Efforts: how much time an encoder spends on a smaller file. Decoding needs to know none of it.

The measurements behind the three efforts: bench/results/effort.csv, by bench/product/effort.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from ckptz.errors import ConfigError

EffortName = Literal["fast", "default", "small"]


@dataclass(frozen=True, slots=True)
class Effort:
    """Parts of an encoder that trade time for bytes.

    Attributes:
        name: of the effort.
        huffman_margin: share of bytes that a Huffman stream may take beyond an ideal coder, to be used for
            its speed; None for the smallest coder alone.
        run_gain: share of a full tensor's bytes that contexts of its runs, such as rows, must save by their
            scales to be used; None for no such contexts, also where some runs come from a narrower type.
        has_delta_contexts: whether deltas are grouped by the magnitude of the base.
        tries_xor: whether deltas may be an exclusive or; else they are ordered differences.
    """

    name: EffortName
    huffman_margin: float | None = None
    run_gain: float | None = 0.0
    has_delta_contexts: bool = True
    tries_xor: bool = True


FAST: Final = Effort(
    "fast",
    huffman_margin=0.05,
    run_gain=None,
    has_delta_contexts=False,
    tries_xor=False,
)
# What saves at least 1 % of a file for its time: bench/results/effort.csv.
DEFAULT: Final = Effort("default", huffman_margin=0.01, run_gain=0.01)
SMALL: Final = Effort("small")
EFFORTS: Final = {effort.name: effort for effort in (FAST, DEFAULT, SMALL)}


def effort_of(name: EffortName) -> Effort:
    """Look up an effort by its name.

    Raises:
        ConfigError: there is no such effort.
    """
    if name not in get_args(EffortName):
        raise ConfigError(f"effort must be one of {', '.join(EFFORTS)}, got {name!r}")
    return EFFORTS[name]
