"""Codes of 8-bit optimizers, with sums of outer products as contexts. Implements `Products` for encoders.

Moments of a matrix are nearly sums of few outer products, also after division by the scales of their blocks.
Levels of such a sum take fewer bits than they save: bench/studies/eight_bit.py.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.chunk import encoded_bytes
from ckptz.codec.lossless import Exact, plan_lossless
from ckptz.codec.low_rank import FirstMoments
from ckptz.codec.method import Recipe
from ckptz.codec.tensor import TensorToEncode, summed
from ckptz.codec.tensor_plan import ContextCounts, TensorPlan, stream_tables
from ckptz.format.context_rules import MAX_INDICES, MAX_SHIFT, N_PRODUCT_CONTEXTS, Products
from ckptz.format.dtypes import dtype_of
from ckptz.format.frame import pack_plan
from ckptz.format.plan import Plan, exact_plan, planes_plan
from ckptz.format.sources import CHUNK_VALUES, LazySource, TensorSource
from ckptz.kernels import cpu

Float32Array = NDArray[np.float32]

RANKS: Final = (4, 8, 16, 32)  # tried in turn, up to the first that saves nothing
LEAST_SIDE: Final = 16  # rows and columns of a matrix, below which ranks are not low
LEAST_BITS: Final = 3.0  # of a code, above which products may save something
MOST: Final = 127  # largest magnitude of a level
N_DECADES: Final = 7
# A tensor of codes, with the number of the moment: 1 is signed.
_CODES: Final = re.compile(r"(?P<stem>.+\.)state(?P<number>[12])")


def _dynamic_map() -> Float32Array:
    """Return the values [256] of signed codes in the dynamic map of bitsandbytes, by their fractions of 1.

    There are 2^k positive values in decade k, at equal distances; negative ones mirror them.
    """
    j = np.arange(1, 128)
    decade = np.log2(j).astype(np.int64)
    within = (j - 2**decade + 0.5) / 2**decade
    positive = 10.0 ** (decade - N_DECADES + 1) * (0.1 + 0.9 * within)
    return np.concatenate((-positive[::-1], [0], positive, [1])).astype(np.float32)


# First moments are nearly of low rank as they are. Of second moments the logarithms are, to which their codes
# are nearly proportional.
_VALUES: Final[Mapping[bool, Float32Array]] = {
    True: _dynamic_map(),
    False: np.linspace(-1, 127 / 128, 256, dtype=np.float32),
}


@dataclass(frozen=True, slots=True)
class EightBit(Exact):
    """Recipe of the codes of a moment.

    Attributes:
        is_signed: whether the codes are those of a first moment.
    """

    is_signed: bool = True
    may_have_products: ClassVar[bool] = True
    is_batched: ClassVar[bool] = False

    def plan(self, tensor: TensorToEncode) -> TensorPlan:
        """Plan the frame with products as contexts if it is smaller with them."""
        exact = plan_lossless(tensor.source, tensor.base, tensor.run, tensor.effort)
        if not tensor.effort.product_rank:
            return exact
        n_bytes = encoded_bytes(tensor.source, tensor.base, exact)
        if 8 * n_bytes <= LEAST_BITS * tensor.source.n_patterns:
            return exact
        return _with_products(tensor, _VALUES[self.is_signed], n_bytes) or exact


_RECIPES: Final = {number: EightBit(is_signed=number == "1") for number in "12"}


def recipes_of_codes(tensors: Mapping[str, TensorSource], recipes: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """Return the recipes of lossless tensors that are codes of an 8-bit optimizer, by name.

    bitsandbytes stores moments as `state1` and `state2`, beside the scales of their blocks, `absmax1` and
    `absmax2`.
    """
    of_codes = dict[str, Recipe]()
    for name, source in tensors.items():
        shape = source.shape
        if source.dtype.name != "U8" or len(shape) < 2 or (match := _CODES.fullmatch(name)) is None:
            continue
        is_matrix = min(shape[0], math.prod(shape[1:])) >= LEAST_SIDE
        if (
            isinstance(recipes[name], Exact)
            and is_matrix
            and f"{match['stem']}absmax{match['number']}" in tensors
        ):
            of_codes[name] = _RECIPES[match["number"]]
    return of_codes


def _with_products(tensor: TensorToEncode, values: Float32Array, most_bytes: float) -> TensorPlan | None:
    """Plan with the products that make the smallest frame; None if it has at least `most_bytes`.

    The rank is chosen by the size of the first chunk.
    """
    source = tensor.source
    matrix = FirstMoments.of(_decoded(source, values), None)
    n_rows, n_columns = len(matrix.rows), len(matrix.columns)
    n = min(tensor.effort.product_rank, n_rows, n_columns, MAX_INDICES // (n_rows + n_columns))
    if n < RANKS[0]:
        return None
    left, sizes, right = matrix.singular(n, np.empty((n_columns, 0), np.float32), 0)
    vectors = np.concatenate((left, right)) * np.sqrt(sizes)
    # The steps of levels follow from the shift; the largest level shall be as large as possible.
    largest = float(np.abs(vectors).max(initial=0)) * math.sqrt(N_PRODUCT_CONTEXTS / 2)
    if not 0 < largest < MOST:
        return None
    shift = min(math.floor(2 * math.log2(MOST / largest)), MAX_SHIFT)
    levels = np.rint(vectors * math.sqrt(2.0**shift * N_PRODUCT_CONTEXTS / 2)).clip(-MOST, MOST)
    levels = np.ascontiguousarray(levels.T).astype(np.int8)
    best: tuple[Products, Plan] | None = None
    sample = min(CHUNK_VALUES, source.n_patterns)
    for rank in itertools.takewhile(lambda rank: rank <= n, RANKS):
        rule = Products(shift, len(left), levels[:rank])
        counted = _count(source, rule, (0, sample))
        tried = _planned(source, rule, counted)
        n_bytes = counted.bytes_by(tried.tables[0]) * source.n_patterns / sample
        n_bytes += len(pack_plan(source.dtype, source.shape, tried))
        if n_bytes >= most_bytes:
            break
        best, most_bytes = (rule, tried), n_bytes
    if best is None:
        return None
    rule, plan = best
    if source.n_patterns == sample:
        return TensorPlan(plan)
    counted = summed(tensor.run, functools.partial(_count, source, rule), source)
    return TensorPlan(_planned(source, rule, counted))


def _decoded(source: TensorSource, values: Float32Array) -> LazySource:
    """Return the values of a tensor of codes, by code [256]."""

    def read(begin: int, end: int) -> NDArray[np.uint32]:
        patterns, row = np.empty(end - begin, np.uint32), np.zeros(1, np.uint16)
        cpu().lookup(source.patterns(begin, end), row, values.view(np.uint32)[None], patterns)
        return patterns

    return LazySource(dtype_of("F32"), source.shape, read)


def _count(source: TensorSource, rule: Products, bounds: tuple[int, int]) -> ContextCounts:
    return ContextCounts.of(rule.labels(*bounds), source.patterns(*bounds), N_PRODUCT_CONTEXTS)


def _planned(source: TensorSource, rule: Products, counted: ContextCounts) -> Plan:
    """Return the plan with one rule, given the codes of each context."""
    tables = stream_tables(counted, N_PRODUCT_CONTEXTS)
    return planes_plan(exact_plan(source.dtype).mode, (rule,), (tables,))
