"""What a caller puts into one file beside the tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptz.codec.units import TensorSource
from ckptz.container.index import BaseRef, QualityRecord, Sharding
from ckptz.container.reader import FrameSource
from ckptz.encoding.guide import Guide
from ckptz.methods.method import Choice

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Earlier:
    """A file of the same tensors, bases and guides that was written before, by another configuration.

    Attributes:
        tensors: its frames by name, open while the next file is written.
        choices: what its configuration meant for each tensor.
        notes: what its writer noted on them.
    """

    tensors: Mapping[str, FrameSource]
    choices: Mapping[str, Choice]
    notes: Mapping[str, str]

    def settled(self, choices: Mapping[str, Choice]) -> dict[str, FrameSource]:
        """Find the frames that come out the same under other choices.

        A frame follows from what is chosen for its tensor, and for the tensor that its classes depend on.
        """
        same = {name for name, choice in choices.items() if self.choices[name] == choice}
        return {
            name: self.tensors[name]
            for name in same
            if (companion := choices[name].recipe.companion) is None or companion in same
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What goes into a file beside the tensors, with every question of how decided.

    Attributes:
        metadata: the user's own, kept unchanged.
        base: the checkpoint the tensors are stored against.
        bases: its tensors by name; a tensor without a base of its dtype and shape stands alone.
        base_metadata: checksum of the metadata of a base that is a plain file; other bases hold theirs.
        step: training step, if known.
        sharding: how the source folder was split.
        tree: JSON skeleton of a nested checkpoint.
        choices: what becomes of each tensor, by name.
        guides: what planners may know of tensors beside their values, by name.
        quality: budgets that were measured on the very tensors of this file.
        earlier: a file to copy from what would be encoded to the same bytes.
    """

    metadata: Mapping[str, str] | None = None
    base: BaseRef | None = None
    bases: Mapping[str, TensorSource] = field(default_factory=dict)
    base_metadata: int | None = None
    step: int | None = None
    sharding: Sharding | None = None
    tree: dict[str, Any] | None = None
    choices: Mapping[str, Choice]
    guides: Mapping[str, Guide] = field(default_factory=dict)
    quality: Sequence[QualityRecord] = ()
    earlier: Earlier | None = None
