"""Names by which a torch checkpoint holds one tensor several times, as tied weights are.

A file stores such a tensor once; who builds a model from its names needs all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptz.codec.units import TensorSource
from ckptz.dtypes import DTYPE_NAMES
from ckptz.tree.flatten import c_strides
from ckptz.tree.leaves import TensorRef, View
from ckptz.tree.skeleton import parse_tree


def tied_names(tree: Any, tensors: Mapping[str, TensorSource]) -> dict[str, str]:
    """Give the stored names by other names of the whole tensor; views of parts of it have none."""
    if tree is None:
        return {}
    parsed = parse_tree(tree)
    found = {}
    for path, leaf in _leaves(parsed.root, ()):
        stored = leaf.name if isinstance(leaf, TensorRef) else _whole(leaf, parsed.storages, tensors)
        name = ".".join(path)
        if stored is not None and name != stored and name not in tensors:
            found[name] = stored
    return found


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], TensorRef | View]]:
    if isinstance(node, TensorRef | View):
        yield path, node
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from _leaves(value, (*path, str(key)))
    elif isinstance(node, list | tuple):
        for i, value in enumerate(node):
            yield from _leaves(value, (*path, str(i)))


def _whole(
    view: View, storages: tuple[tuple[str, ...], ...], tensors: Mapping[str, TensorSource]
) -> str | None:
    """The stored tensor that a view shows all of, as it is."""
    names = storages[view.storage]
    if len(names) != 1 or names[0] not in tensors:
        return None
    source = tensors[names[0]]
    shape = tuple(source.shape)
    whole = (DTYPE_NAMES.get(source.dtype.name), shape, c_strides(shape), 0)
    return names[0] if (view.dtype, view.shape, view.strides, view.offset) == whole else None
