"""The ways that training_state compares: how each stores the checkpoints of a run, and what it restores.

A way walks the checkpoints in order, each against what it restored of the one before, or each alone. Its
scope is the weights alone, restored beside the exact optimizer state, or the whole state. Seconds are CPU
seconds of all threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from safetensors.torch import load_file, save_file
from torch import Tensor, from_numpy

import ckptz.torch
from bench.core.measure import cpu_seconds
from bench.studies.nncodec_rival import NNCodec
from bench.studies.paper_a.chain import Snapshot
from bench.studies.paper_a.training import State, publish, weights_of
from bench.studies.rivals import Rival
from ckptz import compress, inspect
from ckptz.methods.lossless import Lossless
from ckptz.methods.method import Method

WEIGHTS, WHOLE = "weights", "whole"  # scopes


@dataclass(frozen=True, slots=True)
class Stored:
    """One checkpoint.

    Attributes:
        n_bytes: of everything in the scope.
        weight_bytes: of the weights: their file, or their frames where the file holds moments too.
        restored: the whole state that training would go on from.
        encode_seconds: CPU seconds of writing, the plain input read.
        restore_seconds: CPU seconds of reading it back, a delta's base included.
    """

    n_bytes: int
    weight_bytes: int
    restored: dict[str, Tensor]
    encode_seconds: float
    restore_seconds: float


@dataclass(frozen=True, slots=True)
class Given:
    """A checkpoint and what may guide its encoder.

    Attributes:
        snapshot: the exact state.
        weights: its weights alone in a file, under the model's own names.
        calibration: inputs of its layers, in a file.
    """

    snapshot: Snapshot
    weights: Path
    calibration: Path


Store = Callable[[Given], Stored]


class Way(Protocol):
    """A way to store checkpoints."""

    @property
    def name(self) -> str:
        """Of its folder and of its rows."""
        ...

    @property
    def scope(self) -> str:
        """WEIGHTS or WHOLE."""
        ...

    @property
    def is_chain(self) -> bool:
        """Whether each checkpoint is stored against the one before."""
        ...

    def walk(self, folder: Path) -> contextlib.AbstractContextManager[Store]:
        """What stores checkpoints, in order, beside files of earlier walks in the folder."""
        ...


def plain_weights(path: Path, state: State) -> None:
    """Weights alone as a safetensors file, under the model's own names."""
    publish(path, lambda p: save_file(weights_of(state), p))


# --- ckptz --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileWay:
    """Files as `ckptz compress` writes them.

    Attributes:
        name: of the method and its setting.
        config: of all files, or of deltas where `anchor` is another.
        scope: see `Way`.
        is_chain: see `Way`.
        anchor: of the first file.
        is_calibrated: whether second moments and the inputs of layers guide the encoder.
    """

    name: str
    config: Method
    scope: str = WEIGHTS
    is_chain: bool = True
    anchor: Method | None = None
    is_calibrated: bool = True

    @contextlib.contextmanager
    def walk(self, folder: Path) -> Iterator[Store]:
        """See `Way.walk`; files of earlier walks are the bases of later ones."""
        last: list[Path] = []

        def store(given: Given) -> Stored:
            out = folder / f"file-{given.snapshot.index:02d}.ckptz"
            base = last[-1] if self.is_chain and last else None
            found = file_of(self, given, out, base)
            last.append(out)
            return found

        yield store

    def restored(self, exact: State, file: Path) -> dict[str, Tensor]:
        """The whole state that training goes on from; what the scope leaves out is exact."""
        tensors = ckptz.torch.load_file(file)
        return dict(tensors) if self.scope == WHOLE else with_weights(exact, tensors)


def file_of(way: FileWay, given: Given, out: Path, base: Path | None) -> Stored:
    """Write and restore one file."""
    config = way.anchor if way.anchor is not None and base is None else way.config
    is_lossless, is_whole = isinstance(config, Lossless), way.scope == WHOLE
    source = given.snapshot.path if is_whole else given.weights
    _, encode_seconds = cpu_seconds(
        lambda: compress(
            [source],
            out,
            base=base,
            config=config,
            jobs=1,
            force=True,
            read_optimizer=given.snapshot.path if way.is_calibrated and not is_whole else None,
            calibration=given.calibration if way.is_calibrated and not is_lossless else None,
        )
    )
    restored, restore_seconds = cpu_seconds(lambda: way.restored(given.snapshot.state, out))
    n_bytes = out.stat().st_size
    weight_bytes = n_bytes
    if is_whole:
        weight_bytes = sum(t.stored_bytes for t in inspect(out).tensors if t.name.startswith("model."))
    return Stored(n_bytes, weight_bytes, restored, encode_seconds, restore_seconds)


def with_weights(state: State, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state with other weights, which have the model's own names."""
    return {**state, **{f"model.{name}": tensor for name, tensor in weights.items()}}


# --- rivals of rivals.py ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RivalWay:
    """A rule of another paper; restoring is part of storing, so that it has no seconds of its own.

    In the scope of weights it is given these alone, so that a rule which reads moments has no such way.
    """

    rival: Rival
    scope: str
    is_chain: bool = True

    @property
    def name(self) -> str:
        """See `Way`."""
        return f"{self.rival.name}{', whole' if self.scope == WHOLE else ''}"

    @contextlib.contextmanager
    def walk(self, folder: Path) -> Iterator[Store]:
        """See `Way.walk`; keeps nothing in the folder."""
        del folder
        before: dict[str, Any] = {}

        def store(given: Given) -> Stored:
            exact = given.snapshot.state
            state = {n: t.numpy() for n, t in exact.items() if self.scope == WHOLE or n.startswith("model.")}
            found, seconds = cpu_seconds(lambda: self.rival.store(state, before.get("restored")))
            before["restored"] = found.restored
            restored = {name: from_numpy(np.array(array)) for name, array in found.restored.items()}
            if self.scope == WHOLE:
                return Stored(found.n_bytes, found.weight_bytes, restored, seconds, 0.0)
            restored = with_weights(exact, weights_of(restored))
            return Stored(found.weight_bytes, found.weight_bytes, restored, seconds, 0.0)

        yield store


# --- NNCodec ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NNCodecWay:
    """NNCodec 2 in its own process.

    Attributes:
        qp: quantization parameter; four more double the step.
        is_chain: see `Way`.
    """

    qp: int
    is_chain: bool = True

    @property
    def name(self) -> str:
        """See `Way`."""
        return f"NNCodec qp {self.qp}"

    @property
    def scope(self) -> str:
        """See `Way`."""
        return WEIGHTS

    @contextlib.contextmanager
    def walk(self, folder: Path) -> Iterator[Store]:
        """See `Way.walk`."""
        out, is_first = folder / "restored.safetensors", [True]
        with NNCodec() as coder:

            def store(given: Given) -> Stored:
                is_delta = self.is_chain and not is_first[0]
                coded = coder.store(given.weights, out, self.qp, is_delta=is_delta)
                is_first[0] = False
                restored = with_weights(given.snapshot.state, load_file(out))
                seconds = (coded.encode_seconds, coded.decode_seconds)
                return Stored(coded.n_bytes, coded.n_bytes, restored, *seconds)

            yield store


BYTES_OF_PARAMETER: Final[Mapping[str, int]] = {WEIGHTS: 4, WHOLE: 12}  # fp32, and both moments
