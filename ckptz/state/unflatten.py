"""Named tensors and a tree back to nested torch state. Inverse of `flatten.py`.

The tensors are decoded into an unnamed file that is mapped into memory: torch can save from there, and
the memory that the process needs of its own does not grow with the checkpoint.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptz.errors import CkptzError, CorruptionError, UnsupportedError
from ckptz.format.sources import PATTERN_TYPES, TensorSource
from ckptz.kernels.floats import Patterns
from ckptz.state.flatten import CODES, Geometry, part_offsets
from ckptz.state.skeleton import DTypeName, Size, TensorRef, Tree, View, parse_tree
from ckptz.state.window import c_strides

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage

Chunks = Callable[[Mapping[str, TensorSource]], Iterator[Patterns]]

ALIGNMENT: Final = 64  # of each storage in the file, as torch aligns them in its own
TORCH_NAMES: Final = {code: name for name, code in CODES.items()}


def read_chunks(tensors: Mapping[str, TensorSource]) -> Iterator[Patterns]:
    """Read the patterns of all tensors, chunk after chunk, on the caller's own thread."""
    for source in tensors.values():
        for begin, end in source.chunk_bounds():
            yield source.patterns(begin, end)


def unflatten(
    tensors: Mapping[str, TensorSource], tree: Any, folder: Path | None, chunks: Chunks = read_chunks
) -> Any:
    """Put a nested state together again; its tensors lie in an unnamed file until they are dropped.

    Args:
        tensors: by name.
        tree: `Index.tree`, or None for a flat dict of the tensors.
        folder: where the unnamed file goes; it takes as much room as the decoded tensors. None keeps them
            in memory.
        chunks: gives the patterns of all tensors in order, as `read_chunks` does.

    Raises:
        CorruptionError: the tree contradicts the grammar or the tensors.
        UnsupportedError: an element type that this torch does not have.
        OSError: no room in `folder`.
    """
    flat = {"storages": [], "root": {"dict": [[name, {"tensor": name}] for name in tensors]}}
    raw = flat if tree is None else tree
    parsed = parse_tree(raw)
    parsed.check_names(tensors)
    storages = _MappedStorages(tensors, parsed, folder)
    storages.fill(chunks(tensors))
    return parse_tree(raw, storages.make).root


class _MappedStorages:
    """The mapped file: one region for each storage."""

    def __init__(self, tensors: Mapping[str, TensorSource], tree: Tree, folder: Path | None) -> None:
        self._tensors = tensors
        self._tree = tree
        self._strides = _strides_by_name(tree, tensors)
        self._offsets: dict[str, int] = {}  # of each tensor
        self._regions: dict[str | int, tuple[int, int]] = {}  # of each storage, by name or number
        self._memory = _mapped_file(folder, self._place())
        self._storages: dict[str | int, UntypedStorage] = {}
        self._made: dict[TensorRef | View, Tensor] = {}

    def _place(self) -> int:
        shared = {name for names in self._tree.storages for name in names}
        storages: dict[str | int, tuple[str, ...]] = dict(enumerate(self._tree.storages))
        storages |= {name: (name,) for name in self._tensors if name not in shared}
        at = 0
        for key, names in storages.items():
            sizes = [self._tensors[name].n_bytes for name in names]
            offsets = part_offsets(sizes)
            self._offsets |= {name: at + offset for name, offset in zip(names, offsets, strict=False)}
            n_bytes = offsets[-2] + sizes[-1] if sizes else 0
            self._regions[key] = (at, n_bytes)
            at += -(-n_bytes // ALIGNMENT) * ALIGNMENT
        return at

    def fill(self, chunks: Iterator[Patterns]) -> None:
        """Put the patterns of all tensors in their places."""
        for name, source in self._tensors.items():
            put = self._writer(name, source)
            for begin, end in source.chunk_bounds():
                put(begin, end, next(chunks))

    def _writer(self, name: str, source: TensorSource) -> Callable[[int, int, Patterns], None]:
        at, n_bytes = self._offsets[name], source.n_bytes
        pattern_type, strides = PATTERN_TYPES[source.dtype.pattern_bytes], self._strides.get(name)
        if strides is None:
            flat = self._memory[at : at + n_bytes].view(pattern_type)
            return lambda begin, end, patterns: np.copyto(flat[begin:end], patterns)
        item = PATTERN_TYPES[source.dtype.bits // 8]
        steps = tuple(stride * item.itemsize for stride in strides)
        items: Patterns = np.ndarray(source.shape, item, self._memory, at, steps)
        n = item.itemsize // pattern_type.itemsize

        def put(begin: int, end: int, patterns: Patterns) -> None:
            items.flat[begin // n : end // n] = patterns.view(item)

        return put

    def make(self, leaf: Any) -> Any:
        """Make what stands for a leaf of the tree in torch."""
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
            tensor = torch.empty(0, dtype=_torch_dtype(geometry.dtype))
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
        name, shape = _in_torch(source)
        strides = c_strides(shape) if ref.strides is None else ref.strides
        return ref.name, Geometry(name, _torch_dtype(name).itemsize, shape, strides, 0)

    def _storage(self, key: str | int) -> UntypedStorage:
        import torch

        if key not in self._storages:
            at, n_bytes = self._regions[key]
            # An empty region has the address of the next one, and torch.save takes those of one address
            # for one memory; an empty tensor of its own has none.
            region = (
                torch.from_numpy(self._memory[at : at + n_bytes])
                if n_bytes
                else torch.empty(0, dtype=torch.uint8)
            )
            self._storages[key] = region.untyped_storage()
        return self._storages[key]


def _mapped_file(folder: Path | None, n_bytes: int) -> NDArray[np.uint8]:
    if folder is None or not n_bytes:
        return np.zeros(n_bytes, np.uint8)
    with tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):
            # A full disk must be an error here; once mapped, it would end the process.
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
            _check_strides(ref, tensors[ref.name])
    return {name: found for name, found in strides.items() if found is not None}


def _check_strides(ref: TensorRef, source: TensorSource) -> None:
    if ref.strides is None:
        return
    shape = tuple(source.shape)
    is_whole = source.dtype.name in TORCH_NAMES and len(shape) == len(ref.strides)
    if not is_whole or not Geometry("", 1, shape, ref.strides, 0).is_dense:
        raise CorruptionError(f"tree: tensor {ref.name!r}: strides {list(ref.strides)} do not fit its shape")


def _in_torch(source: TensorSource) -> tuple[str, tuple[int, ...]]:
    shape = tuple(source.shape)
    if source.dtype.name == "F4" and shape and shape[-1] % 2 == 0:
        return "float4_e2m1fn_x2", (*shape[:-1], shape[-1] // 2)  # as safetensors does
    if source.dtype.name not in TORCH_NAMES:
        raise UnsupportedError(f"torch has no element type {source.dtype.name}; restore to safetensors")
    return TORCH_NAMES[source.dtype.name], shape


def _torch_dtype(name: str) -> Any:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(f"this torch has no element type {name!r}; install a newer one")
    return dtype
