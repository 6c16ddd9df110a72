"""Encoding tensors where they live, on a GPU: only coded bytes come to the host, in pinned memory.

So far without loss and weights on grids, alone or against a base, which is brought there. The chunks are
those that `ckptz.encoding.chunk` makes, byte for byte.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from ckptz.codec.on_device import Classes
from ckptz.codec.plan import Plan, PlaneMode, exact_plan, kernel_mode, planes_plan
from ckptz.codec.units import (
    CHUNK_UNITS,
    UNIT_TYPES,
    ArraySource,
    ChunkSources,
    TensorSource,
    Units,
)
from ckptz.codec.values import KINDS
from ckptz.dtypes import DType, dtype_of
from ckptz.encoding import grid_on_device
from ckptz.encoding.chunk import EncodedChunk, EncodedSource, encode_chunk
from ckptz.encoding.counts import ClassCounts, plane_counts, stream_tables
from ckptz.encoding.draft import Draft
from ckptz.encoding.extent import Extent
from ckptz.encoding.near import Near
from ckptz.encoding.planes_on_device import Found, Slab, counted, finished, host_of, slabs
from ckptz.kernels import cpu, planes_on_gpu
from ckptz.kernels.torch import UNSIGNED, current, has_kernels
from ckptz.parallel import Workers
from ckptz.transform.classes import N_MAGNITUDE_CLASSES, Magnitude

MODE: Final = PlaneMode.DIFFERENCE  # of deltas that are tried
DEVICE_BYTES: Final = 768 << 20  # of device memory beside the tensors, by default
SCRATCH: Final = 2.25  # bytes on the device for each byte coded: planes, words, samples
SCRATCH_OF_DELTA: Final = 4.5  # and base, classes, codes in their order
MIN_ENCODED: Final = 1 << 12  # units; smaller tensors come to the host: their launches would take longer


@dataclass(slots=True)
class DeviceSource(TensorSource):
    """A tensor on an accelerator: encoded there where that is possible, else fetched chunk by chunk.

    Attributes:
        dtype: of its elements.
        shape: in a file.
        flat: its units on the device, as torch's unsigned integers [n_units].
        ready: what to wait for before they are read, if anything.
        is_left: whether it had to be encoded on the host, once or more.
    """

    dtype: DType
    shape: tuple[int, ...]
    flat: torch.Tensor
    ready: torch.cuda.Event | None = None
    is_left: bool = False
    _found: list[Found] = field(default_factory=list)
    _is_here: bool = False  # what is asked now is answered on the device

    @classmethod
    def of(
        cls, dtype: DType, shape: tuple[int, ...], tensor: torch.Tensor, ready: torch.cuda.Event | None = None
    ) -> DeviceSource:
        """Make the source of a contiguous tensor."""
        flat = tensor.detach().reshape(-1).view(torch.uint8).view(UNSIGNED[dtype.unit_bytes])
        return cls(dtype, shape, flat, ready)

    def units(self, begin: int, end: int) -> Units:
        with self._stream():
            return host_of(self.flat[begin:end])

    @contextlib.contextmanager
    def _stream(self) -> Iterator[None]:
        """Work on a stream of its own, behind what makes the units."""
        device = self.flat.device
        if device.type != "cuda":
            yield
            return
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if self.ready is None:
            stream.wait_stream(torch.cuda.current_stream(device))
        else:
            stream.wait_event(self.ready)
        with torch.cuda.stream(stream):
            yield
            stream.synchronize()

    def encoded_there(
        self, plan: Callable[[TensorSource | None], Draft] | None, base: TensorSource | None, workers: Workers
    ) -> tuple[Draft, TensorSource] | None:
        """Plan and encode the tensor on its device; see `TensorSource.encoded_there`."""
        made = None if plan is None or self.n_units < MIN_ENCODED else self._made(plan, base, workers)
        self.is_left |= made is None
        return made

    def _made(
        self, plan: Callable[[TensorSource | None], Draft], base: TensorSource | None, workers: Workers
    ) -> tuple[Draft, TensorSource] | None:
        device = self.flat.device
        if not has_kernels(device) or not agrees_with_host(device):
            return None
        if base is not None and base.n_codes is not None and not base.lineage[1]:
            return None  # whose codes only the host can tell
        self._found = []
        with self._stream(), current(device):
            near = None if base is None else Near(base, device, workers)
            self._is_here = True
            try:
                draft = plan(near)
            finally:
                self._is_here = False
            source = self._encoded(draft, near, workers)
            return None if source is None else (draft, source)

    def _encoded(self, draft: Draft, base: Near | None, workers: Workers) -> EncodedSource | None:
        """Encode by a draft, if the device can do what that asks for."""
        plan = draft.plan
        if plan.quant_map is not None:
            grid: Any = draft.quantizer
            chunks = grid_on_device.encoded_chunks(self, draft, grid, base, workers, DEVICE_BYTES)
            return EncodedSource(self.dtype, self.shape, plan, tuple(chunks))
        is_ours = plan.rules in ((), (Magnitude(),)) and draft.rounding is None and not draft.is_sparse
        if not is_ours or (plan.rules and not self._found):
            return None
        return _encoded(self, plan, base, workers, DEVICE_BYTES)

    def extent(self, base: TensorSource | None, squares: TensorSource | None) -> Extent | None:
        """Measure the tensor where it lives; see `TensorSource.extent`."""
        if not self._is_here or not isinstance(squares, DeviceSource | None):
            return None
        if squares is not None and squares.ready is not None:
            torch.cuda.current_stream(self.flat.device).wait_event(squares.ready)
        near = base if isinstance(base, Near) else None
        return grid_on_device.extent_of(self, near, squares, DEVICE_BYTES)

    def codes_by_class(self, quantizer: Any, rules: tuple[Any, ...]) -> ClassCounts | None:
        """Count codes on a grid by class, where the tensor lives; see `TensorSource.codes_by_class`."""
        if not self._is_here:
            return None
        base = quantizer.base if isinstance(quantizer.base, Near) else None
        return grid_on_device.codes_by_class(self, quantizer, base, rules, DEVICE_BYTES)

    def class_counts(self, base: TensorSource, mode: int) -> list[ClassCounts] | None:
        """Count the codes of each plane by the magnitude of a base; see `TensorSource.class_counts`."""
        if not isinstance(base, Near):
            return None
        self._found = []
        for begin, end in slabs(self.n_units, SCRATCH_OF_DELTA * self.dtype.unit_bytes, DEVICE_BYTES):
            units, others = self.flat[begin:end], base.there(begin, end)
            planes, classes = planes_on_gpu().split_planes(units, others, mode), Classes.by_magnitude(others)
            self._found += [counted(planes, classes, i) for i in range(len(classes.counts))]
        return [functools.reduce(ClassCounts.__add__, plane) for plane in zip(*self._found, strict=True)]

    def found(self, begin: int, end: int) -> Sequence[Found]:
        """Give what `class_counts` found of the chunks in begin..end."""
        return self._found[begin // CHUNK_UNITS : -(-end // CHUNK_UNITS)]


def encode_on_device(
    tensor: torch.Tensor, dtype: DType, shape: tuple[int, ...], workers: Workers, most: int = DEVICE_BYTES
) -> EncodedSource:
    """Encode a contiguous tensor without loss and without a base.

    Args:
        tensor: on a GPU.
        dtype: of its elements.
        shape: in a file.
        workers: threads that choose coders.
        most: bytes of device memory to take; one chunk is coded whatever it takes.
    """
    with current(tensor.device):
        return _encoded(DeviceSource.of(dtype, shape, tensor), exact_plan(dtype), None, workers, most)


def _encoded(
    source: DeviceSource, plan: Plan, base: Near | None, workers: Workers, most: int
) -> EncodedSource:
    chunks: list[EncodedChunk] = []
    scratch = SCRATCH if base is None else SCRATCH_OF_DELTA
    mode = kernel_mode(plan.mode, source.dtype)
    for begin, end in slabs(source.n_units, scratch * source.dtype.unit_bytes, most):
        units = source.flat[begin:end]
        others = base.there(begin, end) if base is not None and plan.needs_base else units

        def again(first: int, last: int, units: torch.Tensor = units, others: torch.Tensor = others) -> Any:
            return planes_on_gpu().split_planes(units[first:last], others[first:last], mode)

        checksums = planes_on_gpu().xxh64_of_chunks(units, CHUNK_UNITS)
        classes = Classes.by_magnitude(others) if plan.rules else None
        slab = Slab(again(0, len(units)), again, plan, classes, source.found(begin, end))
        streams = slab.streams(workers)
        chunks += workers.map(lambda task: finished(*task), zip(streams, checksums.tolist(), strict=True))
    return EncodedSource(source.dtype, source.shape, plan, tuple(chunks))


@functools.cache
def agrees_with_host(device: torch.device) -> bool:
    """Try once in a process whether a device writes what the host writes, of made-up weights and deltas.

    Files outlive machines, and not every GPU, driver and compiler has been tried: bytes that the host would
    not have written are never stored.
    """
    with Workers(1) as workers:
        exact = all(_agrees(device, dtype_of(name), workers) for name in ("U8", "BF16", "F32", "F64"))
        return exact and all(_agrees_on_grid(device, dtype_of(name), workers) for name in KINDS)


def _agrees_on_grid(device: torch.device, dtype: DType, workers: Workers) -> bool:
    n_rows, row_units = 6, CHUNK_UNITS // 6 + 43
    values = np.random.default_rng(dtype.unit_bytes).normal(0, 0.02, n_rows * row_units)
    values[::1001] *= 100  # which escape
    units = [
        cpu().from_f32(v.astype(np.float32).view(np.uint32), KINDS[dtype.name])
        for v in (values, values * 0.6)
    ]
    source, base = (ArraySource(dtype, (n_rows, row_units), each) for each in units)
    there = DeviceSource.of(dtype, source.shape, torch.from_numpy(source.flat.view(np.uint8)).to(device))
    return grid_on_device.agrees(source, base, there, Near(base, device, workers), workers)


def _agrees(device: torch.device, dtype: DType, workers: Workers) -> bool:
    n_units = CHUNK_UNITS + CHUNK_UNITS // 256 + 3
    values = np.random.default_rng(dtype.unit_bytes).normal(0, 0.02, n_units)
    bits = values.view(np.uint64) >> np.uint64(64 - 8 * dtype.unit_bytes)
    units = bits.astype(UNIT_TYPES[dtype.unit_bytes])
    source, base = (ArraySource(dtype, (n_units,), each) for each in (units, units ^ (units >> 7 & 3)))
    there = DeviceSource.of(dtype, (n_units,), torch.from_numpy(units.view(np.uint8)).to(device))
    near = Near(base, device, workers)
    delta = _delta([plane_counts(source, base, MODE, bounds) for bounds in source.chunk_bounds()])
    counted = there.class_counts(near, kernel_mode(MODE, dtype))
    return counted is not None and all(
        _codes_alike(source, there, plan, near, workers)
        for plan in (exact_plan(dtype), delta, _delta([counted]))
    )


def _delta(counted: Sequence[Sequence[ClassCounts]]) -> Plan:
    total = [functools.reduce(ClassCounts.__add__, plane) for plane in zip(*counted, strict=True)]
    return planes_plan(
        MODE, (Magnitude(),), tuple(stream_tables(plane, N_MAGNITUDE_CLASSES) for plane in total)
    )


def _codes_alike(source: ArraySource, there: DeviceSource, plan: Plan, base: Near, workers: Workers) -> bool:
    bounds = source.chunk_bounds()
    wanted = [encode_chunk(source, Draft(plan), ChunkSources(*each, base)) for each in bounds]
    made = _encoded(there, plan, base, workers, DEVICE_BYTES).chunks
    both = zip(made, wanted, strict=True)
    return all(a.record == b.record and bytes(a.payload) == bytes(b.payload) for a, b in both)
