"""Encodes weights on their device, so that only codes of a few bits per value are copied to the host.

Histogram, codes, packing and errors are torch operations on the device of the tensor. The quantization map is
fitted to the histogram on the host. Codes are bit for bit those of the CPU kernels for the same map.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from ckptz.codec.coded import CodedSource, bits_for
from ckptz.codec.histogram import Histogram
from ckptz.codec.method import Method
from ckptz.codec.partitions import Partitions, RegionQuantizer, fit_partitions
from ckptz.format.dtypes import DTYPE_CODES, DType, dtype_of
from ckptz.format.plan import Domain, Plan, QuantizationMap
from ckptz.format.sources import CHUNK_VALUES, PATTERN_TYPES
from ckptz.format.values import FLOAT_KINDS, ValueTable
from ckptz.kernels import torch as kernels
from ckptz.kernels.torch import is_on_device
from ckptz.parallel import Workers
from ckptz.state.roles import role_of

SLAB_VALUES: Final = 16 * CHUNK_VALUES  # encoded at once: torch needs 8 bytes per value or more for it
Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class _WeightToCode:
    """A tensor to encode on its device."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    flat: torch.Tensor
    histogram: Histogram
    wanted: Partitions


def code_where_they_live(
    weights: Mapping[str, Any], prefix: str, config: Method, workers: Workers
) -> dict[str, CodedSource]:
    """Encode the weights on devices whose codes depend on their histogram alone.

    Args:
        weights: the model's state by name.
        prefix: prefix of the names in the file.
        config: the method.
        workers: threads, which fit maps of several tensors at once.

    Returns:
        The codes by name, without tensors that are not finite, share memory, or are ranked by sensitivity:
        these are copied.
    """
    # A model with tied tensors needs a tree, all of whose tensors are in one form.
    at = [t.data_ptr() if isinstance(t, torch.Tensor) else 0 for t in weights.values()]
    if not all(at) or len(set(at)) < len(at):
        return {}
    tasks = [task for task in (_task(name, t, prefix, config) for name, t in weights.items()) if task]
    return {task.name: _coded(task, *fit) for task, fit in zip(tasks, workers.map(_fit, tasks), strict=True)}


def _task(name: str, tensor: Any, prefix: str, config: Method) -> _WeightToCode | None:
    if not isinstance(tensor, torch.Tensor) or not is_on_device(tensor) or not tensor.numel():
        return None
    code = DTYPE_CODES.get(str(tensor.dtype).removeprefix("torch."))
    if code not in FLOAT_KINDS or hasattr(tensor, "__tensor_flatten__"):
        return None
    dtype, shape = dtype_of(code), tuple(tensor.shape)
    wanted = config.recipe(role_of(prefix + name, shape, dtype.is_float), dtype, shape).partitions
    if wanted is None or wanted.needs_sensitivity:
        return None
    flat = tensor.detach().reshape(-1).view(kernels.PATTERN_TYPES[dtype.pattern_bytes])
    counts = sum(kernels.top_histogram(slab) for slab in torch.split(flat, SLAB_VALUES))
    assert isinstance(counts, torch.Tensor)
    histogram = Histogram(FLOAT_KINDS[code], counts.cpu().numpy())
    return _WeightToCode(name, dtype, shape, flat, histogram, wanted) if histogram.is_finite else None


def _fit(task: _WeightToCode) -> tuple[QuantizationMap, RegionQuantizer]:
    quant_map, quantizer = fit_partitions(task.histogram, task.wanted)
    assert isinstance(quantizer, RegionQuantizer)
    return quant_map, quantizer


def _coded(task: _WeightToCode, quant_map: QuantizationMap, quantizer: RegionQuantizer) -> CodedSource:
    """Encode a tensor slab by slab; results stay on the device until the end."""
    device, kind = task.flat.device, FLOAT_KINDS[task.dtype.name]
    table = ValueTable(task.dtype, Plan(quant_map=quant_map, domain=Domain.LINEAR))
    boundaries, region_code = _on(quantizer.boundaries, device), _on(quantizer.region_code, device)
    entries = _on(table.entries[0], device)
    escape = -1 if quant_map.escape_code is None else quant_map.escape_code
    packed, kept = list[torch.Tensor](), list[torch.Tensor]()  # of each slab
    n_kept, errors = list[torch.Tensor](), list[torch.Tensor]()  # of each chunk

    def restored_kept(patterns: torch.Tensor) -> Array:
        unsigned: Array = patterns.cpu().numpy().view(PATTERN_TYPES[task.dtype.pattern_bytes])
        return quantizer.kept(0, unsigned)

    def add(slab: torch.Tensor) -> None:
        codes = kernels.region_codes(slab, boundaries, region_code)
        packed.append(kernels.pack_codes(codes, bits_for(quant_map.n_codes)))
        restored, escaped = entries[codes.to(torch.int64)], codes == escape
        kept.append(slab[escaped])
        restored[escaped] = _on(restored_kept(kept[-1]), device)
        chunks = (torch.split(part, CHUNK_VALUES) for part in (slab, restored, escaped))
        for *both, mask in zip(*chunks, strict=True):
            n_kept.append(mask.sum())
            values, decoded = (kernels.to_f32(u, kind).view(torch.float32).to(torch.float64) for u in both)
            error = decoded - values
            errors.append(torch.stack([error.abs().max(), error.square().sum(), values.square().sum()]))

    for slab in torch.split(task.flat, SLAB_VALUES):
        add(slab)
    return CodedSource(
        dtype=task.dtype,
        shape=task.shape,
        quant_map=quant_map,
        packed=_to_host(torch.cat(packed)),
        kept=np.ascontiguousarray(restored_kept(torch.cat(kept))),
        kept_ends=tuple(torch.stack(n_kept).cumsum(0).tolist()),
        errors=tuple(map(tuple, torch.stack(errors).tolist())),
    )


def _on(array: Array, device: torch.device) -> torch.Tensor:
    """Convert unsigned patterns or codes to a torch tensor of integers of the same size."""
    signed = np.uint8 if array.itemsize == 1 else f"<i{array.itemsize}"
    return torch.from_numpy(np.ascontiguousarray(array).view(signed)).to(device)


def _to_host(tensor: torch.Tensor) -> Array:
    if tensor.device.type != "cuda":
        return tensor.cpu().numpy()
    # A device writes to pinned memory at full speed.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    host.copy_(tensor)
    return host.numpy()
