"""Links that carry torch tensors, and a plain pair of ends over `torch.distributed`.

Tensors on the CPU go through the compiled kernels without a copy, those on a GPU of NVIDIA's through Triton's
kernels where it is installed, and others through torch's operations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ckptz.dtypes import DTYPE_NAMES, DType, dtype_of
from ckptz.errors import DTypeError, WireError
from ckptz.kernels import wire_on_gpu, wire_torch
from ckptz.kernels.torch import UNIT_TYPES, current, has_kernels
from ckptz.wire.endpoint import Link, can_wait
from ckptz.wire.header import Direction
from ckptz.wire.policy import LinkPolicy, policy_of
from ckptz.wire.state import Place

# Those that messages can carry.
CODES: Final = (
    *("BOOL", "U8", "I8", "I16", "I32", "I64"),
    *("F16", "BF16", "F32", "F64", "C64", "F8_E4M3", "F8_E5M2"),
)
NAMES: Final = {getattr(torch, DTYPE_NAMES[code]): code for code in CODES}


def dtype_named(dtype: torch.dtype) -> DType:
    """Find the row of the dtype table.

    Raises:
        DTypeError: messages cannot carry this type.
    """
    if dtype not in NAMES:
        raise DTypeError(f"messages cannot carry {dtype}; cast the tensor before it is sent")
    return dtype_of(NAMES[dtype])


class TensorLink:
    """A `Link` for torch tensors.

    Args:
        src, dst, policy, options: as for `Link`.
        device: where the tensors live.
        use_torch: take torch's kernels on the CPU too.
        fixed: as for `Link`; NCCL needs it.
        verify: as for `Link`; by default "step" on a device, where the policy and `fixed` allow it.
    """

    def __init__(
        self,
        src: int,
        dst: int,
        policy: LinkPolicy | str,
        *,
        device: torch.device | str = "cpu",
        use_torch: bool = False,
        fixed: bool = False,
        verify: Literal["message", "step"] | None = None,
        **options: Any,
    ) -> None:
        self.device = torch.device(device)
        self._use_torch = use_torch or self.device.type != "cpu"
        there = wire_on_gpu() if has_kernels(self.device) else wire_torch
        kernels = there if self._use_torch else None
        like = torch.zeros(0, dtype=torch.uint8, device=self.device) if self._use_torch else None
        if verify is None:
            waits = self.device.type != "cpu" and can_wait(policy_of(policy), fixed)
            verify = "step" if waits else "message"
        options |= {"kernels": kernels, "like": like, "fixed": fixed, "verify": verify}
        self.link = Link(src, dst, policy, **options)

    def _units(self, tensor: Tensor) -> Any:
        """Bit patterns of a tensor, flat; shares its memory where it is contiguous."""
        dtype = dtype_named(tensor.dtype)
        flat = tensor.detach().contiguous().view(-1)
        if not len(flat):
            flat = flat.new_empty(0)
        units = flat.view(UNIT_TYPES[dtype.unit_bytes])
        return units if self._use_torch else units.numpy().view(f"<u{dtype.unit_bytes}")

    def _tensor(self, units: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Inverse of `_units`; shares the units' memory."""
        if not self._use_torch:
            signed = UNIT_TYPES[dtype_named(dtype).unit_bytes]
            units = torch.from_numpy(units.view(f"<i{units.itemsize}")).view(signed)
        return units.view(dtype).view(shape)

    def send(self, direction: Direction, tensor: Tensor, place: Place) -> tuple[Tensor, Callable[[], Tensor]]:
        """Encode a tensor as (message as uint8, function that makes the tensor which the other end gets)."""
        shape = tuple(tensor.shape)
        with current(self.device):
            sent = self.link.send(direction, self._units(tensor), dtype_named(tensor.dtype), shape, place)
        message = sent.message if self._use_torch else torch.from_numpy(sent.message)

        def decode() -> Tensor:
            with current(self.device):
                return self._tensor(sent.decode(), tensor.dtype, shape)

        return message, decode

    def simulate(self, direction: Direction, tensor: Tensor, place: Place) -> Tensor:
        """Give what `send` brings to the other end, in memory of its own."""
        shape, units = tuple(tensor.shape), self._units(tensor)
        with current(self.device):
            received = self.link.simulate(direction, units, dtype_named(tensor.dtype), shape, place)
        result = self._tensor(received, tensor.dtype, shape)
        return result.clone() if received is units else result

    def buffer(self, direction: Direction, like: Tensor, place: Place) -> Tensor:
        """Make memory for the message that is due."""
        shape = tuple(like.shape)
        n_bytes = self.link.message_cap(direction, dtype_named(like.dtype), shape, place)
        return torch.empty(n_bytes, dtype=torch.uint8, device=self.device)

    def receive(
        self, direction: Direction, message: Tensor, dtype: torch.dtype, shape: tuple[int, ...], place: Place
    ) -> Tensor:
        """Decode the tensor in a message.

        Raises:
            WireError: the message is damaged, or another one than the one that is due.
        """
        data = message if self._use_torch else message.numpy()
        with current(self.device):
            units = self.link.receive(direction, data, dtype_named(dtype), tuple(shape), place)
        return self._tensor(units, dtype, tuple(shape))


class DistributedLink:
    """A plain `send`/`recv` pair over `torch.distributed`, outside of any schedule.

    Args:
        src, dst, policy, options: as for `TensorLink`.
        peer: rank of the other end.
        group: process group; the default one.
        fixed: messages of fixed size; by default where the backend is not gloo.
    """

    def __init__(
        self,
        src: int,
        dst: int,
        policy: LinkPolicy | str,
        peer: int,
        *,
        group: dist.ProcessGroup | None = None,
        fixed: bool | None = None,
        **options: Any,
    ) -> None:
        if fixed is None:
            fixed = dist.get_backend(group) != "gloo"
        self.link = TensorLink(src, dst, policy, fixed=fixed, **options)
        self._peer, self._group = peer, group
        self._sent = dict.fromkeys(Direction, 0)
        self._received = dict.fromkeys(Direction, 0)

    def send(
        self, tensor: Tensor, direction: Direction = Direction.FORWARD, place: Place | None = None
    ) -> Tensor:
        """Send a tensor to the peer; gives the tensor that the peer decodes."""
        place = place or Place(self._sent[direction])
        message, decode = self.link.send(direction, tensor, place)
        self._sent[direction] = place.step + 1
        with naming(self.link.link.name_of(direction, place), "send"):
            dist.send(message, self._peer, self._group)
        return decode()

    def recv(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        direction: Direction = Direction.FORWARD,
        place: Place | None = None,
    ) -> Tensor:
        """Receive the next tensor from the peer.

        Raises:
            WireError: the peer is gone, or the message is not the one that is due.
        """
        place = place or Place(self._received[direction])
        like = torch.empty(shape, dtype=dtype, device="meta")
        buffer = self.link.buffer(direction, like, place).zero_()
        with naming(self.link.link.name_of(direction, place), "receive"):
            dist.recv(buffer, self._peer, self._group)
        self._received[direction] = place.step + 1
        return self.link.receive(direction, buffer, dtype, tuple(shape), place)


@contextlib.contextmanager
def naming(name: str, what: str) -> Iterator[None]:
    """Name the message in the error of a transport that fails on it."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WireError(f"{name}: {what}: {reason}") from error


def sample_ids_of(ids: Tensor | None) -> Any:
    """Give sample ids as the links take them, int64."""
    return None if ids is None else np.ascontiguousarray(ids.detach().cpu().numpy(), np.int64)
