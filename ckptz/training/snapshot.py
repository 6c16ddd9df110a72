"""A copy of a nested state in host memory that is used again and again.

Training goes on as soon as the copy is made. On CUDA the copies run on a stream of their own into pinned
memory: the training stream waits for them on the device, the host does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch

from ckptz.errors import ConfigError
from ckptz.format.dtypes import DTYPE_CODES, dtype_of
from ckptz.state.flatten import CODES
from ckptz.state.torch import TorchTensors
from ckptz.training.live import Hold

Key = tuple[object, ...]  # a key of a dict with its type, as 1 equals True, or a place in a list
_HOST: Final = TorchTensors("cpu", False)
MODEL: Final = "model"  # the key of the weights in a state


@dataclass(slots=True)
class _Transfer:
    """The copies of one snapshot that are under way, by device."""

    streams: dict[torch.device, torch.cuda.Stream] = field(default_factory=dict)
    done: list[torch.cuda.Event] = field(default_factory=list)

    def copy(self, source: torch.Tensor, buffer: torch.Tensor) -> None:
        stream = self.stream_of(source.device)
        if stream is None:
            buffer.copy_(source)
            return
        with torch.cuda.stream(stream):
            buffer.copy_(source, non_blocking=True)
        source.record_stream(stream)

    def stream_of(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return the stream of copies from a device, which waits for the work that the device has now."""
        if device.type != "cuda":
            return None
        stream = self.streams.get(device)
        if stream is None:
            stream = self.streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
        return stream

    def finish(self) -> None:
        """Make the training stream wait for the copies, and record their end."""
        for device, stream in self.streams.items():
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
            torch.cuda.current_stream(device).wait_stream(stream)
            self.done.append(event)


class Snapshot:
    """Buffers for the tensors of a state, kept from one snapshot to the next.

    `take` may be called again when nobody reads the last one any more.

    Args:
        max_bytes: that the buffers may take; None for no limit. Tensors beyond it, weights last, are not
            copied: the snapshot has placeholders without memory for them, and `hold` the tensors themselves.

    Attributes:
        hold: of the last snapshot; whoever took it waits for it before the state changes.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self.hold = Hold()
        self._max_bytes = max_bytes
        self._buffers: dict[Key, torch.Tensor] = {}
        self._done: list[torch.cuda.Event] = []

    @property
    def n_bytes(self) -> int:
        """Host memory that the buffers take."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def take(self, state: Any) -> Any:
        """Copy the tensors of a nested state, which keeps its form; those that are one stay one.

        Raises:
            ConfigError: a tensor without memory of its own, or of a type that files do not have; the message
                names it.
        """
        self.hold = Hold()
        copying = _Copying(self._buffers, self._max_bytes, self.hold)
        try:
            taken = copying.node(state, ())
        finally:  # an error or an interrupt does not end the copies that are under way
            copying.transfer.finish()
        self._buffers, self._done = copying.used, copying.transfer.done
        return taken

    def synchronize(self) -> None:
        """Wait until the copies are complete; for whoever reads them."""
        for event in self._done:
            event.synchronize()


class _Copying:
    """One walk through a state."""

    def __init__(self, spare: dict[Key, torch.Tensor], max_bytes: int | None, hold: Hold) -> None:
        self.used: dict[Key, torch.Tensor] = {}
        self.transfer = _Transfer()
        self._spare = spare
        self._left, self._hold = max_bytes, hold
        self._copies: dict[object, torch.Tensor] = {}

    def node(self, value: Any, path: tuple[tuple[type, Any], ...]) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, dict):
            items = ((key, self.node(item, (*path, (type(key), key)))) for key, item in value.items())
            return type(value)(items)
        if type(value) in (list, tuple):
            return type(value)(self.node(item, (*path, (int, i))) for i, item in enumerate(value))
        return value

    def _tensor(self, tensor: torch.Tensor, path: tuple[tuple[type, Any], ...]) -> torch.Tensor:
        name = ".".join(str(key) for _, key in path)
        check_dense(tensor, name)
        if _name_of(tensor.dtype) not in CODES:
            raise ConfigError(
                f"tensor {name!r} is of {tensor.dtype}, for which files have no name; view it as another type"
            )
        identity, tensor = identity_of(tensor), tensor.detach()
        if identity not in self._copies:
            if self._is_beyond(tensor):
                self._copies[identity] = self._placeholder(tensor, path)
            else:
                buffer = self._buffer(tensor, path)
                self.transfer.copy(tensor, buffer)
                self._copies[identity] = self.used[path] = buffer
        return self._copies[identity]

    def _is_beyond(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is left where it lives; else its bytes are taken from those that are left.

        Numbers, and tensors whose elements are not in the order of a file, are always copied.
        """
        if self._left is None:
            return False
        is_plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        if is_plain and tensor.ndim and tensor.nbytes > self._left:
            return True
        self._left -= tensor.nbytes
        return False

    def _placeholder(self, tensor: torch.Tensor, path: Key) -> torch.Tensor:
        """Return a tensor of the same form whose memory is never touched."""
        made = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.transfer.stream_of(tensor.device)  # whoever reads the tensor waits for what the device does now
        self._hold.tensors[made.data_ptr()] = tensor
        self._hold.has_weights |= path[0] == (str, MODEL)
        return made

    def _buffer(self, tensor: torch.Tensor, path: Key) -> torch.Tensor:
        spare = self._spare.get(path)
        is_pinned = tensor.device.type == "cuda"
        strides = _strides_of(tensor, path)
        wanted = tensor.dtype, tensor.shape, strides, is_pinned
        if spare is not None and (spare.dtype, spare.shape, spare.stride(), spare.is_pinned()) == wanted:
            return spare
        if is_pinned or strides != torch.empty(tensor.shape, device="meta").stride():
            return torch.empty_strided(
                tensor.shape, strides, dtype=tensor.dtype, device="cpu", pin_memory=is_pinned
            )
        return _pageable(tensor)


def _strides_of(tensor: torch.Tensor, path: Key) -> tuple[int, ...]:
    """Return the strides of a buffer: those of a dense tensor, such as a channels-last moment, or row-major.

    Weights are copied into the model's own memory when they are restored, so theirs need not be kept.
    """
    is_weight = bool(path) and path[0] == (str, MODEL)
    like = torch.empty(tensor.shape, device="meta") if is_weight else _dense_like(tensor)
    return like.stride()


def _dense_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format)


def identity_of(tensor: torch.Tensor) -> object:
    """Return the identity of a tensor: equal for tensors with the same memory in the same order.

    An empty one has no address and is only itself, as long as the state keeps it alive.
    """
    if not tensor.numel():
        return id(tensor)
    place = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    return *place, tensor.is_conj(), tensor.is_neg()


def check_dense(tensor: torch.Tensor, name: str) -> None:
    """Require a tensor that has its values in memory of its own.

    Raises:
        ConfigError: it is on the meta device, made of other tensors, or not dense.
    """
    if tensor.device.type == "meta":
        raise ConfigError(
            f"tensor {name!r} is on the meta device, so it has no values: it is offloaded or was never "
            "initialised; load the whole model into memory before it is saved or restored"
        )
    if hasattr(tensor, "full_tensor"):
        raise ConfigError(
            f"tensor {name!r} is a {type(tensor).__name__}, of which each rank holds a part; save it with "
            "torch.distributed.checkpoint and ckptz.integrations.dcp, or gather it first"
        )
    if hasattr(tensor, "__tensor_flatten__"):
        raise ConfigError(
            f"tensor {name!r} is a {type(tensor).__name__}, made of other tensors; turn it into a plain one"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else "sparse"
        raise ConfigError(f"tensor {name!r} is {kind} ({tensor.layout}); make it a dense one first")


def _pageable(like: torch.Tensor) -> torch.Tensor:
    """A CPU tensor of the same dtype and shape; a large one in huge pages, which are quick to touch."""
    code = DTYPE_CODES[_name_of(like.dtype)]
    made: torch.Tensor = _HOST.allocate(dtype_of(code), tuple(like.shape))[0]
    return made


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
