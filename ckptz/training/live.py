"""Tensors of a state that are not copied: they are read in place while training waits."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ckptz.errors import ConfigError
from ckptz.format.sources import PATTERN_TYPES, ArraySource, SourceOf, TensorSource
from ckptz.kernels.floats import Patterns
from ckptz.kernels.torch import bytes_of
from ckptz.parallel import Task


class Hold:
    """The tensors of one snapshot that were not copied, and the wait of training for them.

    The training thread waits until the writer releases it. A later read is an error, and the step is not
    saved, because the tensor may have changed: a file never has two states.

    Attributes:
        tensors: tensors that were not copied, by the address of their placeholder in the snapshot.
        has_weights: True if weights are among them.
        released: time of the release, by `time.perf_counter`; 0 before.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.has_weights = False
        self.released = 0.0
        self._is_revoked = False
        self._released = Task(lambda: None)

    def wait(self) -> None:
        """Wait until the writer has read all tensors; an interrupt ends the wait and the save."""
        if not self.tensors:
            return
        try:
            self._released.wait()
        finally:
            self._is_revoked = True

    def release(self) -> None:
        """Release the training thread; the writer calls this at least once."""
        self.released = self.released or time.perf_counter()
        self._released.finish()

    def check(self) -> None:
        """Check that training still waits.

        Raises:
            ConfigError: training may have continued.
        """
        if self._is_revoked or self._released.is_done:
            raise ConfigError(
                "training went on before its state was read, by an interrupt or a base that cannot be read; "
                "save again, or raise max_staging_bytes so that all of it is copied first"
            )


@dataclass(frozen=True, slots=True)
class _LiveSource(SourceOf):
    """A tensor that is copied part by part when it is read.

    Attributes:
        source: source of its placeholder, with dtype and shape.
        raw: its bytes, on any device [n_bytes].
        hold: keeps training waiting while it is read.
    """

    raw: torch.Tensor
    hold: Hold

    def patterns(self, begin: int, end: int) -> Patterns:
        n = self.dtype.pattern_bytes
        part = self.raw[n * begin : n * end]
        copy: Patterns = (part.cpu() if part.device.type != "cpu" else part.clone()).numpy()
        self.hold.check()  # after the copy, which is valid if training still waits
        return copy.view(PATTERN_TYPES[n])


def with_live(tensors: Mapping[str, TensorSource], hold: Hold) -> dict[str, TensorSource]:
    """Replace the placeholders in a snapshot by sources of the tensors that were not copied."""
    if not hold.tensors:
        return dict(tensors)
    sources = {}
    for name, source in tensors.items():
        address = source.flat.ctypes.data if isinstance(source, ArraySource) else None
        live = None if address is None else hold.tensors.get(address)
        sources[name] = source if live is None else _LiveSource(source, bytes_of(live.detach()), hold)
    return sources
