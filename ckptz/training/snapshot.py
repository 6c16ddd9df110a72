"""A copy of a nested state in host memory, whose buffers are reused by the next copy.

Training continues when the copy is made. On CUDA, copies run on their own stream into pinned memory; the
training stream waits for them on the device, and the host does not wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


class Snapshot:
    """Buffers for the tensors of a state, which are reused by the next snapshot.

    `take` may be called again when the last snapshot is no longer read.

    Args:
        max_bytes: largest size of the buffers; None for no limit. Tensors that do not fit, weights last, are
            not copied: the snapshot has placeholders for them, and `hold` has the tensors.

    Attributes:
        hold: the tensors of the last snapshot that were not copied; the state must not change before they
            are released.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self.hold = Hold()
        self._max_bytes = max_bytes
        self._buffers: dict[Key, torch.Tensor] = {}
        self._done: list[torch.cuda.Event] = []

    def take(self, state: Any) -> Any:
        """Copy the tensors of a nested state; tied tensors stay tied.

        Raises:
            ConfigError: a tensor has no memory of its own, or a dtype that files do not have; the message
                names it.
        """
        self.hold = Hold()
        copying = _Copying(self._buffers, self._max_bytes, self.hold)
        try:
            taken = copying.node(state, ())
        finally:  # an error or an interrupt does not end running copies
            copying.finish()
        self._buffers, self._done = copying.used, copying.done
        return taken

    def synchronize(self) -> None:
        """Wait until the copies are complete; readers call this."""
        for event in self._done:
            event.synchronize()


class _Copying:
    """One traversal of a state, and its running copies by device."""

    def __init__(self, spare: dict[Key, torch.Tensor], max_bytes: int | None, hold: Hold) -> None:
        self.used: dict[Key, torch.Tensor] = {}
        self.done: list[torch.cuda.Event] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
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
            if self._is_beyond(
                tensor
            ):  # a placeholder of the same shape and dtype, whose memory is never used
                made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                self._stream_of(tensor.device)  # readers wait for the present work of the device
                self._hold.tensors[made.data_ptr()] = tensor
                self._hold.has_weights |= path[0] == (str, MODEL)
                self._copies[identity] = made
            else:
                buffer = self._buffer(tensor, path)
                self._copy(tensor, buffer)
                self._copies[identity] = self.used[path] = buffer
        return self._copies[identity]

    def _copy(self, source: torch.Tensor, buffer: torch.Tensor) -> None:
        stream = self._stream_of(source.device)
        if stream is None:
            buffer.copy_(source)
            return
        with torch.cuda.stream(stream):
            buffer.copy_(source, non_blocking=True)
        source.record_stream(stream)

    def _stream_of(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return the stream of copies from a device; it waits for the present work of the device."""
        if device.type != "cuda":
            return None
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
        return stream

    def finish(self) -> None:
        """Make the training stream wait for the copies, and record an event at their end."""
        for device, stream in self._streams.items():
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
            torch.cuda.current_stream(device).wait_stream(stream)
            self.done.append(event)

    def _is_beyond(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor does not fit; otherwise subtract its bytes from the remaining ones.

        Scalars, and tensors whose elements are not in the order of a file, are always copied.
        """
        if self._left is None:
            return False
        is_plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        if is_plain and tensor.ndim and tensor.nbytes > self._left:
            return True
        self._left -= tensor.nbytes
        return False

    def _buffer(self, tensor: torch.Tensor, path: Key) -> torch.Tensor:
        spare = self._spare.get(path)
        is_pinned = tensor.device.type == "cuda"
        # The strides of weights are not needed, because a restore copies them into the model's memory. Of
        # others, such as channels-last moments, `empty_like` preserves the order of dense elements.
        is_weight = bool(path) and path[0] == (str, MODEL)
        meta = torch.device("meta")
        like = torch.empty(tensor.shape, device=meta) if is_weight else torch.empty_like(tensor, device=meta)
        strides = like.stride()
        wanted = tensor.dtype, tensor.shape, strides, is_pinned
        if spare is not None and (spare.dtype, spare.shape, spare.stride(), spare.is_pinned()) == wanted:
            return spare
        if is_pinned or strides != torch.empty(tensor.shape, device=meta).stride():
            return torch.empty_strided(
                tensor.shape, strides, dtype=tensor.dtype, device="cpu", pin_memory=is_pinned
            )
        made: torch.Tensor = _HOST.allocate(  # large tensors in huge pages, which are faster
            dtype_of(DTYPE_CODES[_name_of(tensor.dtype)]), tuple(tensor.shape)
        )[0]
        return made


def identity_of(tensor: torch.Tensor) -> object:
    """Return the identity of a tensor: equal for tensors with the same memory in the same order.

    An empty tensor has no address, so its identity is that of the object.
    """
    if not tensor.numel():
        return id(tensor)
    place = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    return *place, tensor.is_conj(), tensor.is_neg()


def named_tensors(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a nested value with their dotted paths."""
    if isinstance(value, torch.Tensor):
        yield ".".join(path), value
    is_list = type(value) in (list, tuple)
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if is_list else ()
    for key, item in items:
        yield from named_tensors(item, (*path, str(key)))


def check_dense(tensor: torch.Tensor, name: str) -> None:
    """Check that a tensor has its values in its own memory.

    Raises:
        ConfigError: it is on the meta device, consists of other tensors, or is not dense.
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


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
