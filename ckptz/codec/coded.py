"""A tensor that was coded elsewhere, of which only codes came here: packed, with the values that escaped.

Its map was fitted and its errors were measured where its values are, such as on an accelerator. Encoder only;
the frame that is written is the one that the values themselves would give.
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
    """Count the bits of a packed code."""
    return max(1, (n_codes - 1).bit_length())


@dataclass(frozen=True)
class CodedSource(TensorSource):
    """A tensor as packed codes; its patterns are decoded from them, chunk by chunk."""

    dtype: DType  # of the tensor, F32, BF16 or F16
    shape: tuple[int, ...]  # of the tensor
    quant_map: QuantizationMap  # one context, linear, without a base
    packed: Bytes  # all codes with `bits_for` bits each
    kept: Patterns  # patterns that escaped, as they are restored, in order
    kept_ends: tuple[int, ...]  # how many of them there are up to the end of each chunk
    # of each chunk, largest absolute error, sum of squared errors, sum of squared values
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

    @property
    def quantizer(self) -> CodedQuantizer:
        """A quantizer that gives these very codes."""
        return CodedQuantizer(self)


@dataclass(frozen=True, slots=True)
class CodedQuantizer(Quantizer):
    """Quantizer of a tensor that is coded already."""

    source: CodedSource

    def codes(self, begin: int, end: int, patterns: Patterns) -> Bytes:
        del patterns
        return self.source.codes_of(begin, end)

    def errors(self, begin: int) -> Errors:
        """Return (largest error, sum of squared errors, sum of squares) of the chunk at `begin`."""
        return self.source.errors[begin // CHUNK_VALUES]
