"""Encoding tensors where they live, on a GPU: only coded bytes come to the host, in pinned memory.

Without loss, weights on grids and optimizer state, alone or against a base, which is brought there. The
chunks are those that `ckptz.encoding.chunk` makes, byte for byte.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from ckptz.codec.units import ArraySource, Companions, TensorSource, companions_of
from ckptz.encoding.chunk import EncodedSource
from ckptz.encoding.companions import Restored
from ckptz.encoding.draft import Draft
from ckptz.encoding.near import Near, Resident
from ckptz.encoding.there import There
from ckptz.kernels.torch import current, has_kernels
from ckptz.parallel import Workers

Plans: TypeAlias = Callable[[TensorSource | None, Companions], Draft]
Beside: TypeAlias = Callable[[], Mapping[str, Restored]]
Trial: TypeAlias = Callable[[Callable[[ArraySource], "DeviceSource"]], bool]
MIN_ENCODED: Final = 1 << 12  # units; smaller tensors come to the host: their launches would take longer


@dataclass(slots=True)
class DeviceSource(Resident):
    """A tensor on an accelerator: encoded there where that is possible, else fetched chunk by chunk.

    Attributes:
        is_left: whether it had to be encoded on the host, once or more.
        there: what measures it on its device, while it is planned there.
    """

    is_left: bool = False
    there: There | None = None

    def encoded_there(
        self, plan: Plans | None, base: TensorSource | None, beside: Beside, trial: Trial, workers: Workers
    ) -> tuple[Draft, TensorSource] | None:
        """Plan and encode the tensor on its device; see `TensorSource.encoded_there`."""
        device, made = self.flat.device, None
        if (
            plan is not None
            and self.n_units >= MIN_ENCODED
            and has_kernels(device)
            and is_trusted(device, trial)
        ):
            made = self.made(plan, base, beside, workers)
        self.is_left |= made is None
        return made

    def made(
        self, plan: Plans, base: TensorSource | None, beside: Beside, workers: Workers
    ) -> tuple[Draft, EncodedSource] | None:
        """Plan and encode the tensor on a device that is trusted."""
        device = self.flat.device
        restored = beside()
        if any(map(_is_for_host, (base, *(one.base for one in restored.values())))):
            return None
        with self.stream(), current(device):
            near = None if base is None else Near.decoded(base, device, workers)
            companions = {name: _restored(one, device, workers) for name, one in restored.items()}
            there = There(self, near, companions, workers)
            self.there = there
            try:
                draft = plan(near, companions_of(companions))
            finally:
                self.there = None
            source = there.encoded(draft)
            for one in (near, *companions.values()):
                if one is not None:
                    one.close()
            return None if source is None else (draft, source)


@functools.cache
def is_trusted(device: torch.device, trial: Trial) -> bool:
    """Try a device once in a process."""

    def moved(source: ArraySource) -> DeviceSource:
        return DeviceSource(source.dtype, source.shape, torch.from_numpy(source.flat).to(device))

    return trial(moved)


def _is_for_host(base: TensorSource | None) -> bool:
    """Tell whether only the host can tell the codes of a base."""
    return base is not None and base.n_codes is not None and not base.lineage[1]


def _restored(tensor: Restored, device: torch.device, workers: Workers) -> Near:
    """Read a tensor of the same file on a device as the file restores it."""
    source, draft, base = tensor.source, tensor.draft, tensor.base
    if not isinstance(source, DeviceSource) or source.flat.device != device or draft.rounding is not None:
        return Near.decoded(tensor, device, workers)
    near = None if base is None else Near.decoded(base, device, workers)
    there = There(source, near, {}, workers)
    return Near(tensor, functools.partial(there.made, draft))
