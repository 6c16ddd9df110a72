"""Stores small tensors in shared frames. Implements spec/06-container.md#groups.

A frame and its header entry take more bytes and time than a few values. Groups depend only on names, dtypes
and shapes, so that a delta has the same groups as its base.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ckptz.format.bits import checksum_of_chunk
from ckptz.format.index import MAX_GROUP, TensorEntry, group_name
from ckptz.format.reader import group_base
from ckptz.format.sources import JoinedSource, TensorSource
from ckptz.write.frame_writer import FilePlan

MOST_VALUES: Final = 1024  # elements of a tensor in a group
LEAST_TENSORS: Final = 32  # small tensors of one dtype from which on they are grouped


@dataclass(frozen=True, slots=True)
class Groups:
    """The tensors of a file and their groups.

    Attributes:
        tensors: all tensors by name, in stored order.
        group_of: number of the group by tensor name; tensors with their own frame are left out.
    """

    tensors: dict[str, TensorSource]
    group_of: dict[str, int]

    def entries(self, frames: Sequence[TensorEntry]) -> list[TensorEntry]:
        """Return the index entries of all tensors, given those of the frames."""
        by_name, entries = {entry.name: entry for entry in frames}, []
        for name, source in self.tensors.items():
            if (number := self.group_of.get(name)) is None:
                entries.append(by_name[name])
                continue
            frame, shape = by_name[group_name(number)], tuple(source.shape)
            checksum = f"{checksum_of_chunk(source.patterns(0, source.n_patterns)):016x}"
            where = frame.dtype, shape, frame.offset, frame.n_bytes
            entries.append(TensorEntry(name, *where, checksum, None, number))
        return entries

    def count(self, frames: Sequence[str]) -> int:
        """Count the tensors in the frames of the given names."""
        sizes = {group_name(number): n for number, n in Counter(self.group_of.values()).items()}
        return sum(sizes.get(name, 1) for name in frames)


def grouped(plan: FilePlan, apart: Collection[str] = ()) -> tuple[FilePlan, Groups]:
    """Combine the small tensors of a plan into groups; the frame of a group is named like its region.

    Args:
        plan: plan of the file with a frame for each tensor.
        apart: names of tensors that keep their own frames.
    """
    groups = _groups_of(plan, apart)
    group_of = {name: number for number, names in enumerate(groups) for name in names}
    joined = Groups(plan.tensors, group_of)
    if not groups:
        return plan, joined
    sources = [JoinedSource.of([plan.tensors[name] for name in names]) for names in groups]
    tensors = dict[str, TensorSource]()
    for name, source in plan.tensors.items():
        number = group_of.get(name)
        tensors[name if number is None else group_name(number)] = (
            source if number is None else sources[number]
        )
    bases, recipes = dict(plan.job.bases), dict(plan.recipes)
    for number, names in enumerate(groups):
        recipes[group_name(number)] = plan.recipes[names[0]]
        members = [(name, tuple(plan.tensors[name].shape)) for name in names]
        if (base := group_base(sources[number].dtype, members, plan.job.bases)) is not None:
            bases[group_name(number)] = base
    return replace(plan, job=replace(plan.job, tensors=tensors, bases=bases), recipes=recipes), joined


def _groups_of(plan: FilePlan, apart: Collection[str]) -> list[list[str]]:
    """Choose the tensors of each group; groups are ordered by their first tensor."""
    small: dict[tuple[str, int], list[tuple[str, int]]] = {}  # names and numbers of patterns
    for name, source in plan.tensors.items():
        recipe, n_patterns = plan.recipes[name], source.n_patterns
        if 0 < n_patterns <= MOST_VALUES and recipe.is_batched and name not in apart:
            # Methods give equal recipes as one object, and hashing one takes longer than all else here.
            small.setdefault((source.dtype.name, id(recipe)), []).append((name, n_patterns))
    groups: list[list[str]] = []
    for members in small.values():
        left = 0
        for name, n_patterns in members if len(members) >= LEAST_TENSORS else ():
            if n_patterns > left:
                groups.append([])
                left = MAX_GROUP
            groups[-1].append(name)
            left -= n_patterns
    places = {name: place for place, name in enumerate(plan.tensors)}
    return sorted(groups, key=lambda names: places[names[0]])
