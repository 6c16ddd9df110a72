"""`apply_`: a delta written into live PyTorch tensors, in place.

The tensors may be on any device and keep their memory: models, optimizers and CUDA graphs that hold them
see the new values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from ckptz.api.read import PathLike, check_limit, checked_path
from ckptz.errors import ConfigError, FormatError
from ckptz.format.byte_source import FileBytes, MemoryBytes
from ckptz.format.decode import Positions
from ckptz.format.dtypes import DType
from ckptz.format.reader import Container
from ckptz.format.sources import PATTERN_TYPES
from ckptz.kernels.floats import Patterns
from ckptz.kernels.torch import bytes_of
from ckptz.parallel import Workers
from ckptz.state.torch import stored_type
from ckptz.store.patch import CHECKS, Check, LiveTensor, Patched, patch
from ckptz.store.resolve import open_file

State = Mapping[str, torch.Tensor]

# PyTorch indexes only some of its unsigned types; a pattern's bits are the same in the signed one.
_SIGNED: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def apply_(
    state_dict: State,
    delta: PathLike | bytes,
    *,
    check: Check = "base",
    max_decoded_bytes: int | None = None,
    jobs: int | None = None,
) -> Patched:
    """Write a delta into the tensors it was made for, in place and bit for bit.

    Either every tensor ends up with the delta's values or none is changed: all is decoded and checked
    before the first write, and an interrupted write is taken back. Nobody else may write to the tensors
    meanwhile. A full file is written over whatever the tensors hold.

    Args:
        state_dict: tensors by name, on any device; those that the delta does not hold are left alone.
        delta: a `.ckptz` file, or its bytes. Its base is `state_dict`: no other file is read.
        check: "base" holds every present value of every tensor in the delta against checksums. "stored"
            checks the delta's own bytes and trusts the tensors: it reads and writes only what changes.
        max_decoded_bytes: most memory to take for tensors that are not stored by their changes; by
            default, the memory that is free.
        jobs: threads, all cores by default.

    Returns:
        What was written.

    Raises:
        MissingBaseError: the tensors are not those that the delta was made from, or have its values already.
        ConfigError: a tensor is missing, or has another dtype or shape.
        FormatError: the delta is damaged.

    Example:
        >>> import torch
        >>> from ckptz.torch import apply_, save_file
        >>> trained, live = {"weight": torch.ones(2)}, {"weight": torch.ones(2)}
        >>> save_file(trained, "step-1.ckptz")
        >>> trained["weight"][0] = 1.5
        >>> save_file(trained, "step-2.ckptz", base="step-1.ckptz")
        >>> report = apply_(live, "step-2.ckptz")
        >>> live
        {'weight': tensor([1.5000, 1.0000])}
    """
    if check not in CHECKS:
        raise ConfigError(f"check must be one of {CHECKS}, got {check!r}")
    live = live_tensors(state_dict)
    source = MemoryBytes(delta) if isinstance(delta, bytes) else FileBytes(Path(checked_path(delta)))
    with contextlib.closing(open_file(source)) as file:
        if not isinstance(file, Container):
            raise FormatError(f"{file.name}: not a .ckptz file; load it with load_file")

        def allow(n_bytes: int) -> None:
            check_limit(n_bytes, max_decoded_bytes, file.name)

        with Workers(jobs) as workers:
            return patch(file, live, check=check, workers=workers, allow=allow)


def live_tensors(state_dict: State) -> dict[str, LiveTensor]:
    """Give the tensors of a state as sources that can be written to.

    Raises:
        ConfigError: not a mapping of dense tensors by name.
        DTypeError: a dtype that the format does not know.
    """
    if not isinstance(state_dict, Mapping):
        raise ConfigError(f"a state is a dict of PyTorch tensors by name, got {type(state_dict).__name__}")
    return {name: _live(name, tensor) for name, tensor in state_dict.items()}


def _live(name: str, tensor: Any) -> LiveTensor:
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"tensor {name!r} is a {type(tensor).__name__}, not a PyTorch tensor")
    if hasattr(tensor, "__tensor_flatten__"):  # made of other tensors, as a DTensor is
        raise ConfigError(
            f"tensor {name!r} is a {type(tensor).__name__}; give the plain tensors it is made of"
        )
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise ConfigError(f"tensor {name!r} is {tensor.layout} on {tensor.device}; it has no dense memory")
    dtype, shape = stored_type(name, tensor)
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        raise ConfigError(f"tensor {name!r} is a conjugate or negative view; give the tensor behind it")
    if tensor.is_contiguous():
        return _contiguous(dtype, shape, tensor)
    if _overlaps(tensor):
        raise ConfigError(f"tensor {name!r} has several elements in one place of memory; give a copy of it")
    return _StridedTensor(dtype, shape, tensor)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements may share memory, as in what `expand` gives."""
    reach = 0  # of all dimensions with smaller steps
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1 and stride <= reach:
            return True
        reach += (n - 1) * stride
    return False


def _contiguous(dtype: DType, shape: tuple[int, ...], tensor: torch.Tensor) -> LiveTensor:
    flat = bytes_of(tensor).view(_SIGNED[dtype.pattern_bytes])
    return _HostTensor(dtype, shape, flat) if tensor.device.type == "cpu" else _FlatTensor(dtype, shape, flat)


class _FlatTensor(LiveTensor):
    """A contiguous tensor on any device; `flat` are its patterns as signed integers."""

    dtype: DType
    shape: tuple[int, ...]

    def __init__(self, dtype: DType, shape: tuple[int, ...], flat: Any) -> None:
        self.dtype, self.shape, self._flat = dtype, shape, flat

    def patterns(self, begin: int, end: int) -> Patterns:
        return _patterns_of(self._flat[begin:end])

    def take(self, positions: Positions) -> Patterns:
        return _patterns_of(self._flat[self._moved(positions)])

    def put(self, positions: Positions, patterns: Patterns) -> None:
        self._flat[self._moved(positions)] = self._moved(_signed(patterns))

    def write(self, begin: int, patterns: Patterns) -> None:
        self._flat[begin : begin + len(patterns)] = self._moved(_signed(patterns))

    def _moved(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(self._flat.device)


class _HostTensor(_FlatTensor):
    """A contiguous tensor in memory that numpy shares."""

    def __init__(self, dtype: DType, shape: tuple[int, ...], flat: torch.Tensor) -> None:
        super().__init__(dtype, shape, _patterns_of(flat))

    def patterns(self, begin: int, end: int) -> Patterns:
        return np.require(self._flat[begin:end], requirements=["A"])

    def take(self, positions: Positions) -> Patterns:
        taken: Patterns = self._flat[positions]
        return taken

    def put(self, positions: Positions, patterns: Patterns) -> None:
        self._flat[positions] = patterns

    def write(self, begin: int, patterns: Patterns) -> None:
        self._flat[begin : begin + len(patterns)] = patterns


class _StridedTensor(LiveTensor):
    """A tensor whose elements do not lie in order, such as one in channels_last format.

    It is read once for each file, in order, when it is first asked for.
    """

    dtype: DType
    shape: tuple[int, ...]

    def __init__(self, dtype: DType, shape: tuple[int, ...], tensor: torch.Tensor) -> None:
        self.dtype, self.shape, self._tensor = dtype, shape, tensor
        span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self._memory = _contiguous(dtype, (span,), tensor.as_strided((span,), (1,)))
        self._n_parts = tensor.element_size() // dtype.pattern_bytes
        self._read: LiveTensor | None = None

    @property
    def _ordered(self) -> LiveTensor:
        if self._read is None:
            self._read = _contiguous(self.dtype, self.shape, self._tensor.contiguous())
        return self._read

    def patterns(self, begin: int, end: int) -> Patterns:
        return self._ordered.patterns(begin, end)

    def take(self, positions: Positions) -> Patterns:
        return self._ordered.take(positions)

    def put(self, positions: Positions, patterns: Patterns) -> None:
        element, part = np.divmod(positions, self._n_parts)
        indices = np.unravel_index(element, tuple(self._tensor.shape))
        offset = sum(i * stride for i, stride in zip(indices, self._tensor.stride(), strict=True))
        self._memory.put(offset * self._n_parts + part, patterns)
        if self._read is not None:
            self._read.put(positions, patterns)

    def forget(self) -> None:
        self._read = None

    def write(self, begin: int, patterns: Patterns) -> None:
        self.put(np.arange(begin, begin + len(patterns)), patterns)


def _patterns_of(flat: torch.Tensor) -> Patterns:
    array = flat.cpu().numpy()
    return array.view(PATTERN_TYPES[array.itemsize])


def _signed(patterns: Patterns) -> Any:
    return patterns.view(np.uint8 if patterns.itemsize == 1 else f"<i{patterns.itemsize}")
