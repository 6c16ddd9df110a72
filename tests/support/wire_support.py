"""Shared code of the tests of the wire: tensors as bit patterns, and pairs of ends."""

from typing import Any

import numpy as np
import torch

from ckptz.format.dtypes import dtype_of
from ckptz.kernels import wire_cpu, wire_torch
from ckptz.wire.endpoint import Link
from ckptz.wire.header import Direction
from ckptz.wire.policy import FLOAT_KINDS, LinkPolicy
from ckptz.wire.state import MessageKey
from tests.support import wire_reference

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
SHAPE = (5, 1111)
N = 5555


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def f32_patterns(values: Any, dtype: str = "F32") -> Any:
    """Round floats to the bit patterns of a dtype [n]."""
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    return wire_reference.from_f32(flat.view(np.uint32), FLOAT_KINDS[dtype])


def floats(patterns: Any, dtype: str = "F32") -> Any:
    return wire_reference.to_f32(patterns, FLOAT_KINDS[dtype]).view(np.float32)


def to_torch(array: Any, device: str = "cpu") -> torch.Tensor:
    signed = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[array.itemsize]
    return torch.from_numpy(np.ascontiguousarray(array).view(signed).copy()).to(device)


def from_torch(tensor: torch.Tensor, dtype: Any) -> Any:
    return tensor.cpu().numpy().view(dtype)


def devices() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def ends(policy: LinkPolicy, **options: Any) -> tuple[Link, Link]:
    """Return both ends of a link, the first with compiled kernels, the second with the reference."""
    return (
        Link(0, 1, policy, kernels=wire_cpu, **options),
        Link(0, 1, policy, kernels=wire_reference, **options),
    )


def torch_end(policy: LinkPolicy, device: str) -> Link:
    return Link(0, 1, policy, kernels=wire_torch, like=torch.zeros(0, dtype=torch.uint8, device=device))


def across(
    pair: tuple[Link, Link], patterns: Any, place: MessageKey, *, back: bool = False, dtype: str = "F32",
    shape: tuple[int, ...] = SHAPE,
) -> tuple[Any, Any]:  # fmt: skip
    """Send and receive one tensor, require that both ends agree, and return (message, received patterns)."""
    sender, receiver = pair[::-1] if back else pair
    direction = BACKWARD if back else FORWARD
    sent = sender.send(direction, patterns, dtype_of(dtype), shape, place)
    received = receiver.receive(direction, sent.message, dtype_of(dtype), shape, place)
    assert np.array_equal(received, sent.decode())
    return sent.message, received
