"""Fixtures by which host memory stands for a device: it is said to have kernels, and tensors to live there.

A plugin of pytest's. The bytes are made by Triton's interpreter where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ckptz.torch
from ckptz.api import apply as api_apply
from ckptz.codec import on_device as on_device_codec
from ckptz.container.reader import FrameSource
from ckptz.encoding import on_device as on_device_encoding
from ckptz.encoding import planes_on_device, there
from ckptz.entropy import streams
from ckptz.frameworks import torch as torch_frameworks
from ckptz.integrations import sharded
from ckptz.methods import first_moment, lossless
from ckptz.training import device as training_device
from tests.support import quick_kernels
from tests.support.device_support import DEVICE, SMALL_CHUNK, cut_chunks


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes milliseconds for a step of a coder."""
    cut_chunks(SMALL_CHUNK, monkeypatch)
    for module in (lossless, first_moment):
        monkeypatch.setattr(module, "MIN_CLASSED_UNITS", 200)
    monkeypatch.setattr(lossless, "SAMPLE_UNITS", 200)  # of one chunk
    monkeypatch.setattr(streams, "LANE_MIN_BYTES", (0, 40, 160))


@pytest.fixture
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory counts as a device with kernels where there is no GPU."""
    for module in (training_device, on_device_encoding):
        monkeypatch.setattr(module, "MIN_ENCODED", 500)
    if DEVICE == "cuda":
        return
    for module in (torch_frameworks, on_device_encoding, api_apply):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)
    for module in (on_device_codec, planes_on_device, there, api_apply):
        monkeypatch.setattr(module, "planes_on_gpu", lambda: quick_kernels.PLANES)
        monkeypatch.setattr(module, "rans_on_gpu", lambda: quick_kernels.RANS, raising=False)
    monkeypatch.setattr(on_device_encoding, "is_trusted", lambda *_: True)
    for module in (training_device, ckptz.torch, sharded):
        monkeypatch.setattr(module, "lives_elsewhere", torch.Tensor.is_floating_point)


@pytest.fixture
def only_here(kernels_everywhere: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A call after which nothing is encoded on a device any more."""

    def switch() -> None:
        for module in (training_device, on_device_encoding):
            monkeypatch.setattr(module, "MIN_ENCODED", 1 << 40)

    return switch


@pytest.fixture
def decoded_on_host(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of tensors of which a chunk was decoded on the host."""
    names: list[str] = []
    decode = FrameSource.decode_chunk

    def noted(self: FrameSource, index: int, out: Any) -> Any:
        names.append(self.entry.name)
        return decode(self, index, out)

    monkeypatch.setattr(FrameSource, "decode_chunk", noted)
    return names
