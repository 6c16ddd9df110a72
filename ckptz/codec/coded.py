"""A tensor that was quantized elsewhere, such as on an accelerator: packed codes and escaped values.

Its map was fitted and its errors were measured there. The frame is the same as for the values themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ckptz.codec.quantizer import Quantizer
from ckptz.format.dtypes import DType
from ckptz.format.plan import Domain, Plan, QuantizationMap
from ckptz.format.sources import CHUNK_VALUES, PATTERN_TYPES, TensorSource
from ckptz.format.values import ValueTable
from ckptz.kernels import cpu
from ckptz.kernels.floats import Bytes, Patterns

Errors = tuple[float, float, float]


def bits_for(n_codes: int) -> int:
    """Return the number of bits of a packed code."""
    return max(1, (n_codes - 1).bit_length())


@dataclass(frozen=True)
class CodedSource(TensorSource):
    """A tensor as packed codes, from which its patterns are decoded chunk by chunk."""

    dtype: DType  # F32, BF16 or F16
    shape: tuple[int, ...]
    quant_map: QuantizationMap  # one context, linear, without a base
    packed: Bytes  # all codes, `bits_for` bits each
    kept: Patterns  # restored patterns of escaped elements, in order
    kept_ends: tuple[int, ...]  # number of escaped elements up to the end of each chunk
    # By chunk: largest absolute error, sum of squared errors, sum of squared values.
    errors: tuple[Errors, ...]

    def codes_of(self, begin: int, end: int) -> Bytes:
        """Return the codes uint8 [end - begin] of patterns begin..end, which are one chunk."""
        n_bits = bits_for(self.quant_map.n_codes)
        codes = np.empty(end - begin, np.uint8)
        first = begin * n_bits // 8
        cpu().unpack_codes(self.packed[first : first + -(-len(codes) * n_bits // 8)], n_bits, codes)
        return codes

    def patterns(self, begin: int, end: int) -> Patterns:
        codes = self.codes_of(begin, end)
        patterns = np.empty(len(codes), PATTERN_TYPES[self.dtype.pattern_bytes])
        self._table.decode(codes, None, None, patterns)
        if self.quant_map.escape_code is not None:
            chunk = begin // CHUNK_VALUES
            first = self.kept_ends[chunk - 1] if chunk else 0
            patterns[codes == self.quant_map.escape_code] = self.kept[first : self.kept_ends[chunk]]
        return patterns

    @cached_property
    def _table(self) -> ValueTable:
        return ValueTable(self.dtype, Plan(quant_map=self.quant_map, domain=Domain.LINEAR))


@dataclass(frozen=True, slots=True)
class CodedQuantizer(Quantizer):
    """Quantizer of a tensor whose codes are known."""

    source: CodedSource

    def codes(self, begin: int, end: int, patterns: Patterns) -> Bytes:
        del patterns
        return self.source.codes_of(begin, end)
