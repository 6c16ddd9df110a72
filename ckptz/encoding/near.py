"""Reading a base on a device while a tensor there is planned and encoded against it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ckptz.codec.on_device import decode
from ckptz.codec.units import CHUNK_UNITS, Stored, TensorSource, Units
from ckptz.dtypes import DType
from ckptz.encoding.planes_on_device import host_of
from ckptz.kernels.torch import UNSIGNED
from ckptz.parallel import Workers


class Near(TensorSource):
    """A base that is read on a device: what was decoded there last is held.

    Args:
        source: the base.
        device: where to.
        workers: threads for what is decoded on the host.
    """

    dtype: DType
    shape: tuple[int, ...]

    def __init__(self, source: TensorSource, device: torch.device, workers: Workers) -> None:
        self.dtype, self.shape = source.dtype, source.shape
        self._source, self._device, self._workers = source, device, workers
        self._bounds = (0, 0)
        self._units: torch.Tensor | None = None
        self._codes: torch.Tensor | None = None

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
            self._units = self._codes = None  # makes room
            units = torch.empty(end - begin, dtype=UNSIGNED[self.dtype.unit_bytes], device=self._device)
            [self._codes] = decode([(self._source, begin // CHUNK_UNITS, units)], self._workers.map)
            self._bounds, self._units, first = (begin, end), units, begin
        return self._units[begin - first : end - first]

    def codes_there(self, begin: int, end: int) -> torch.Tensor | None:
        """Give the codes of units begin..end, whole chunks, on the device; None if the base has none."""
        self.there(begin, end)
        first = self._bounds[0]
        return None if self._codes is None else self._codes[begin - first : end - first]

    def units(self, begin: int, end: int) -> Units:
        return host_of(self.there(*self._chunks(begin, end))[begin % CHUNK_UNITS :][: end - begin])

    def codes(self, begin: int, end: int) -> NDArray[np.uint8] | None:
        codes = self.codes_there(*self._chunks(begin, end))
        return None if codes is None else host_of(codes[begin % CHUNK_UNITS :][: end - begin])

    def _chunks(self, begin: int, end: int) -> tuple[int, int]:
        """Widen bounds to those of chunks."""
        last = min(-(-end // CHUNK_UNITS) * CHUNK_UNITS, self.n_units)
        return begin // CHUNK_UNITS * CHUNK_UNITS, last
