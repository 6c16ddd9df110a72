"""Sums over the inputs of layers: made once for layers that get the very same tensor, within a memory cap.

Knows layers by name only, and no hooks and no files.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from ckptz.hooks.inputs import Gather

Users = frozenset[str]
_Key = tuple[int, int, Gather]


@dataclass(slots=True)
class Sum:
    """One sum and how many vectors are in it."""

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
        """No more users for these sums."""
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
