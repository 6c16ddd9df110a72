"""The lossless method: the default, and the fallback of every other method for tensors it cannot encode.

With a base, the candidates are plain byte planes, exclusive or and ordered difference, the last two with
contexts by the base's magnitude; the smallest on a sample is chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import numpy as np

from ckptz.codec.chunk import (
    MAX_SPARSE_SHARE,
    Batch,
    Encoded,
    encode_by_contexts,
    encode_chunk,
    encode_planes,
    split_random,
)
from ckptz.codec.contexts import NO_TABLES, Sorted
from ckptz.codec.effort import DEFAULT, Effort
from ckptz.codec.method import Method, Recipe, register
from ckptz.codec.quantizer import Quantizer
from ckptz.codec.run_contexts import plan_contexts
from ckptz.codec.tensor import MapFunction, TensorToEncode, summed
from ckptz.codec.tensor_plan import ContextCounts, TensorPlan, plane_counts, stream_tables
from ckptz.format.context_rules import N_MAGNITUDE_CONTEXTS, Magnitude
from ckptz.format.dtypes import DType
from ckptz.format.frame import pack_plan
from ckptz.format.frequency import entropy_bits
from ckptz.format.plan import Plan, PlaneMode, exact_plan, planes_plan
from ckptz.format.sources import CHUNK_VALUES, PATTERN_TYPES, ChunkSources, TensorSource
from ckptz.format.streams import are_random
from ckptz.kernels import cpu
from ckptz.kernels.floats import Reals
from ckptz.state.roles import Role

SAMPLE_VALUES: Final = 1 << 13  # larger samples led to the same choice on all benchmark pairs
MIN_CONTEXT_VALUES: Final = 1 << 11  # in smaller tensors, tables by context cost more than they save
_DELTA_MODES: Final = (PlaneMode.XOR, PlaneMode.DIFFERENCE)
BASE_GAIN: Final = 0.005  # share of the bytes that a base must save by any effort, as decoding it takes time
MIN_BITS_ABOVE: Final = 4  # mean bits of a code of the plane above random ones
# Plane mode, whether it has contexts, and the number of low planes that look random.
_Choice = tuple[PlaneMode, bool, int]


@dataclass(frozen=True, slots=True)
class Exact(Recipe):
    """Recipe of a lossless tensor: the smallest frame."""

    name: ClassVar[str] = "lossless"
    is_lossy: ClassVar[bool] = False
    is_batched: ClassVar[bool] = True

    def plan(self, tensor: TensorToEncode) -> TensorPlan:
        """Plan the frame of a lossless tensor."""
        return plan_lossless(tensor.source, tensor.base, tensor.run, tensor.effort)

    def plan_and_encode(
        self, sources: Sequence[TensorSource], bases: Sequence[TensorSource], effort: Effort
    ) -> list[Encoded]:
        dtype = sources[0].dtype
        patterns, base_patterns = (
            [one.patterns(0, one.n_patterns) for one in tensors] for tensors in (sources, bases)
        )
        batch = Batch(dtype, patterns, base_patterns)
        if not bases:
            return _encode_whole(sources, batch, effort)
        choices, encoded = _choose(batch, [len(own) for own in patterns], effort), dict[int, Encoded]()
        if dtype.pattern_bytes == 1:
            return _smallest(batch, choices, effort)
        for choice in dict.fromkeys(choices):
            which = [k for k, other in enumerate(choices) if other == choice]
            encoded |= zip(which, _encode(batch.only(which), *choice, effort), strict=True)
        return [encoded[k] for k in range(len(sources))]


@dataclass(frozen=True, slots=True)
class Sparse(Recipe):
    """Recipe of a lossless delta that decodes fast, by the positions of changes if there are few."""

    name: ClassVar[str] = "lossless"
    is_lossy: ClassVar[bool] = False

    def plan(self, tensor: TensorToEncode) -> TensorPlan:
        """Plan a frame of changed positions; the smallest frame if too many changed."""
        source, base = tensor.source, tensor.base
        if base is None or not source.n_patterns:
            return TensorPlan(exact_plan(source.dtype))
        n_changed = summed(
            tensor.run, lambda b: np.count_nonzero(source.patterns(*b) != base.patterns(*b)), source
        )
        if n_changed > MAX_SPARSE_SHARE * source.n_patterns:
            return plan_lossless(source, base, tensor.run, tensor.effort)
        # Ordered differences, because small steps in both directions give small codes, whatever the carries.
        return TensorPlan(planes_plan(PlaneMode.DIFFERENCE), is_sparse=True)


EXACT: Final = Exact()
SPARSE: Final = Sparse()


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Lossless(Method):
    """Lossless compression, the default: every bit is restored, also NaN payloads and negative zeros.

    Attributes:
        sparse: store a delta with few changes as the positions of the changes: applied several times faster,
            and about 40 % larger than the smallest. `ckptz.sync` publishes such deltas.

    Example:
        >>> from ckptz import LOSSLESS, Lossless
        >>> Lossless() == LOSSLESS
        True
    """

    sparse: bool = False
    name: ClassVar[str] = "lossless"
    is_lossy: ClassVar[bool] = False

    def recipe(self, role: Role, dtype: DType, shape: tuple[int, ...]) -> Recipe:
        del role, dtype, shape
        return SPARSE if self.sparse else EXACT

    def recipes(
        self, tensors: Mapping[str, TensorSource], roles: Mapping[str, Role], trained: Collection[str] = ()
    ) -> dict[str, Recipe]:
        del roles, trained
        return dict.fromkeys(tensors, SPARSE if self.sparse else EXACT)


LOSSLESS: Final = Lossless()


def plan_lossless(
    source: TensorSource, base: TensorSource | None, run: MapFunction = map, effort: Effort = DEFAULT
) -> TensorPlan:
    """Plan the smallest lossless frame; `base` has the same dtype and shape, and `run` maps over chunks."""
    n_patterns = source.n_patterns
    if base is None or not n_patterns:
        return plan_contexts(source, effort, run) or TensorPlan(exact_plan(source.dtype))
    # The beginning of a chunk, so that a base decodes one chunk for the sample.
    begin = n_patterns // 2 // CHUNK_VALUES * CHUNK_VALUES
    sample = begin, min(begin + SAMPLE_VALUES, n_patterns)
    [(mode, has_contexts, n_random)] = _choose(
        Batch(source.dtype, [source.patterns(*sample)], [base.patterns(*sample)]), [n_patterns], effort
    )
    if not has_contexts:
        return TensorPlan(planes_plan(mode))
    per_chunk = run(lambda bounds: plane_counts(source, base, mode, n_random, bounds), source.chunk_bounds())
    total = functools.reduce(lambda a, b: [x + y for x, y in zip(a, b, strict=True)], per_chunk)
    tables = *[NO_TABLES] * n_random, *(stream_tables(plane, N_MAGNITUDE_CONTEXTS) for plane in total)
    plan = planes_plan(mode, (Magnitude(),), tables)
    if source.dtype.pattern_bytes == 1 and (fewer := _without_contexts(source, total[0], plan, run)):
        return TensorPlan(fewer)
    # The counts of a tensor with one chunk are reused for its encoding.
    counted = tuple(total) if n_patterns <= CHUNK_VALUES else ()
    return TensorPlan(plan, counted=counted, n_random=n_random)


def _without_contexts(
    source: TensorSource, counted: ContextCounts, plan: Plan, run: MapFunction
) -> Plan | None:
    """Return a plan without contexts for a tensor of bytes if it is smaller than the given one, else None.

    All bytes are counted: with a few dozen bytes per context, a sample makes nearly uniform bytes, such as
    the codes of 8-bit optimizers, look predictable.
    """
    whole = summed(run, lambda b: np.bincount(source.patterns(*b), minlength=256), source)
    least = counted.bytes_by(plan.tables[0]) + len(pack_plan(source.dtype, source.shape, plan))
    plain = float(entropy_bits(whole)) / 8
    changes = float(entropy_bits(counted.total)) / 8
    if least <= min(plain, changes):
        return None
    return exact_plan(source.dtype) if plain <= changes else planes_plan(plan.mode)


def _encode(
    batch: Batch, mode: PlaneMode, has_contexts: bool, n_random: int, effort: Effort
) -> list[Encoded]:
    if has_contexts:
        return encode_by_contexts(batch, mode, n_random, effort.huffman_margin)
    return encode_planes(batch, planes_plan(mode), effort.huffman_margin)


def _smallest(batch: Batch, choices: Sequence[_Choice], effort: Effort) -> list[Encoded]:
    """Encode tensors of bytes as chosen; a choice with contexts is compared with encodings without them."""
    smallest = list[Encoded]()
    for k, (mode, has_contexts, _) in enumerate(choices):
        own, modes = batch.only([k]), (mode, exact_plan(batch.dtype).mode)
        tried = _encode(own, mode, has_contexts, 0, effort)
        if has_contexts:
            tried += [one for plain in modes for one in _encode(own, plain, False, 0, effort)]
        sizes = [
            len(pack_plan(own.dtype, (), one.plan)) + sum(map(len, chunk.streams)) for one, chunk in tried
        ]
        smallest.append(tried[sizes.index(min(sizes))])
    return smallest


def _encode_whole(sources: Sequence[TensorSource], batch: Batch, effort: Effort) -> list[Encoded]:
    """Encode tensors without bases: with contexts by run where these pay, the others in one batch."""
    margin = effort.huffman_margin
    encodings = [plan_contexts(source, effort) for source in sources]
    encodings = [encoding and replace(encoding, huffman_margin=margin) for encoding in encodings]
    plain = [k for k, encoding in enumerate(encodings) if encoding is None]
    rest = iter(encode_planes(batch.only(plain), exact_plan(batch.dtype), margin) if plain else ())
    return [
        next(rest)
        if encoding is None
        else (encoding, encode_chunk(source, encoding, ChunkSources(0, source.n_patterns)))
        for source, encoding in zip(sources, encodings, strict=True)
    ]


def _choose(batch: Batch, n_patterns: Sequence[int], effort: Effort) -> list[_Choice]:
    """Choose the encoding of the tensors of a batch [m] with `n_patterns` [m] elements.

    The choice is measured on the first `SAMPLE_VALUES` patterns of each.
    """
    delta_modes = _DELTA_MODES if effort.tries_xor else _DELTA_MODES[1:]
    modes, size = (*delta_modes, exact_plan(batch.dtype).mode), batch.dtype.pattern_bytes
    sample = batch.only(range(len(n_patterns)), SAMPLE_VALUES)
    planes = np.concatenate([sample.planes(mode) for mode in modes])
    ends = np.arange(len(planes))[:, None] * planes.shape[1] + sample.ends
    counts = cpu().count_streams(planes.reshape(-1), ends.reshape(-1))
    by_plane = cpu().entropies(counts).reshape(len(modes), size, len(n_patterns))
    bits = by_plane.sum(axis=1)
    own, least, plain = bits[:-1].argmin(axis=0), bits[:-1].min(axis=0), bits[-1]
    n_random = np.array(
        [
            _n_random(by_plane[j, :, k]) if n >= SAMPLE_VALUES else 0
            for k, (j, n) in enumerate(zip(own.tolist(), n_patterns, strict=True))
        ]
    )
    gain, sizes = effort.delta_gain, np.array(n_patterns)
    has_contexts = (sizes >= MIN_CONTEXT_VALUES) & ((sizes > SAMPLE_VALUES) | (least > 0))
    if gain is None:
        gain, has_contexts = 0.0, np.zeros(len(sizes), np.bool_)
    saved = np.zeros(len(sizes))
    for j, n in {*zip(own[has_contexts].tolist(), n_random[has_contexts].tolist(), strict=True)}:
        which = np.flatnonzero(has_contexts & (own == j) & (n_random == n)).tolist()
        some = sample.only(which)
        _, upper = split_random(some.transformed(modes[j]), n)
        saved[which] = Sorted(some.by_magnitude, upper).saved_bits()
    has_contexts &= saved >= gain * least
    least -= saved * has_contexts
    is_plain = (least > plain * (1 - max(gain, BASE_GAIN))) & (plain > 0)
    return [
        (modes[-1], False, 0) if whole else (modes[j], by_context, n)
        for j, whole, by_context, n in zip(
            own.tolist(), is_plain.tolist(), has_contexts.tolist(), n_random.tolist(), strict=True
        )
    ]


def _n_random(bits: Reals) -> int:
    """Count the lowest planes that contexts tell nothing of, from the bits [n_planes] of samples.

    Where the plane above them says little, they may be random only in the mean of all contexts.
    """
    size, is_random = len(bits), are_random(bits, SAMPLE_VALUES)
    lowest = (size - width for width in PATTERN_TYPES if width < size)
    return next((n for n in lowest if is_random[:n].all() and bits[n] >= MIN_BITS_ABOVE * SAMPLE_VALUES), 0)


# --- functions for planners of lossy tensors ----------------------------------------------------


def counts_by_base(
    source: TensorSource, base: TensorSource, quantizer: Quantizer, run: MapFunction
) -> ContextCounts:
    """Count the codes of a tensor with the codes of its base as contexts."""
    n_contexts = base.n_codes or 1

    def count(bounds: tuple[int, int]) -> ContextCounts:
        codes, labels = quantizer.codes(*bounds, source.patterns(*bounds)), base.codes(*bounds)
        labels = np.zeros(len(codes), np.uint8) if labels is None else labels
        return ContextCounts.of(labels, codes, n_contexts)

    return summed(run, count, source)


def exact_with_note(tensor: TensorToEncode, note: str) -> TensorPlan:
    """Plan a lossless frame with a note that explains why it is not lossy."""
    exact = plan_lossless(tensor.source, tensor.base, tensor.run, tensor.effort)
    return replace(exact, note=f"{note} and stays lossless")
