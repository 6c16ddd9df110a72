"""Chains of restored weights for levers.py: ckptz's own planner and coder, with one thing changed at a time.

A chain is an anchor and its deltas of the language run's checkpoints (paper_a_training.py), all in memory.
Bytes are those of the frames of lossy weights: plan and payload. The weighted error of a checkpoint is the
sum over rows of s * e H e^T over the sum of v * w^2 of all weights, with errors e, second moments H of the
layer's inputs and v of the gradients, and s the mean of v in the row over the mean of H's diagonal: v_ij is
about the product of the two, and the loss changes in proportion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from levers_states import Checkpoint, Codes, Floats, source_of
from numpy.typing import NDArray

from ckptz.codec.frame import header_bytes
from ckptz.codec.frame_plan import pack_plan
from ckptz.codec.plan import Plan
from ckptz.codec.sources import ChunkSources
from ckptz.codec.units import ArraySource, TensorSource
from ckptz.dtypes import DType
from ckptz.encoding.chunk import encode_chunk, restored_units
from ckptz.encoding.guide import Guide
from ckptz.methods.grid import plan_grid
from ckptz.quant.grid import UniformGrid
from ckptz.transform.classes import Row

# --- a tensor in a chain ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a file restores it: the base of the next one.

    Attributes:
        dtype: F32.
        shape: of the tensor.
        flat: its units.
        own_codes: of its frame.
        plan: of its frame.
        n_bytes: of its frame.
    """

    dtype: DType
    shape: tuple[int, ...]
    flat: NDArray[np.uint32]
    own_codes: Codes
    plan: Plan
    n_bytes: int

    @property
    def n_codes(self) -> int:
        """Size of the alphabet."""
        assert self.plan.quant_map is not None
        return self.plan.quant_map.n_codes

    @property
    def row_classes(self) -> NDArray[np.int64]:
        """Step class of each unit."""
        n_rows = self.shape[0]
        rows = [rule.indices for rule in self.plan.rules if isinstance(rule, Row)]
        labels = rows[0] if rows else np.zeros(n_rows, np.uint8)
        return np.repeat(labels.astype(np.int64), len(self.flat) // n_rows)

    @property
    def values(self) -> Floats:
        """Restored values, in the tensor's shape."""
        return self.flat.view(np.float32).reshape(self.shape)

    def units(self, begin: int, end: int) -> NDArray[np.uint32]:
        """See `TensorSource.units`."""
        return self.flat[begin:end]

    def codes(self, begin: int, end: int) -> Codes:
        """Codes of its frame."""
        return self.own_codes[begin:end]


History = Sequence[Stored]  # of one tensor, the anchor first
# What a delta is made from, of one tensor by name; it may fit itself to the exact values.
Predict = Callable[[History, Checkpoint, str], Floats]
Revise = Callable[[ArraySource, TensorSource | None, Plan, Guide], Plan]


def last_restored(history: History, point: Checkpoint, name: str) -> Floats:
    """The base as it is: what the format has."""
    del point, name
    return history[-1].values


@dataclass(frozen=True, slots=True)
class Way:
    """How a chain is stored.

    Attributes:
        anchor_step: of the anchor's grid.
        delta_step: of the deltas' grids.
        dead_zone: of all.
        predict: what deltas are made from.
        n_parameters: numbers of eight bytes that `predict` would have to store for each tensor.
        revise: changes a plan before it is coded.
        only: part of the names of the weights that are stored at all.
    """

    anchor_step: float
    delta_step: float
    dead_zone: float = 0.1
    predict: Predict = last_restored
    n_parameters: int = 0
    revise: Revise | None = None
    only: str = ""


def stored(point: Checkpoint, name: str, history: History, way: Way) -> Stored:
    """One tensor as `way` stores it."""
    source, base, guide = source_of(point.arrays[name]), None, point.guides[name]
    if history:
        predicted = np.ascontiguousarray(way.predict(history, point, name), dtype=np.float32)
        base = replace(history[-1], flat=predicted.reshape(-1).view(np.uint32))
    wanted = UniformGrid(way.delta_step if history else way.anchor_step, way.dead_zone)
    plan = plan_grid(source, base, wanted, guide)
    if way.revise is not None:
        plan = way.revise(source, base, plan, guide)
    return coded(source, base, plan, way.n_parameters * 8 if history else 0)


def coded(source: ArraySource, base: TensorSource | None, plan: Plan, extra_bytes: int = 0) -> Stored:
    """The tensor of a plan, really encoded."""
    assert plan.quantizer is not None
    n_units = len(source.flat)
    sources = ChunkSources(0, n_units, base)
    chunk = encode_chunk(source, plan, sources)
    size = header_bytes(source.dtype, source.shape, plan, pack_plan(source.dtype, source.shape, plan))
    codes = plan.quantizer.codes(0, n_units, source.flat)
    units = restored_units(source, plan, sources)
    n_bytes = size + len(chunk.payload) + extra_bytes
    return Stored(source.dtype, source.shape, units, codes, plan, n_bytes)


# --- a chain ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Link:
    """What is measured of one checkpoint of a chain.

    Attributes:
        n_bytes: of lossy weights.
        n_weights: of them.
        error: the weighted error, see above.
        sent: projection of the movement that was sent on the movement since the last exact state.
        tensors: by name.
    """

    n_bytes: int
    n_weights: int
    error: float
    sent: float
    tensors: Mapping[str, Stored]

    @property
    def bits(self) -> float:
        """Bits a weight."""
        return 8 * self.n_bytes / self.n_weights


def links(points: Sequence[Checkpoint], way: Way) -> list[Link]:
    """A chain's anchor and deltas."""
    histories: dict[str, list[Stored]] = {name: [] for name in points[0].lossy if way.only in name}
    found = []
    for i, point in enumerate(points):
        for name, history in histories.items():
            history.append(stored(point, name, history, way))
        last = {name: history[-1] for name, history in histories.items()}
        before = {name: history[-2] for name, history in histories.items()} if i else {}
        found.append(
            Link(
                n_bytes=sum(one.n_bytes for one in last.values()),
                n_weights=sum(one.flat.size for one in last.values()),
                error=weighted_error(point, last),
                sent=_projection(points[i - 1], point, before, last) if i else 1.0,
                tensors=last,
            )
        )
    return found


def weighted_error(point: Checkpoint, found: Mapping[str, Stored]) -> float:
    """Expected loss change over what zeroing all weights would be expected to change."""
    error = energy = 0.0
    for name, one in found.items():
        exact = point.arrays[name].astype(np.float64)
        squares = point.moment(name, "exp_avg_sq").astype(np.float64)
        difference = one.values - exact
        energy += float((squares * exact**2).sum())
        error += _quadratic(difference, squares, point.guides[name])
    return error / energy


def _quadratic(difference: NDArray[Any], squares: NDArray[Any], guide: Guide) -> float:
    inputs = guide.inputs
    moments = None if inputs is None else inputs.read()
    if inputs is None or moments is None or moments.ndim != 2 or inputs.axis != 1:
        return float((squares * difference**2).sum())
    rows = squares.mean(1) / np.diagonal(moments).mean()
    return float(rows @ ((difference @ moments) * difference).sum(1))


def _projection(
    before: Checkpoint, now: Checkpoint, base: Mapping[str, Stored], found: Mapping[str, Stored]
) -> float:
    true = np.concatenate([(now.arrays[n] - before.arrays[n]).reshape(-1) for n in found]).astype(np.float64)
    sent = np.concatenate([(one.values - base[n].values).reshape(-1) for n, one in found.items()])
    return float(sent @ true / (true @ true))
