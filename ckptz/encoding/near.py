"""Reading bases and companions on a device while a tensor there is planned and encoded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from ckptz.codec.on_device import decode
from ckptz.codec.units import CHUNK_UNITS, Stored, TensorSource, Units
from ckptz.dtypes import DType
from ckptz.encoding.planes_on_device import host_of
from ckptz.kernels.torch import UNSIGNED, bytes_of
from ckptz.parallel import Workers


@dataclass(slots=True)
class Resident(TensorSource):
    """A tensor whose units are on a device.

    Attributes:
        dtype: of its elements.
        shape: in a file.
        flat: its units, as torch's unsigned integers [n_units].
        ready: what to wait for before they are read, if anything.
    """

    dtype: DType
    shape: tuple[int, ...]
    flat: torch.Tensor
    ready: torch.cuda.Event | None = None

    @classmethod
    def of(
        cls, dtype: DType, shape: tuple[int, ...], tensor: torch.Tensor, ready: torch.cuda.Event | None = None
    ) -> Self:
        """Make the source of a contiguous tensor."""
        flat = bytes_of(tensor.detach()).view(UNSIGNED[dtype.unit_bytes])
        return cls(dtype, shape, flat, ready)

    def now(self) -> torch.Tensor:
        """Give the units for work on the current stream."""
        if self.ready is not None:
            torch.cuda.current_stream(self.flat.device).wait_event(self.ready)
        return self.flat

    def units(self, begin: int, end: int) -> Units:
        with self.stream():
            return host_of(self.flat[begin:end])

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Make a stream the current one that is behind what makes the units."""
        device = self.flat.device
        if device.type != "cuda":
            yield
            return
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if self.ready is None:
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self.now()
            yield
            stream.synchronize()


Made = tuple[torch.Tensor, torch.Tensor | None]


class Near(TensorSource):
    """A tensor that is read on a device: what was made there last is held, until it is closed.

    Args:
        source: the tensor, which is read on the host when this is closed.
        make: makes units begin..end, whole chunks, on the device, and their codes if it has any.
    """

    dtype: DType
    shape: tuple[int, ...]

    def __init__(self, source: TensorSource, make: Callable[[int, int], Made]) -> None:
        self.dtype, self.shape = source.dtype, source.shape
        self._source = source
        self._make: Callable[[int, int], Made] | None = make
        self._let_go()

    @classmethod
    def decoded(cls, source: TensorSource, device: torch.device, workers: Workers) -> Self:
        """Decode a tensor on a device, or bring it there; threads do what the host must."""

        def make(begin: int, end: int) -> Made:
            units = torch.empty(end - begin, dtype=UNSIGNED[source.dtype.unit_bytes], device=device)
            [codes] = decode([(source, begin // CHUNK_UNITS, units)], workers.map)
            return units, codes

        return cls(source, make)

    def _let_go(self) -> None:
        self._bounds = (0, 0)
        self._units: torch.Tensor | None = None
        self._codes: torch.Tensor | None = None

    def close(self) -> None:
        """Let go of the device's memory: a draft outlives its planning, and threads may read by it."""
        self._make = None
        self._let_go()

    @property
    def stored(self) -> Stored | None:
        return self._source.stored

    @property
    def n_codes(self) -> int | None:
        return self._source.n_codes

    def there(self, begin: int, end: int) -> torch.Tensor:
        """Give units begin..end, whole chunks, on the device."""
        first, last = self._bounds
        if self._units is None or not first <= begin <= end <= last:
            assert self._make is not None
            self._let_go()  # makes room
            self._units, self._codes = self._make(begin, end)
            self._bounds, first = (begin, end), begin
        return self._units[begin - first : end - first]

    def codes_there(self, begin: int, end: int) -> torch.Tensor | None:
        """Give the codes of units begin..end, whole chunks, on the device; None if the base has none."""
        self.there(begin, end)
        first = self._bounds[0]
        return None if self._codes is None else self._codes[begin - first : end - first]

    def units(self, begin: int, end: int) -> Units:
        if self._make is None:
            return self._source.units(begin, end)
        return host_of(self.there(*self._chunks(begin, end))[begin % CHUNK_UNITS :][: end - begin])

    def codes(self, begin: int, end: int) -> NDArray[np.uint8] | None:
        if self._make is None:
            return self._source.codes(begin, end)
        codes = self.codes_there(*self._chunks(begin, end))
        return None if codes is None else host_of(codes[begin % CHUNK_UNITS :][: end - begin])

    def _chunks(self, begin: int, end: int) -> tuple[int, int]:
        """Widen bounds to those of chunks."""
        last = min(-(-end // CHUNK_UNITS) * CHUNK_UNITS, self.n_units)
        return begin // CHUNK_UNITS * CHUNK_UNITS, last
