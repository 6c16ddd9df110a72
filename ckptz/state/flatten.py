"""Converts nested torch state to named tensors and a tree, and back. Implements spec/09-tree.md#storages.

Within a torch storage, views whose bytes overlap are stored as one tensor, all others as separate tensors, so
that names and shapes of the checkpoint are kept where possible.

When a state is restored, its tensors are decoded into an unnamed file that is mapped into memory: torch can
save from there, and the memory of the process does not grow with the checkpoint.
"""

from __future__ import annotations

import functools
import itertools
import math
import mmap
import os
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ckptz.errors import CkptzError, CorruptionError, UnsupportedError
from ckptz.format.dtypes import DTYPE_NAMES, DTYPES
from ckptz.format.index import is_reserved
from ckptz.format.sources import PATTERN_TYPES, ArraySource, LazySource, TensorSource
from ckptz.kernels.floats import Patterns
from ckptz.state.arrays import c_strides
from ckptz.state.skeleton import (
    DTypeName,
    Size,
    TensorRef,
    Tree,
    TreePath,
    View,
    pack_node,
    parse_tree,
    refuse_leaf,
    type_name,
    where,
    with_leaves,
)

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage

PART_ALIGNMENT: Final = 16  # normative, spec/09-tree.md#storages; the largest element is 16 bytes

# torch dtypes that the format has; tensors of other dtypes are stored as bytes. F4 is left out, because torch
# packs two elements into one, so that its strides differ from those in the file.
CODES: Final[Mapping[str, str]] = {name: code for code, name in DTYPE_NAMES.items() if code != "F4"}


@dataclass(frozen=True)
class Geometry:
    """Offset, shape and strides of a tensor in its storage, in elements."""

    dtype: str
    item_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @cached_property
    def n_items(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)

    @cached_property
    def span(self) -> int:
        """Number of elements from the first to the last one in memory."""
        steps = zip(self.shape, self.strides, strict=True)
        return sum((n - 1) * stride for n, stride in steps) + 1 if self.n_items else 0

    @property
    def begin(self) -> int:
        """Offset of the first byte of the tensor in its storage."""
        return self.offset * self.item_bytes

    @property
    def end(self) -> int:
        """Offset after the last byte of the tensor in its storage."""
        return self.begin + self.span * self.item_bytes

    def _steps(self) -> list[tuple[int, int]]:
        return [(stride, n) for n, stride in zip(self.shape, self.strides, strict=True) if n > 1]

    @cached_property
    def is_contiguous(self) -> bool:
        """True if the elements are in C order without gaps."""
        return not self.n_items or (self.is_dense and self._steps() == sorted(self._steps(), reverse=True))

    @cached_property
    def is_dense(self) -> bool:
        """True if every element of the span belongs to exactly one index."""
        return not self.n_items or (self.is_injective and self.span == self.n_items)

    @cached_property
    def is_injective(self) -> bool:
        """True if no two indices share an element: each stride exceeds the span of all smaller ones."""
        reach = 0
        for stride, n in sorted(self._steps()):
            if stride <= reach:
                return False
            reach += stride * (n - 1)
        return True


@dataclass(frozen=True, slots=True)
class Flat:
    """A nested state as named tensors and a tree."""

    tensors: dict[str, TensorSource]  # by name
    tree: dict[str, Any]  # for `Index.tree`
    outer: dict[str, TreePath]  # by tensor, the outer levels of its path that are not in its name


@dataclass(slots=True)
class _Leaf:
    """A tensor of the state; `node` is set once its storage is decided."""

    path: TreePath
    tensor: Tensor
    geometry: Geometry
    node: dict[str, Any]

    @property
    def flags(self) -> tuple[bool, bool]:
        return self.tensor.requires_grad, type(self.tensor).__name__ == "Parameter"


def flatten(state: Any, n_outer: int = 0, taken: Collection[str] = ()) -> Flat:
    """Convert a nested state to named tensors and a tree; the tensors share its memory.

    Args:
        state: nested containers, as `torch.load` returns them.
        n_outer: number of outer levels whose keys are not part of tensor names.
        taken: names of other tensors in the file.

    Raises:
        UnsupportedError: a value of a type that the tree cannot represent.
    """
    leaves: list[_Leaf] = []

    def leaf(value: Any, path: TreePath) -> dict[str, Any]:
        if type_name(value) == "torch.Size":
            return {"Size": list(value)}
        if type_name(value) == "torch.dtype":
            return {"dtype": str(value).removeprefix("torch.")}
        tensor = _checked_tensor(value, path)
        leaves.append(_Leaf(path, tensor, geometry_of(tensor), {}))
        return leaves[-1].node

    root = pack_node(state, leaf)
    groups: dict[tuple[int, int, int], list[_Leaf]] = {}  # by storage
    for each in leaves:
        memory = each.tensor.untyped_storage()
        # Empty storages have no address, so each is considered separate.
        place = (memory.data_ptr(), memory.nbytes(), 0)
        key = place if each.geometry.n_items else (0, 0, id(each.tensor))
        groups.setdefault(key, []).append(each)
    storing = _Storing(n_outer, taken)
    for group in groups.values():
        storing.add(group)
    return Flat(storing.tensors, {"root": root, "storages": storing.storages}, storing.outer)


def _checked_tensor(value: Any, path: TreePath) -> Tensor:
    # Exact types only, as subclasses may behave differently.
    if type_name(value) not in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        refuse_leaf(value, path)
    tensor: Tensor = value
    if str(tensor.layout) != "torch.strided" or tensor.is_quantized or tensor.is_nested:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        what = "quantized" if tensor.is_quantized else layout
        raise UnsupportedError(f"{where(path)}: a {what} tensor; make it a dense tensor before saving")
    if tensor.device.type != "cpu":
        raise UnsupportedError(f"{where(path)}: a tensor on device {tensor.device}; move it to the CPU")
    if attributes := vars(tensor):
        raise UnsupportedError(f"{where(path)}: a tensor with an attribute {next(iter(attributes))!r}")
    # Conjugate and negative bits mean that the operation is pending; the memory has other values.
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def geometry_of(tensor: Tensor) -> Geometry:
    """Return the geometry of a tensor in its storage."""
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    return Geometry(dtype, tensor.element_size(), shape, tuple(tensor.stride()), int(tensor.storage_offset()))


def _memory(tensor: Tensor) -> NDArray[np.uint8]:
    # torch has been imported, as there is a tensor. numpy lacks some of its dtypes, so bytes are used.
    import torch

    raw = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
    return np.asarray(raw.numpy())


@dataclass(slots=True)
class _SharedRun:
    """Bytes of a storage that are stored as one tensor because views of them overlap."""

    begin: int
    end: int
    members: list[_Leaf]


def _runs(group: Sequence[_Leaf]) -> list[_SharedRun]:
    runs: list[_SharedRun] = []
    for each in sorted(group, key=lambda each: (each.geometry.begin, -each.geometry.end)):
        begin, end = each.geometry.begin, each.geometry.end
        if runs and begin < runs[-1].end:
            runs[-1].end = max(runs[-1].end, end)
            runs[-1].members.append(each)
        else:
            runs.append(_SharedRun(begin, end, [each]))
    for run in runs:
        if len({each.geometry.item_bytes for each in run.members}) > 1:
            run.begin -= run.begin % PART_ALIGNMENT  # keeps elements aligned
    return runs


def part_offsets(sizes: Iterable[int]) -> list[int]:
    """Return the offsets of the parts of a storage in bytes, followed by the end of the last one."""
    aligned = (-(-size // PART_ALIGNMENT) * PART_ALIGNMENT for size in sizes)
    return [0, *itertools.accumulate(aligned)]


@dataclass(slots=True)
class _Storing:
    """Assigns stored tensors to the views of storages, one storage after another."""

    n_outer: int
    taken: Collection[str]
    tensors: dict[str, TensorSource] = field(default_factory=dict)
    outer: dict[str, TreePath] = field(default_factory=dict)
    storages: list[list[str]] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)

    def add(self, group: list[_Leaf]) -> None:
        """Store the tensors of a storage: one tensor if they are equal, else one for each run of bytes."""
        geometry = group[0].geometry
        is_alone = len({each.geometry for each in group}) == 1
        if is_alone and geometry.dtype in CODES and geometry.is_injective:
            name = self._name(group[0].path)
            self.tensors[name] = _source(group[0])
            # Gaps between elements are not stored, as no view shows them.
            is_plain = geometry.is_contiguous or not geometry.is_dense
            for each in group:
                ref = TensorRef(name, None if is_plain else geometry.strides, *each.flags)
                each.node.update(ref.pack())
            return
        runs, memory = _runs(group), _memory(group[0].tensor)
        for run, at in zip(runs, part_offsets(run.end - run.begin for run in runs), strict=False):
            for each in run.members:
                g = each.geometry
                offset = (g.begin + at - run.begin) // g.item_bytes
                view = View(len(self.storages), g.dtype, g.shape, g.strides, offset, *each.flags)
                each.node.update(view.pack())
        self.storages.append([self._add_run(run, memory) for run in runs])

    def _name(self, path: TreePath, suffix: str = "") -> str:
        base = (".".join(path[self.n_outer :]) or "tensor") + suffix
        if is_reserved(base):
            base = f"tensor.{base}"
        name = base
        while name in self.tensors or name in self.taken:
            self._counts[base] += 1
            name = f"{base}~{self._counts[base] + 1}"
        self.outer[name] = path[: self.n_outer]
        return name

    def _add_run(self, run: _SharedRun, memory: NDArray[np.uint8]) -> str:
        """Store a run, as the view that covers all of it in C order if there is one; return its name."""
        for member in run.members:
            g = member.geometry
            if (g.begin, g.end) == (run.begin, run.end) and g.is_contiguous and g.dtype in CODES:
                name = self._name(member.path)
                self.tensors[name] = _source(member)
                return name
        dtypes = {member.geometry.dtype for member in run.members}
        dtype = DTYPES[CODES.get(dtypes.pop(), "U8") if len(dtypes) == 1 else "U8"]
        name, shape = self._name(run.members[0].path, ".storage"), ((run.end - run.begin) * 8 // dtype.bits,)
        self.tensors[name] = ArraySource.from_buffer(dtype, shape, memory[run.begin : run.end])
        return name


def _source(each: _Leaf) -> TensorSource:
    g, memory = each.geometry, _memory(each.tensor)
    dtype = DTYPES[CODES[g.dtype]]
    if g.is_contiguous:
        return ArraySource.from_buffer(dtype, g.shape, memory[g.begin : g.end])
    strides = tuple(stride * g.item_bytes for stride in g.strides)
    items: NDArray[Any] = np.ndarray(g.shape, PATTERN_TYPES[g.item_bytes], memory, g.begin, strides)
    return LazySource(dtype, g.shape, functools.partial(_in_order, items, dtype.pattern_bytes))


def _in_order(items: NDArray[Any], pattern_bytes: int, begin: int, end: int) -> NDArray[Any]:
    """Return patterns begin..end, in C order, of elements with other strides; one integer per element."""
    n_per_item = items.itemsize // pattern_bytes
    first, last = begin // n_per_item, -(-end // n_per_item)
    patterns = items.flat[first:last].view(PATTERN_TYPES[pattern_bytes])
    return patterns[begin - first * n_per_item : end - first * n_per_item]


def tied_names(tree: Any, tensors: Mapping[str, TensorSource]) -> dict[str, str]:
    """Map each further name of a complete stored tensor to its stored name; partial views are left out."""
    if tree is None:
        return {}
    parsed = parse_tree(tree)
    stored_name = {}
    for path, leaf in _leaves(parsed.root, ()):
        stored = leaf.name if isinstance(leaf, TensorRef) else _whole(leaf, parsed.storages, tensors)
        name = ".".join(path)
        if stored is not None and name != stored and name not in tensors:
            stored_name[name] = stored
    return stored_name


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
    """Return the name of the stored tensor that a view covers completely in C order, or None."""
    names = storages[view.storage]
    if len(names) != 1 or names[0] not in tensors:
        return None
    source = tensors[names[0]]
    shape = tuple(source.shape)
    whole = (DTYPE_NAMES.get(source.dtype.name), shape, c_strides(shape), 0)
    return names[0] if (view.dtype, view.shape, view.strides, view.offset) == whole else None


# --- restoring nested state ---------------------------------------------------------------------

ALIGNMENT: Final = 64  # of each storage in the mapped file, as in torch files
TORCH_NAMES: Final = {code: name for name, code in CODES.items()}


NO_BUFFERS: Final[Mapping[str, Patterns]] = {}


class Chunks(Protocol):
    """Yields the patterns of all tensors in order, chunk by chunk [at most 2^20]."""

    def __call__(
        self, tensors: Mapping[str, TensorSource], buffers: Mapping[str, Patterns] = NO_BUFFERS
    ) -> Iterator[Patterns]:
        """Decode tensors, those with a buffer [n_patterns] into it: then its slices are yielded."""
        ...


def read_chunk(source: TensorSource, begin: int, end: int, buffer: Patterns | None) -> Patterns:
    """Read the patterns of one chunk, into the same place of a buffer [n_patterns] if there is one."""
    if buffer is None:
        return source.patterns(begin, end)
    out = buffer[begin:end]
    source.fill(begin, out)
    return out


def read_chunks(
    tensors: Mapping[str, TensorSource], buffers: Mapping[str, Patterns] = NO_BUFFERS
) -> Iterator[Patterns]:
    """Decode tensors on the caller's thread, into buffers [n_patterns] where given; see `Chunks`."""
    for name, source in tensors.items():
        for begin, end in source.chunk_bounds():
            yield read_chunk(source, begin, end, buffers.get(name))


def unflatten(
    tensors: Mapping[str, TensorSource], tree: Any, folder: Path | None, chunks: Chunks = read_chunks
) -> Any:
    """Restore a nested state; its tensors are in an unnamed file as long as they are referenced.

    Args:
        tensors: tensors by name.
        tree: `Index.tree`, or None for a flat dict of the tensors.
        folder: folder for the unnamed file, which is as large as the decoded tensors; None for memory.
        chunks: decodes the tensors.

    Raises:
        CorruptionError: the tree is invalid or does not match the tensors.
        UnsupportedError: this version of torch lacks a dtype.
        OSError: `folder` has not enough free space.
    """
    flat = {"storages": [], "root": {"dict": [[name, {"tensor": name}] for name in tensors]}}
    parsed = parse_tree(flat if tree is None else tree)
    parsed.check_names(tensors)
    storages = _MappedStorages(tensors, parsed, folder)
    storages.fill(chunks)
    return with_leaves(parsed.root, storages.make)


class _MappedStorages:
    """The mapped file, with a region for each storage."""

    def __init__(self, tensors: Mapping[str, TensorSource], tree: Tree, folder: Path | None) -> None:
        self._tensors = tensors
        self._strides = _strides_by_name(tree, tensors)
        self._offsets: dict[str, int] = {}  # by tensor
        self._regions: dict[str | int, tuple[int, int]] = {}  # by tensor name or storage number
        self._storages: dict[str | int, UntypedStorage] = {}
        self._made: dict[TensorRef | View, Tensor] = {}
        shared = {name for names in tree.storages for name in names}
        storages: dict[str | int, tuple[str, ...]] = dict(enumerate(tree.storages))
        storages |= {name: (name,) for name in tensors if name not in shared}
        at = 0
        for key, names in storages.items():
            sizes = [tensors[name].n_bytes for name in names]
            offsets = part_offsets(sizes)
            self._offsets |= {name: at + offset for name, offset in zip(names, offsets, strict=False)}
            n_bytes = offsets[-2] + sizes[-1] if sizes else 0
            self._regions[key] = (at, n_bytes)
            at += -(-n_bytes // ALIGNMENT) * ALIGNMENT
        self._memory = _mapped_file(folder, at)

    def fill(self, chunks: Chunks) -> None:
        """Decode all tensors into the file, through a chunk in memory where the order of elements differs."""
        buffers = {
            name: self._memory[self._offsets[name] :][: source.n_bytes].view(
                PATTERN_TYPES[source.dtype.pattern_bytes]
            )
            for name, source in self._tensors.items()
            if name not in self._strides
        }
        decoded = chunks(self._tensors, buffers)
        for name, source in self._tensors.items():
            items = None if name in buffers else self._items(name, source)
            for begin, end in source.chunk_bounds():
                patterns = next(decoded)
                if items is not None:
                    n = items.itemsize // patterns.itemsize
                    items.flat[begin // n : end // n] = patterns.view(items.dtype)

    def _items(self, name: str, source: TensorSource) -> Patterns:
        """Return the elements of a tensor with strides."""
        item = PATTERN_TYPES[source.dtype.bits // 8]
        steps = tuple(stride * item.itemsize for stride in self._strides[name])
        return np.ndarray(source.shape, item, self._memory, self._offsets[name], steps)

    def make(self, leaf: Any) -> Any:
        """Return the torch value for a leaf of the tree."""
        import torch

        if isinstance(leaf, Size):
            return torch.Size(leaf.dims)
        if isinstance(leaf, DTypeName):
            return _torch_dtype(leaf.name)
        if leaf not in self._made:
            self._made[leaf] = self._tensor(leaf)
        return self._made[leaf]

    def _tensor(self, ref: TensorRef | View) -> Tensor:
        import torch

        label = repr(ref.name) if isinstance(ref, TensorRef) else f"in storage {ref.storage}"
        try:
            key, geometry = self._geometry(ref)
            if geometry.end > self._regions[key][1]:
                raise CorruptionError("reaches beyond its storage")
            tensor = torch.empty(0, dtype=_torch_dtype(geometry.dtype), device="cpu")
            tensor = tensor.set_(self._storage(key), geometry.offset, geometry.shape, geometry.strides)
            if ref.is_parameter:
                return torch.nn.Parameter(tensor, ref.requires_grad)
            return tensor.requires_grad_(ref.requires_grad)
        except CkptzError as error:
            raise type(error)(f"tree: tensor {label}: {error}") from None
        except RuntimeError as error:
            raise CorruptionError(f"tree: tensor {label}: {str(error).splitlines()[0]}") from None

    def _geometry(self, ref: TensorRef | View) -> tuple[str | int, Geometry]:
        if isinstance(ref, View):
            item_bytes = _torch_dtype(ref.dtype).itemsize
            return ref.storage, Geometry(ref.dtype, item_bytes, ref.shape, ref.strides, ref.offset)
        source = self._tensors[ref.name]
        code, shape = source.dtype.name, tuple(source.shape)
        if code == "F4" and shape and shape[-1] % 2 == 0:
            name, shape = "float4_e2m1fn_x2", (*shape[:-1], shape[-1] // 2)  # as safetensors does
        elif code in TORCH_NAMES:
            name = TORCH_NAMES[code]
        else:
            raise UnsupportedError(f"torch has no dtype {code}; restore to safetensors")
        strides = c_strides(shape) if ref.strides is None else ref.strides
        return ref.name, Geometry(name, _torch_dtype(name).itemsize, shape, strides, 0)

    def _storage(self, key: str | int) -> UntypedStorage:
        import torch

        if key not in self._storages:
            at, n_bytes = self._regions[key]
            # torch.save identifies storages by address. An empty region would have the address of the next
            # one, so a separate empty tensor, without address, is used.
            region = (
                torch.from_numpy(self._memory[at : at + n_bytes])
                if n_bytes
                else torch.empty(0, dtype=torch.uint8, device="cpu")
            )
            self._storages[key] = region.untyped_storage()
        return self._storages[key]


def _mapped_file(folder: Path | None, n_bytes: int) -> NDArray[np.uint8]:
    if folder is None or not n_bytes:
        return np.zeros(n_bytes, np.uint8)
    with tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):
            # A full disk must raise an error here; a write to the mapped file would kill the process.
            os.posix_fallocate(file.fileno(), 0, n_bytes)
        else:
            file.truncate(n_bytes)
        return np.frombuffer(mmap.mmap(file.fileno(), n_bytes), np.uint8)


def _strides_by_name(tree: Tree, tensors: Mapping[str, TensorSource]) -> dict[str, tuple[int, ...]]:
    strides: dict[str, tuple[int, ...] | None] = {}
    for ref in tree.refs:
        if isinstance(ref, TensorRef):
            if strides.setdefault(ref.name, ref.strides) != ref.strides:
                raise CorruptionError(f"tree: tensor {ref.name!r} has different strides in two places")
            source = tensors[ref.name]
            if ref.strides is not None and source.dtype.name not in TORCH_NAMES:
                raise CorruptionError(
                    f"tree: tensor {ref.name!r}: strides are not supported for {source.dtype.name}"
                )
            check_strides(ref, tuple(source.shape))
    return {name: tensor_strides for name, tensor_strides in strides.items() if tensor_strides is not None}


def check_strides(ref: TensorRef, shape: tuple[int, ...]) -> None:
    """Check that the strides of a stored tensor of this shape reach every element of its memory once.

    Raises:
        CorruptionError: they do not.
    """
    if ref.strides is None:
        return
    if len(shape) != len(ref.strides) or not Geometry("", 1, shape, ref.strides, 0).is_dense:
        raise CorruptionError(f"tree: tensor {ref.name!r}: strides {list(ref.strides)} do not fit its shape")


def _torch_dtype(name: str) -> Any:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(f"this version of torch has no dtype {name!r}; install a newer one")
    return dtype
