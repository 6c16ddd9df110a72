"""Payload: encodes and decodes one tensor by its plan. Implements spec/08-wire.md#codecs.

Codes of uniform levels are packed, or entropy-coded with the functions of the file format; TopK sends some
values and their positions, and the other values are zero. Arrays belong to a kernel module of the wire, `k`.
Conditions that would make a payload invalid go to a `Check`, which may evaluate them later.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ckptz.errors import CorruptionError
from ckptz.format.bits import ByteReader
from ckptz.format.streams import check_coder, decode_stream, encode_stream
from ckptz.kernels import floats, wire_arrays
from ckptz.wire.policy import BLOCK, TensorPlan, Tiled, TopK, Uniform

Array = Any  # of numpy, or of torch
Condition = Any  # a bool, or an array of one bool on a device
Check = Callable[[Condition, str], None]  # called with a condition of a wrong payload, and the reason
PACKED, RANS = 0, 1  # modes of uniform payloads
BITMAP, RICE = 0, 1  # modes of TopK payloads: RICE + r has r low bits
MAX_RICE: Final = 16
# A tile's range is stored as steps of 1/8 octave below the largest range, or as a special value.
ZERO_TILE, NAN_TILE, MAX_STEPS = 255, 254, 253


@dataclass(frozen=True, slots=True)
class Payload:
    """An encoded tensor in several parts."""

    parts: Sequence[Array]  # byte arrays, each to be padded to 16 bytes
    mode: int  # for the header
    decoded: Callable[[], Array]  # computes the receiver's F32 patterns [n]; for raw, the patterns
    mask: Array | None = None  # 1 for each value that TopK sent
    not_finite: Condition = False  # True if a value is not finite


def raise_if(wrong: Condition, reason: str) -> None:
    """Raise `CorruptionError` if a payload is wrong."""
    if wrong:
        raise CorruptionError(reason)


@dataclass
class _PayloadReader:
    """A cursor over the parts of a payload; requires zero padding."""

    k: Any
    plan: TensorPlan
    left: Array
    mode: int
    not_finite: Condition
    check: Check

    def take(self, n_bytes: int, what: str) -> Array:
        """Read the next part of `n_bytes` bytes, and skip its padding."""
        end = wire_arrays.padded(n_bytes)
        wrong = n_bytes < 0 or end > len(self.left)
        raise_if(wrong, f"{what}: needs {n_bytes} bytes, {len(self.left)} are left")
        if n_bytes < end:
            self.check((self.left[n_bytes:end] != 0).any(), f"{what}: its padding is not zero")
        part, self.left = self.left[:n_bytes], self.left[end:]
        return part

    def unpacked(self, bits: int, n: int, what: str) -> Array:
        """Read n codes of `bits` bits, uint8 [n]."""
        packed = self.take((n * bits + 7) // 8, what)
        if n * bits % 8:
            self.check((packed[-1] >> (n * bits % 8)) != 0, f"{what}: bits after the last code are set")
        return self.k.unpack(packed, bits, n)

    def check_mode(self, is_valid: bool) -> None:
        """Require a mode that the plan allows."""
        raise_if(not is_valid, f"mode: {self.mode} does not exist for this codec, or with reused positions")

    # --- uniform levels

    def blocks(self, n: int, block: int, codes: Callable[[], Array]) -> Array:
        """Decode n values from the ranges of blocks and the codes after them, F32 patterns [n]."""
        n_blocks = math.ceil(n / block)
        ranges = self.take(4 * n_blocks, "scales")
        offsets, scales = (
            self.k.as_patterns(half, 2) for half in (ranges[: 2 * n_blocks], ranges[2 * n_blocks :])
        )
        wrong = _has_nan(scales) != self.not_finite
        self.check(wrong, "scales: they disagree with the flag for values that are not finite")
        wrong = _has_nan(offsets) | ((scales >> 15) != 0).any()
        self.check(wrong, "scales: one is negative, or an offset is not finite")
        return self.k.dequantize(offsets, scales, codes(), block, self.plan.largest)

    def uniform(self, codec: Uniform) -> Array:
        """Decode uniform levels, F32 patterns [n]."""
        self.check_mode(self.mode == PACKED or (self.mode == RANS and codec.rans))
        n, bits = self.plan.n, codec.bits

        def codes() -> Array:
            return self._rans_codes(bits) if self.mode == RANS else self.unpacked(bits, n, "codes")

        return self.blocks(n, self.plan.block, codes)

    def _rans_codes(self, bits: int) -> Array:
        coded, self.left = self.left, self.left[:0]
        source = ByteReader(self.k.host_bytes(coded).tobytes())
        coder = source.u8("coder")
        stream = source.take(source.u32("stream length"), "stream")
        wrong = source.left >= wire_arrays.ALIGN or any(source.peek())
        raise_if(wrong, "stream: its padding is not zero, or too long")
        check_coder(coder, is_of_codes=False)
        codes = np.empty(self.plan.n, np.uint8)
        decode_stream(coder, stream, codes)
        raise_if(int(codes.max()) >> bits, f"codes: {int(codes.max())} needs more than {bits} bits")
        return self.k.from_bytes(codes, coded)

    # --- TopK

    def topk(self, codec: TopK, mask: Array | None) -> tuple[Array, Array]:
        """Decode TopK values; `mask` [n] has the positions if they are reused.

        Returns:
            F32 patterns [n], zero at other positions, and the mask of positions [n].
        """
        k, plan = self.k, self.plan
        self.check_mode(self.mode == BITMAP or (codec.tries_rice and not plan.reuse))
        if self.mode != BITMAP:
            mask = self._rice_mask(self.mode - RICE)
        elif not plan.reuse:
            mask = self.unpacked(1, plan.n, "bitmap")
        assert mask is not None
        wrong = (k.wide(mask).reshape(plan.n_samples, -1).sum(1) != plan.k).any()
        self.check(wrong, f"positions: a sample does not have {plan.k} values")
        if codec.values == 8:
            values = self.blocks(plan.count, BLOCK, lambda: self.take(plan.count, "values"))
        else:
            values = k.to_f32(k.as_patterns(self.take(2 * plan.count, "values"), 2), _value_kind(plan))
            wrong = k.not_finite(values) != self.not_finite
            self.check(wrong, "values: they disagree with the flag for values that are not finite")
        return k.put(values, mask), mask

    def _rice_mask(self, r: int) -> Array:
        n, n_values, like = self.plan.n, self.plan.count, self.left
        raise_if(r > MAX_RICE, f"mode: {RICE + r} is not defined for this plan")
        n_unary = int.from_bytes(bytes(self.k.host_bytes(self.take(4, "length of gaps"))), "little")
        wrong = not n_values <= n_unary <= n_values + (n >> r)
        raise_if(wrong, f"length of gaps: {n_unary} bits for {n_values} values in {n} elements")
        ends = np.flatnonzero(self.k.host_bytes(self.unpacked(1, n_unary, "gaps")))
        wrong = len(ends) != n_values or int(ends[-1]) != n_unary - 1
        raise_if(wrong, f"gaps: {len(ends)} of {n_values}, or zeros after the last")
        gaps = (np.diff(ends, prepend=-1) - 1) << r
        for at in range(0, r, 8):
            low = self.k.host_bytes(self.unpacked(min(r - at, 8), n_values, "gaps"))
            gaps += low.astype(np.int64) << at
        positions = np.cumsum(gaps + 1) - 1
        raise_if(int(positions[-1]) >= n, f"gaps: a value at {int(positions[-1])} in a tensor of {n}")
        return self.k.from_bytes(_ones_at(positions, n), like)

    # --- tiles

    def tiled(self) -> Array:
        """Decode tiles, F32 patterns [n]."""
        k, plan = self.k, self.plan
        self.check_mode(not self.mode)
        head = self.take(2 + plan.count, "ranges")
        top, steps = k.wide(k.as_patterns(head[:2], 2))[0], k.wide(head[2:])
        widths = k.wide(self.unpacked(4, plan.n_rows, "widths"))
        planes = self.take(plan.n_planes * plan.row // 8, "codes")
        wrong = (top > wire_arrays.BF16_MAX) | ((steps == NAN_TILE).any() != self.not_finite)
        self.check(wrong, "ranges: one is too large, or the flag for values that are not finite is wrong")
        wrong = ((widths < 2) | (widths > 8)).any() | (widths.sum() > plan.n_planes)
        self.check(wrong, f"widths: not 2 to 8 bits, or more than {plan.n_planes} in all")
        unused = k.count(plan.n_planes, widths) >= widths.sum()
        wrong = ((planes != 0).reshape(plan.n_planes, -1).any(1) & unused).any()
        self.check(wrong, "codes: bits after the last code are set")
        codes = k.unpack_rows(planes, widths, plan.row)
        return _from_tiles(k, plan, _peaks(top, steps), widths, codes)


def _has_nan(scales: Array) -> Condition:
    return ((scales & 0x7F80) == 0x7F80).any()


def _value_kind(plan: TensorPlan) -> int:
    """Return the type of 16-bit values: F16 for F16 tensors, else BF16, which has the range of F32."""
    return floats.F16 if plan.kind == floats.F16 else floats.BF16


def _ones_at(positions: Array, n: int) -> Array:
    mask = np.zeros(n, np.uint8)
    mask[positions] = 1
    return mask


def _peaks(top: Array, steps: Array) -> Array:
    """Return the largest magnitude of each tile as a bf16 pattern, int64 [tiles]; may be 0 or not finite."""
    peaks = (top - 16 * steps).clip(wire_arrays.SMALLEST) * (steps <= MAX_STEPS)
    return peaks + wire_arrays.NAN_SCALE * (steps == NAN_TILE)


def _from_tiles(k: Any, plan: TensorPlan, peaks: Array, widths: Array, codes: Array) -> Array:
    assert isinstance(plan.codec, Tiled)
    tiles = k.tile_values(peaks, widths, codes, plan.codec.tile)
    if plan.codec.rotate:
        tiles = k.rotate(tiles, plan.codec.tile, True)
    tiles = tiles[: plan.n]
    return tiles if plan.kind == floats.F32 else k.saturate(tiles, plan.largest)


@dataclass(frozen=True)
class _PayloadWriter:
    """Encoder of a tensor's values, F32 patterns [n], by its plan."""

    k: Any
    plan: TensorPlan
    seed: int | None
    vary: bool

    def _blocks(
        self, values: Array, block: int, bits: int
    ) -> tuple[list[Array], Callable[[], Array], Condition]:
        """Quantize to (ranges and codes, function that computes the decoded values, any not finite)."""
        k, largest = self.k, self.plan.largest
        offsets, scales, codes = k.quantize(values, block, bits, self.seed)
        ranges = k.concat([k.as_bytes(offsets), k.as_bytes(scales)], 1)
        decoded = functools.partial(k.dequantize, offsets, scales, codes, block, largest)
        return [ranges, codes], decoded, _has_nan(scales)

    def uniform(self, codec: Uniform, values: Array) -> Payload:
        k = self.k
        (ranges, codes), decoded, not_finite = self._blocks(values, self.plan.block, codec.bits)
        packed, mode = k.pack(codes, codec.bits), PACKED
        if codec.rans and self.vary:
            coder, stream = encode_stream(k.host_bytes(codes))
            if len(stream) + 1 + wire_arrays.ALIGN < len(packed):
                coded = b"".join((coder.to_bytes(1, "little"), len(stream).to_bytes(4, "little"), stream))
                packed, mode = k.from_bytes(coded, values), RANS
        return Payload((ranges, packed), mode, decoded, None, not_finite)

    def topk(self, codec: TopK, values: Array, mask: Array | None) -> Payload:
        k, plan = self.k, self.plan
        if mask is None:
            mask = k.top_mask(values, plan.n_samples, plan.k)
        mode, parts = (BITMAP, []) if plan.reuse else self._positions(codec, mask)
        chosen = k.take(values, mask, plan.count)
        if codec.values == 8:
            coded, decoded, not_finite = self._blocks(chosen, BLOCK, 8)
            parts += coded
        else:
            kind, not_finite = _value_kind(plan), k.not_finite(chosen)
            narrow = k.from_f32(k.saturate(chosen, wire_arrays.LARGEST_F32[kind]), kind)
            decoded = functools.partial(k.to_f32, narrow, kind)
            parts.append(k.as_bytes(narrow))
        return Payload(parts, mode, lambda: k.put(decoded(), mask), mask, not_finite)

    def _positions(self, codec: TopK, mask: Array) -> tuple[int, list[Array]]:
        """Encode positions, a mask [n], as (mode, parts)."""
        bitmap = self.k.pack(mask, 1)
        if self.vary and codec.tries_rice:
            r, parts = _encode_rice(self.k, mask, self.plan.count)
            if sum(wire_arrays.padded(len(part)) for part in parts) < len(bitmap):
                return RICE + r, parts
        return BITMAP, [bitmap]

    def tiled(self, codec: Tiled, values: Array) -> Payload:
        k, plan = self.k, self.plan
        tiles = k.as_patterns(k.concat([k.as_bytes(values)], 4 * plan.row), 4)
        if codec.rotate:
            tiles = k.rotate(tiles, codec.tile, False)
        peaks = k.tile_peaks(tiles, codec.tile)
        bad = peaks > wire_arrays.BF16_MAX
        top = (peaks * ~bad).max()
        steps = ((top - peaks).clip(0, 16 * MAX_STEPS) >> 4) * (peaks > 0) * ~bad
        steps = steps + ZERO_TILE * (peaks == 0) + NAN_TILE * bad
        peaks = _peaks(top, steps)
        logs = (peaks * ~bad).reshape(plan.n_rows, -1).sum(1) // (plan.row // codec.tile)
        widths = k.widths_of(logs, plan.n_planes)
        codes = k.tile_codes(tiles, peaks, widths, codec.tile, self.seed)
        head = k.concat([k.as_bytes(k.narrow(top.reshape(1), 2)), k.narrow(steps, 1)], 1)
        planes = k.pack_rows(codes, widths, plan.row, plan.n_planes)
        parts = (head, k.pack(k.narrow(widths, 1), 4), planes)
        return Payload(parts, 0, lambda: _from_tiles(k, plan, peaks, widths, codes), None, bad.any())


def _encode_rice(k: Any, mask: Array, n_values: int) -> tuple[int, list[Array]]:
    """Encode gaps on the host as (r, parts): quotients by 2^r in unary, then bytes of the remainders."""
    gaps = np.diff(np.flatnonzero(k.host_bytes(mask)), prepend=-1) - 1
    guess = int(math.log2(max(len(mask) / n_values * math.log(2), 1)))
    choices = range(max(guess - 1, 0), min(guess + 1, MAX_RICE) + 1)
    r = min(choices, key=lambda r: len(gaps) * r + int((gaps >> r).sum()))
    ends = np.cumsum((gaps >> r) + 1) - 1
    n_unary, low = int(ends[-1]) + 1, gaps & ((1 << r) - 1)
    codes = [(_ones_at(ends, n_unary), 1)]
    codes += [((low >> at).astype(np.uint8), min(r - at, 8)) for at in range(0, r, 8)]
    parts = [k.from_bytes(n_unary.to_bytes(4, "little"), mask)]
    return r, parts + [k.pack(k.from_bytes(part, mask), bits) for part, bits in codes]


# --- any codec ----------------------------------------------------------------------------------


def encode_payload(
    k: Any,
    plan: TensorPlan,
    values: Array,
    *,
    seed: int | None = None,
    mask: Array | None = None,
    vary: bool = True,
) -> Payload:
    """Encode the values of a tensor by its plan.

    Args:
        k: kernels.
        plan: the tensor's plan.
        values: F32 patterns [n]; for a raw plan, patterns of the dtype.
        seed: seed of stochastic rounding, or None for rounding to nearest.
        mask: positions that TopK must select, or None.
        vary: True if the transport allows messages of variable size.
    """
    codec, writer = plan.codec, _PayloadWriter(k, plan, seed, vary)
    if isinstance(codec, Uniform):
        return writer.uniform(codec, values)
    if isinstance(codec, Tiled):
        return writer.tiled(codec, values)
    if isinstance(codec, TopK):
        return writer.topk(codec, values, mask)
    return Payload((k.as_bytes(values),), 0, lambda: values)


def decode_payload(
    k: Any,
    plan: TensorPlan,
    payload: Array,
    mode: int,
    not_finite: Condition,
    mask: Array | None = None,
    check: Check = raise_if,
) -> tuple[Array, Array | None]:
    """Decode a payload.

    Args:
        k: kernels.
        plan: the tensor's plan.
        payload: bytes of the payload.
        mode: from the header.
        not_finite: flag of the header for values that are not finite.
        mask: reused TopK positions, or None.
        check: gets the conditions of a wrong payload.

    Returns:
        F32 patterns [n], or patterns of the dtype for a raw plan; and the mask of TopK or None.

    Raises:
        FormatError: the payload contradicts the plan.
    """
    codec, source = plan.codec, _PayloadReader(k, plan, payload, mode, not_finite, check)
    if isinstance(codec, Uniform):
        values = source.uniform(codec)
    elif isinstance(codec, Tiled):
        values = source.tiled()
    elif isinstance(codec, TopK):
        values, mask = source.topk(codec, mask)
    else:
        values = k.as_patterns(source.take(plan.raw_bytes, "raw values"), plan.dtype.pattern_bytes)
        check((mode != 0) | not_finite, "mode: raw messages have none")
    raise_if(len(source.left), f"payload: {len(source.left)} bytes follow its end")
    return values, mask
