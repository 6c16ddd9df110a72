"""What a layer multiplies its weight with, and sums of it.

Knows no hooks and no files. A gather is a value: layers whose gathers are equal make the same sums of
the same tensor. `shape` and `dtype` are those of the sums; `add` adds a tensor's inputs to a total in place
and gives the number of input vectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
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
