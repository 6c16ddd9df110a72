"""Efforts: how much time an encoder spends on a smaller file. Decoding does not depend on it.

Measured by bench/product/effort.py: bench/results/effort.csv.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from ckptz.errors import ConfigError

EffortName = Literal["fast", "default", "small"]


@dataclass(frozen=True, slots=True)
class Effort:
    """Encoder settings that trade time for bytes.

    Attributes:
        name: name of the effort.
        huffman_margin: share of bytes that a Huffman stream may exceed an ideal coder by, for its speed;
            None to use the smallest coder always.
        run_gain: share of the bytes of a tensor without base that frequency tables by scale of its runs, such
            as rows, must save to be used; None to use no contexts by run.
        delta_gain: share of the bytes of a tensor that a base, and then contexts by its magnitude, must save
            to be used; None to use a base without contexts.
        product_rank: largest rank of the products that are contexts of codes of 8-bit optimizers; 0 for none.
        tries_xor: whether a delta may be an exclusive or; else it is an ordered difference.
    """

    name: EffortName
    huffman_margin: float | None = None
    run_gain: float | None = 0.0
    delta_gain: float | None = 0.0
    product_rank: int = 32
    tries_xor: bool = True


FAST: Final = Effort(
    "fast",
    huffman_margin=0.05,
    run_gain=None,
    delta_gain=None,
    product_rank=0,
    tries_xor=False,
)
# All steps that save at least 1 % of a file in relation to their time: bench/results/effort.csv.
DEFAULT: Final = Effort("default", huffman_margin=0.01, run_gain=0.01, delta_gain=0.01, product_rank=16)
SMALL: Final = Effort("small")
EFFORTS: Final = {effort.name: effort for effort in (FAST, DEFAULT, SMALL)}


def effort_of(name: EffortName) -> Effort:
    """Look up an effort by its name.

    Raises:
        ConfigError: no effort has this name.
    """
    if name not in get_args(EffortName):
        raise ConfigError(f"effort must be one of {', '.join(EFFORTS)}, got {name!r}")
    return EFFORTS[name]
