"""What a caller puts into one file beside the tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ckptz.codec.units import UnitSource
from ckptz.config import LOSSLESS, Config
from ckptz.container.index import BaseRef, Sharding
from ckptz.roles import Rule

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Contents:
    """What goes into a file beside the tensors.

    Attributes:
        metadata: the user's own, kept unchanged.
        base: the checkpoint the tensors are stored against.
        bases: its tensors by name; a tensor without a base of its dtype and shape stands alone.
        step: training step, if known.
        sharding: how the source folder was split.
        tree: JSON skeleton of a nested checkpoint.
        config: lossless, or how weights become lossy.
        role_rules: the user's rows of the table of roles.
    """

    metadata: Mapping[str, str] | None = None
    base: BaseRef | None = None
    bases: Mapping[str, UnitSource] = field(default_factory=dict)
    step: int | None = None
    sharding: Sharding | None = None
    tree: object = None
    config: Config = LOSSLESS
    role_rules: Sequence[Rule] = ()
