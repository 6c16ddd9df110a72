"""A snapshot to the two files of a step, and back to nested tensors. Knows no training loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, BinaryIO, Final

import torch

from ckptz.codec.guides import Guide
from ckptz.codec.units import CHUNK_UNITS, Units, UnitSource
from ckptz.config import Config, Lossless
from ckptz.container.contents import Contents
from ckptz.container.reader import Container, FrameSource
from ckptz.container.writer import Written, write_container
from ckptz.convert.leaves import DTypeName, Size, TensorRef
from ckptz.convert.storages import flatten
from ckptz.convert.tree import parse_tree
from ckptz.dtypes import DType
from ckptz.errors import CorruptionError, FormatError, UnsupportedError
from ckptz.frameworks.torch import TorchTensors, torch_dtype
from ckptz.parallel import Workers
from ckptz.reading import check_limit, read_tensors
from ckptz.roles import Rule
from ckptz.store.resolve import Checkpoint, base_ref
from ckptz.store.step_files import METRIC_KEY, POSITION_KEY, WEIGHTS_KEY

MODEL, OPTIMIZER = "model", "optimizer"
_HOST: Final = TorchTensors("cpu", False)

# What is neither a weight nor a moment stays exact whatever the configuration.
_EXACT: Final = tuple(Rule(f"{name}.*", role="other") for name in ("rng", "extra", "groups", "classes"))


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the two files, flat."""

    tensors: Mapping[str, UnitSource]
    tree: dict[str, Any] | None


class StepEncoder:
    """Writes the files of one snapshot.

    Args:
        state: nested; the weights under `MODEL`, what goes into the other file under other names.
        step: the step.
        metric: by which the best steps are kept, or None.
        config: what may be lost.
        jobs: threads.
        coded: weights by name that are codes already, and so not in `state`.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        step: int,
        metric: float | None,
        config: Config,
        jobs: int,
        coded: Mapping[str, UnitSource] = MappingProxyType({}),
    ) -> None:
        self._step, self._metric, self._config, self._jobs = step, metric, config, jobs
        weights = _part({MODEL: state[MODEL]})
        more = {f"{MODEL}.{name}": source for name, source in coded.items()}
        self._weights = _Part({**weights.tensors, **more}, weights.tree)
        self._state = _part({name: value for name, value in state.items() if name != MODEL})

    def weights(self, sink: BinaryIO, base: Checkpoint | None, position: int) -> Written:
        """Write the weights; see `ckptz.store.steps.Encoder`."""
        metadata = {POSITION_KEY: str(position)}
        if self._metric is not None:
            metadata[METRIC_KEY] = repr(self._metric)
        guides = {} if isinstance(self._config, Lossless) else self._guides()
        return self._write(sink, self._weights, base, metadata, guides)

    def state(self, sink: BinaryIO, base: Checkpoint | None, position: int, weights_id: str) -> Written:
        """Write the rest; see `ckptz.store.steps.StateEncoder`."""
        metadata = {POSITION_KEY: str(position), WEIGHTS_KEY: weights_id}
        return self._write(sink, self._state, base, metadata, {})

    def _guides(self) -> dict[str, Guide]:
        """Second moments, where Adam has one of each weight's shape."""
        found = {}
        for name, source in self._weights.tensors.items():
            parameter = name.removeprefix(f"{MODEL}.")
            moment = self._state.tensors.get(f"{OPTIMIZER}.{parameter}.exp_avg_sq")
            if moment is not None and tuple(moment.shape) == tuple(source.shape):
                found[name] = Guide(second_moment=moment)
        return found

    def _write(
        self,
        sink: BinaryIO,
        part: _Part,
        base: Checkpoint | None,
        metadata: Mapping[str, str],
        guides: Mapping[str, Guide],
    ) -> Written:
        contents = Contents(
            metadata=metadata,
            base=None if base is None else base_ref(base),
            bases={} if base is None else _remembering(base.tensors),
            step=self._step,
            tree=part.tree,
            config=self._config,
            role_rules=_EXACT,
            guides=guides,
        )
        with Workers(self._jobs) as workers:
            return write_container(sink, part.tensors, contents, workers)


def _remembering(bases: Mapping[str, UnitSource]) -> dict[str, UnitSource]:
    return {name: _Base(base) if isinstance(base, FrameSource) else base for name, base in bases.items()}


@dataclass(frozen=True, slots=True)
class _Base:
    """A base tensor read through its file's cache of chunks: planning and encoding both look at it."""

    frame: FrameSource

    @property
    def dtype(self) -> DType:
        return self.frame.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.frame.shape

    @property
    def n_codes(self) -> int | None:
        """See `FrameSource.n_codes`."""
        return self.frame.n_codes

    def units(self, begin: int, end: int) -> Units:
        """Units of one chunk, or of its beginning."""
        return self.frame.chunk(begin // CHUNK_UNITS)[: end - begin]

    def codes(self, begin: int, end: int) -> Any:
        """See `FrameSource.codes`."""
        return self.frame.codes(begin, end)


def _part(state: Mapping[str, Any]) -> _Part:
    flat = flatten(dict(state))
    return _Part(flat.tensors, None if _says_nothing(state, flat.tensors) else flat.tree)


def _says_nothing(state: Mapping[str, Any], tensors: Mapping[str, UnitSource]) -> bool:
    """Whether the names of the tensors tell all: one level below `MODEL`, no two of one memory."""
    if set(state) != {MODEL}:
        return False
    return [f"{MODEL}.{name}" for name in state[MODEL]] == list(tensors)


# --- and back -----------------------------------------------------------------------------------


class StepReader:
    """Reads one of the two files.

    Args:
        checkpoint: the open file with its chain.

    Raises:
        FormatError: it is not one of a store.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        if checkpoint.container is None:
            raise FormatError(f"{checkpoint.name}: not a .ckptz file")
        self.name = checkpoint.name
        self._container: Container = checkpoint.container
        self.content_id = self._container.index.content_id
        self.metadata: Mapping[str, str] = self._container.index.metadata or {}

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(s.dtype.n_bytes(s.shape) for s in self._container.tensors.values())

    def outline(self) -> dict[str, Any]:
        """The nested state without its values: tensors on the meta device. Nothing is decoded."""
        return self._assembled(
            {
                name: torch.empty(source.shape, dtype=torch_dtype(source.dtype), device="meta")
                for name, source in self._container.tensors.items()
            }
        )

    def load(self, jobs: int) -> dict[str, Any]:
        """The nested state, every chunk held against its checksum.

        Raises:
            LimitError: it does not fit into memory.
            FormatError: the file is damaged.
        """
        check_limit(self.n_bytes, None, self.name)
        return self._assembled(dict(read_tensors(self._container.tensors, _HOST, jobs)))

    def _assembled(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        tree = self._container.index.tree
        if tree is None:
            prefix = f"{MODEL}."
            if odd := [name for name in tensors if not name.startswith(prefix)]:
                raise CorruptionError(f"{self.name}: tensor {odd[0]!r} is no weight of a step")
            return {MODEL: {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}}
        parse_tree(tree).check_names(tensors)
        root = parse_tree(tree, lambda leaf: self._leaf(leaf, tensors)).root
        if not isinstance(root, dict):
            raise CorruptionError(f"{self.name}: its tree is not that of a step")
        return root

    def _leaf(self, leaf: object, tensors: Mapping[str, torch.Tensor]) -> Any:
        if isinstance(leaf, TensorRef):
            return tensors[leaf.name]
        if isinstance(leaf, Size):
            return torch.Size(leaf.dims)
        if isinstance(leaf, DTypeName) and isinstance(getattr(torch, leaf.name, None), torch.dtype):
            return getattr(torch, leaf.name)
        raise UnsupportedError(f"{self.name}: no Checkpointer wrote this; restore it with ckptz restore")
