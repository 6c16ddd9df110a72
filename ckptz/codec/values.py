"""From codes to units by the quantization map. Implements spec/04-quantization.md#decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.plan import Domain, OuterVectors, Plan, Predictor
from ckptz.codec.units import UNIT_TYPES
from ckptz.dtypes import DType
from ckptz.kernels import cpu, reference

Bytes = NDArray[np.uint8]
Units = NDArray[Any]

KINDS: Final = {"F32": reference.F32, "BF16": reference.BF16, "F16": reference.F16}


@dataclass(frozen=True, slots=True)
class ValueTable:
    """A quantization map as the kernels take it.

    Attributes:
        entries: [n_rows, n_codes]: units already for the zero predictor in the linear domain, else F32
            patterns or integers.
        row_of_class: row of each class.
    """

    plan: Plan
    kind: int
    entries: NDArray[Any]
    row_of_class: NDArray[np.uint16]
    unit_bytes: int

    @classmethod
    def of(cls, dtype: DType, plan: Plan) -> Self:
        """Expand the map of a plan."""
        assert plan.quant_map is not None
        kind = KINDS[dtype.name]
        entries = plan.quant_map.table.expand()
        if plan.domain is Domain.LINEAR and plan.predictor is Predictor.ZERO:
            flat = reference.add_f32(np.zeros(entries.size, np.uint32), entries.reshape(-1))
            entries = reference.from_f32(flat, kind).reshape(entries.shape)
        rows = plan.quant_map.row_of_class.astype(np.uint16)
        return cls(plan, kind, np.ascontiguousarray(entries), rows, dtype.unit_bytes)

    def decode(self, codes: Bytes, labels: NDArray[Any] | None, prediction: Units | None, out: Units) -> None:
        """Restore codes [n] into `out`, units [n]; escaped and protected ones are still to be put in place.

        Args:
            codes: [n].
            labels: class of each, or None if there is one class.
            prediction: units of the base, F32 patterns of the outer product, or None.
            out: units [n].
        """
        rows = self.row_of_class[:1] if labels is None else self.row_of_class[labels]
        linear = self.plan.domain is Domain.LINEAR
        if linear and prediction is None:
            cpu().lookup(codes, rows, self.entries, out)
        elif linear and self.plan.predictor is Predictor.OUTER:
            terms = np.empty(len(codes), np.uint32)
            cpu().lookup(codes, rows, self.entries, terms)
            out[:] = cpu().from_f32(cpu().add_f32(prediction, terms), self.kind)
        elif linear:
            cpu().add_linear(prediction, codes, rows, self.entries, self.kind, out)
        else:
            self._decode_bits(codes, rows, prediction, out)
        zero = self.plan.quant_map.zero_code if self.plan.quant_map else None
        if zero is not None:
            out[codes == zero] = 0

    def _decode_bits(
        self, codes: Bytes, rows: NDArray[np.uint16], prediction: Units | None, out: Units
    ) -> None:
        if prediction is None:
            prediction = np.zeros(len(codes), UNIT_TYPES[self.unit_bytes])
        elif self.plan.predictor is Predictor.OUTER:
            prediction = cpu().from_f32(prediction, self.kind)
        cpu().add_bits(prediction, codes, rows, self.entries, out)


def predicted(
    plan: Plan, outer: OuterVectors | None, base: Units | None, begin: int, end: int
) -> Units | None:
    """Compute what the map's entries are added to: base units, outer products in F32, or None for zero."""
    if plan.predictor is Predictor.OUTER:
        assert outer is not None
        return cpu().outer_product(outer.rows, outer.columns, begin, end)
    return base if plan.predictor is Predictor.BASE else None
