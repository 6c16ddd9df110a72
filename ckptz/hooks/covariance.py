"""Covariances of the inputs of layers: sums of x x^T over what a layer multiplies its weight with.

A gather is a value that says how a layer takes its inputs: layers whose gathers are equal make the same
sums of the same tensor. `shape` and `dtype` are those of the sums; `add` adds a tensor's inputs to a total
in place and gives the number of input vectors. Sums are made once for layers that get the very same tensor,
within a memory cap. Nothing here knows hooks or files, and layers by name only.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from ckptz.guidance.files import LayerKind

# The errors of float32 sums are far below the damping that Hessians get.
SUM_DTYPE: Final = torch.float32
PART_ELEMENTS: Final = 1 << 24  # of the inputs that are widened or unfolded at a time: 64 MiB


@dataclass(frozen=True, slots=True)
class Vectors:
    """Linear layers: vectors along the last dimension. Sums are x x^T, [n, n]."""

    n: int
    dtype: torch.dtype = SUM_DTYPE

    @property
    def shape(self) -> tuple[int, ...]:
        return self.n, self.n

    def add(self, tensor: torch.Tensor, total: torch.Tensor) -> int:
        rows = tensor.reshape(-1, self.n)
        for part in torch.split(rows, max(1, PART_ELEMENTS // max(1, self.n))):
            wide = part.to(self.dtype)
            total.addmm_(wide.T, wide)
        return len(rows)


@dataclass(frozen=True, slots=True)
class Patches:
    """Convolutions of one or two dimensions: what lies under the kernel at each place.

    Vectors are in the order of `weight[0].flatten()`. Sums are x x^T, [n, n], or [n_groups, n, n].
    """

    n_channels: int  # of the input
    kernel: tuple[int, ...]  # one number per dimension, and of the next two
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # (before, after) per dimension
    padding_mode: str  # as `torch.nn.functional.pad` calls it
    n_groups: int  # of channels
    dtype: torch.dtype = SUM_DTYPE

    @property
    def shape(self) -> tuple[int, ...]:
        n = self.n_channels // self.n_groups * math.prod(self.kernel)
        return (n, n) if self.n_groups == 1 else (self.n_groups, n, n)

    def add(self, tensor: torch.Tensor, total: torch.Tensor) -> int:
        if tensor.ndim == len(self.kernel) + 1:  # one sample without a batch dimension
            tensor = tensor[None]
        totals = total.view(self.n_groups, *self.shape[-2:])
        n_vectors = 0
        for samples in torch.split(tensor, self._n_at_once(tensor)):
            vectors = self._unfolded(samples)
            totals.baddbmm_(vectors.mT, vectors)
            n_vectors += vectors.shape[1]
        return n_vectors

    def _n_at_once(self, tensor: torch.Tensor) -> int:
        """Samples whose vectors fit into a part; at least one."""
        n_places = math.prod(
            (size + sum(padding)) // stride + 1
            for size, padding, stride in zip(tensor.shape[2:], self.padding, self.stride, strict=True)
        )
        return max(1, PART_ELEMENTS // (self.n_channels * math.prod(self.kernel) * n_places))

    def _unfolded(self, samples: torch.Tensor) -> torch.Tensor:
        """[n_groups, samples * places, n] of [samples, channels, ...]."""
        wide = samples.to(self.dtype)
        if any(map(any, self.padding)):
            around = [n for before_after in reversed(self.padding) for n in before_after]
            wide = functional.pad(wide, around, mode=self.padding_mode)
        if len(self.kernel) == 1:  # as a picture of one row
            wide = wide[:, :, None]
        one = (1,) * (2 - len(self.kernel))
        patches = functional.unfold(
            wide, (*one, *self.kernel), dilation=(*one, *self.dilation), stride=(*one, *self.stride)
        )
        grouped = patches.view(len(patches), self.n_groups, self.shape[-1], patches.shape[-1])
        return grouped.permute(1, 0, 3, 2).reshape(self.n_groups, -1, self.shape[-1])


@dataclass(frozen=True, slots=True)
class Tokens:
    """Embeddings: how often each of `n` rows is looked up, [n]."""

    n: int
    dtype: torch.dtype = torch.int64

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.n,)

    def add(self, tensor: torch.Tensor, total: torch.Tensor) -> int:
        tokens = tensor.flatten()
        total.index_add_(0, tokens, torch.ones_like(tokens, dtype=self.dtype))
        return len(tokens)


Gather = Vectors | Patches | Tokens


def gather_of(module: nn.Module) -> tuple[LayerKind, Gather] | None:
    """Tell what kind of layer this is and how it takes its inputs; None for one that is not recorded."""
    if isinstance(module, nn.Linear):
        return "linear", Vectors(module.in_features)
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return "conv", _patches(module)
    if isinstance(module, nn.Embedding):
        return "embedding", Tokens(module.num_embeddings)
    # transformers' Conv1D, a linear layer whose weight is [in, out], told without importing it.
    weight, n_out = getattr(module, "weight", None), getattr(module, "nf", None)
    is_named = any(one.__name__ == "Conv1D" for one in type(module).__mro__)
    if is_named and isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.shape[1] == n_out:
        return "conv1d_t", Vectors(weight.shape[0])
    return None


def _patches(module: nn.Conv1d | nn.Conv2d) -> Patches:
    return Patches(
        n_channels=module.in_channels,
        kernel=tuple(module.kernel_size),
        stride=tuple(module.stride),
        dilation=tuple(module.dilation),
        padding=tuple(_paddings(module)),
        padding_mode="constant" if module.padding_mode == "zeros" else module.padding_mode,
        n_groups=module.groups,
    )


def _paddings(module: nn.Conv1d | nn.Conv2d) -> Iterator[tuple[int, int]]:
    """(before, after) of each dimension; "same" puts the odd one behind."""
    for i, (kernel, dilation) in enumerate(zip(module.kernel_size, module.dilation, strict=True)):
        if module.padding == "same":
            both = dilation * (kernel - 1)
            yield both // 2, both - both // 2
        elif isinstance(module.padding, str):  # "valid"
            yield 0, 0
        else:
            yield module.padding[i], module.padding[i]


# --- sums that layers share ----------------------------------------------------------------------

Users = frozenset[str]
_Key = tuple[int, int, Gather]


@dataclass(slots=True)
class Sum:
    """A sum, and the number of vectors in it."""

    total: torch.Tensor
    n_samples: int

    @property
    def n_bytes(self) -> int:
        """Memory of the sum."""
        return self.total.numel() * self.total.element_size()

    def add(self, other: Sum) -> None:
        """Add another one in place."""
        self.total.add_(other.total)
        self.n_samples += other.n_samples

    def is_finite(self) -> bool:
        """Tell whether all that was added was finite: the diagonal holds the squares, and bounds the rest."""
        diagonal = self.total.diagonal(dim1=-2, dim2=-1) if self.total.ndim > 1 else self.total
        return bool(diagonal.isfinite().all())


@dataclass(slots=True)
class _Open:
    """A sum that further layers may turn out to share, while its tensor lives."""

    tensor: weakref.ref[torch.Tensor]
    users: list[str]
    sum: Sum


@dataclass(slots=True)
class Sums:
    """Sums by the layers that share them; a layer's own is that of all sums that it is a user of."""

    by_users: dict[Users, Sum] = field(default_factory=dict)

    def add(self, users: Users, one: Sum) -> None:
        """Add a sum; its memory may become that of this object."""
        if users in self.by_users:
            self.by_users[users].add(one)
        else:
            self.by_users[users] = one

    def drop(self, layer: str) -> None:
        """Forget a layer; a sum goes with its last user."""
        kept = Sums()
        for users, one in self.by_users.items():
            if users != {layer}:
                kept.add(users - {layer}, one)
        self.by_users = kept.by_users

    def of(self, layer: str) -> Iterator[tuple[Users, Sum]]:
        """Give the sums that a layer uses."""
        return ((users, one) for users, one in self.by_users.items() if layer in users)

    @property
    def n_bytes(self) -> int:
        """Memory of all sums."""
        return sum(one.n_bytes for one in self.by_users.values())


def _sum_of(gather: Gather, tensor: torch.Tensor) -> Sum:
    """The sum of one tensor: a plain tensor in full precision, whatever mode the model runs in."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
        total = torch.zeros(gather.shape, dtype=gather.dtype, device=tensor.device)
        return Sum(total, gather.add(tensor, total))


class Recorder:
    """Sums of complete batches, and of the one that is under way.

    A batch counts as a whole or not at all, so its sums stand beside those of the batches before, each
    in at most half of the bytes of the memory cap. Where it does not suffice, the layers with the largest
    sums are skipped; of equally large ones, the last.
    """

    def __init__(self, memory_cap: int) -> None:
        self._half = memory_cap // 2
        self.kept, self._batch = Sums(), Sums()
        self._open: dict[_Key, _Open] = {}
        self._called: dict[str, None] = {}  # layers of this batch, in the order of their first calls
        self.skipped: dict[str, str] = {}
        self._smallest_skipped: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no batch is under way."""
        return not self._open and not self._batch.by_users

    def record(self, layer: str, gather: Gather, tensor: torch.Tensor) -> None:
        """Add the inputs that a layer gets, unless another has got the same ones from the same tensor."""
        if layer in self.skipped:
            return
        self._called[layer] = None
        # Inference tensors do not count their changes, so none is known to be the same as before.
        key = None if tensor.is_inference() else (id(tensor), tensor._version, gather)
        found = self._open.get(key) if key else None
        if found is not None and found.tensor() is tensor and layer not in found.users:
            found.users.append(layer)
            return
        self._close(other for other, one in self._open.items() if other == key or one.tensor() is None)
        n_bytes = math.prod(gather.shape) * gather.dtype.itemsize
        if not self._has_room(layer, n_bytes):
            return
        made = _sum_of(gather, tensor)
        if key is None:
            self._batch.add(frozenset((layer,)), made)
        else:
            self._open[key] = _Open(weakref.ref(tensor), [layer], made)

    def _close(self, keys: Iterable[_Key]) -> None:
        """Let no further layers share these sums."""
        for key in list(keys):
            one = self._open.pop(key)
            self._batch.add(frozenset(one.users), one.sum)

    def discard(self) -> None:
        """Leave the batch out."""
        self._open.clear()
        self._called.clear()
        self._batch = Sums()

    def commit(self) -> list[str]:
        """Count the batch if all its inputs were finite.

        Returns:
            The layers whose inputs were not, in the order of their calls.
        """
        self._close(self._open)
        spoiled = {
            user for users, one in self._batch.by_users.items() if not one.is_finite() for user in users
        }
        layers = [layer for layer in self._called if layer in spoiled]
        if not layers:
            for users, one in self._batch.by_users.items():
                self.kept.add(users, one)
        self.discard()
        self._trim()
        return layers

    def _has_room(self, layer: str, n_bytes: int) -> bool:
        """Make room for one more sum in this batch; False if the layer is skipped itself."""
        is_too_large = self._smallest_skipped is not None and n_bytes > self._smallest_skipped
        while not is_too_large and sum(n for _, n in self._sums_of_batch()) + n_bytes > self._half:
            # Of equally large sums the one that was begun last goes.
            sums = reversed([*self._sums_of_batch()])
            users, largest = max(sums, key=lambda one: one[1], default=((), 0))
            is_too_large = n_bytes >= largest
            if not is_too_large:
                self._skip(users, largest)
        if is_too_large:
            self._skip([layer], n_bytes)
        return not is_too_large

    def _sums_of_batch(self) -> Iterator[tuple[Iterable[str], int]]:
        for users, one in self._batch.by_users.items():
            yield users, one.n_bytes
        for other in self._open.values():
            yield other.users, other.sum.n_bytes

    def _trim(self) -> None:
        """Bring the sums of complete batches within their half of the cap."""
        while self.kept.n_bytes > self._half:
            sums = reversed(self.kept.by_users.items())
            users, one = max(sums, key=lambda item: item[1].n_bytes)
            self._skip(users, one.n_bytes)

    def _skip(self, layers: Iterable[str], n_bytes: int) -> None:
        smallest = n_bytes if self._smallest_skipped is None else min(self._smallest_skipped, n_bytes)
        self._smallest_skipped = smallest
        for layer in sorted(layers):
            self.skipped[layer] = f"its sum of {n_bytes} bytes does not fit into the memory cap"
            self.kept.drop(layer)
            self._batch.drop(layer)
            for key, one in [*self._open.items()]:
                one.users = [user for user in one.users if user != layer]
                if not one.users:
                    del self._open[key]

    def take_over(self, kept: Sums, skipped: Mapping[str, str]) -> None:
        """Go on from other sums, instead of these."""
        self.discard()
        self.kept, self.skipped, self._smallest_skipped = kept, dict(skipped), None
        self._trim()
