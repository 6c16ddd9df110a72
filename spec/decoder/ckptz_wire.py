#!/usr/bin/env python3
"""A receiver of messages on a link that implements the page 08-wire, and nothing else.

It reads the sessions of a manifest of vectors and prints a line of JSON for each: the SHA-256 of every
tensor, or the row of the page by which a message is refused. Text in "double quotes" after
`page#anchor:` is a sentence of the page, or a part of one. It knows no AQ-SGD, no EF mixed and no levels.

    python ckptz_wire.py MANIFEST
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import sys
from pathlib import Path
from typing import Any

from ckptz_frame import (
    DTYPE_OF_NAME,
    EXPONENT,
    HUFFMAN,
    M64,
    Cursor,
    Refusal,
    Stream,
    cast,
    finite,
    nearest,
    need,
    number,
    pack,
    unpack,
    widen,
)

RAW, UNIFORM, TOPK, TILED = range(4)  # 08-wire#codecs
BACKWARD, REUSE, DELTA, NOT_FINITE, EVAL = 1, 2, 4, 16, 32  # 08-wire#flags
LARGEST = {"F32": 0x7F7FFFFF, "BF16": 0x7F7F0000, "F16": 0x477FE000}  # finite values, as F32 patterns


HEADER = """magic H version B length B codec B param B dtype B flags B src H dst H tensor H mode H step I
microbatch I state_seq I plan I n I count I payload_bytes I batch I checksum Q header_checksum Q"""


def padded(n: int) -> int:
    """08-wire: "Padded means followed by zero bytes up to a multiple of 16"."""
    return -(-n // 16) * 16


def mix(x: int) -> int:
    """08-wire#checksum."""
    x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD & M64
    x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 & M64
    return x ^ x >> 33


def held(value: float, name: str) -> int:
    """08-wire#uniform: "held within the largest finite value" and its negative, "rounded to F32"."""
    largest = number(LARGEST[name])
    return nearest(max(-largest, min(value, largest)))


def checksum(data: bytes) -> int:
    """08-wire#checksum: "the sum modulo 2^64 of mix(w[i] + (i + 1) * 0x9e3779b97f4a7c15)"."""
    words = enumerate(unpack(8, data), 1)
    return sum(mix((word + i * 0x9E3779B97F4A7C15) & M64) for i, word in words) & M64


class Plan:
    """08-wire#codecs: what both ends know of a tensor before its message."""

    def __init__(self, row: dict[str, Any], direction: str, is_eval: bool) -> None:
        self.dtype, self.n = DTYPE_OF_NAME[row["dtype"]], math.prod(row["shape"])
        self.options, policy = row["policy"][direction], row["policy"]
        self.codec = {"raw": RAW, "uniform": UNIFORM, "topk": TOPK, "tiled": TILED}[self.options["codec"]]
        # "one sample (one index of the first dimension; the whole tensor if it has one dimension)"
        self.samples = row["shape"][0] if len(row["shape"]) > 1 else 1
        # "the agreed share of the elements of a sample, rounded half up, at least 1"
        share = self.options.get("share", 0)
        self.k = max(math.floor(share * self.n / self.samples + 0.5), 1) * self.samples
        self.reuse = self.codec == TOPK and policy["reuse"] and direction == "backward"
        self.block, self.bits = self.options.get("block", 256), self.options.get("bits", 8)
        # "A row is the last dimension if that is a multiple of t, else t elements"
        self.tile, last = self.options.get("tile", 64), row["shape"][-1]
        self.row = self.tile if last % self.tile else last
        self.rows = -(-self.n // self.row)
        self.tiles, self.planes = self.rows * self.row // self.tile, int(self.bits * self.rows)
        n_bytes = self.dtype.patterns([self.n]) * self.dtype.size
        # "4,096 where a policy names no other number"
        lossy = self.dtype.name in EXPONENT and self.n >= policy.get("min_elements", 4096)
        lossy = lossy and self.cap(n_bytes) < 0.75 * n_bytes
        raw_eval = policy["eval"] == "raw" or (policy["eval"] == "auto" and policy["feedback"])
        self.codec = self.codec if lossy and not (is_eval and raw_eval) else RAW
        self.has_state = self.codec != RAW and policy["feedback"] in ("ef", "ef21") and not is_eval
        self.adds = self.has_state and policy["feedback"] == "ef21"
        self.limit = self.cap(n_bytes)
        wide = 16 if self.options.get("values") == 16 else 8
        self.param = {RAW: 0, UNIFORM: self.bits, TOPK: wide, TILED: 16 * self.bits}[self.codec]
        blocks = -(-self.n // self.block)
        self.count = {RAW: 0, UNIFORM: blocks, TOPK: self.k, TILED: self.tiles}[self.codec]

    def cap(self, n_bytes: int) -> int:
        """08-wire#sizes, of the payload."""
        if self.codec == RAW:
            return padded(n_bytes)
        if self.codec == UNIFORM:
            return padded(4 * -(-self.n // self.block)) + padded(-(-self.n * self.bits // 8))
        if self.codec == TILED:
            planes = self.planes * self.row // 8
            return padded(2 + self.tiles) + padded(-(-self.rows // 2)) + padded(planes)
        bitmap = 0 if self.reuse else padded(-(-self.n // 8))
        if self.options["values"] == 16:
            return bitmap + padded(2 * self.k)
        return bitmap + padded(4 * -(-self.k // 256)) + padded(self.k)


class Payload(Cursor):
    """Takes a payload apart."""

    def part(self, n: int) -> bytes:
        """The next n bytes, and the zeros behind them, as "padding or unused bits that are not 0" fail."""
        need(padded(n) <= self.left, "W5")
        data = self.take(padded(n))
        need(not any(data[n:]), "W5")
        return data[:n]

    def packed(self, n: int, bits: int) -> list[int]:
        """01-integers#packed-bits: n codes."""
        number = int.from_bytes(self.part(-(-n * bits // 8)), "little")
        need(number >> n * bits == 0, "W5")
        return [number >> i * bits & (1 << bits) - 1 for i in range(n)]


def uniform(plan: Plan, payload: Payload, mode: int, flag: bool) -> list[int]:
    """08-wire#uniform: F32 patterns of n values, or those of TopK in 8 bits."""
    bits, n, block = (plan.bits, plan.n, plan.block) if plan.codec == UNIFORM else (8, plan.k, 256)
    blocks = -(-n // block)
    ranges = unpack(2, payload.part(4 * blocks))
    offsets, scales = ranges[:blocks], ranges[blocks:]
    # "a negative scale, an offset that is not finite, flag 4 that disagrees"
    need(all(finite(x, "BF16") for x in offsets) and not any(x >> 15 for x in scales), "W5")
    need(any(not finite(x, "BF16") for x in scales) == flag, "W5")
    if mode == 0:
        codes = payload.packed(n, bits)
    else:  # "coder u8, length u32, and a stream of n codes by a coder that embedded streams may have"
        need(mode == 1 and plan.codec == UNIFORM and plan.options["rans"], "W5")
        coder, length = payload.one(), payload.one("I")
        need(coder != HUFFMAN, "E2")
        codes = list(Stream(payload.take(length)).decode(coder, n))
        need(payload.left < 16 and not any(payload.take(payload.left)), "W5")
    need(max(codes) < 1 << bits, "W5")  # "codes of 2^b or more"
    out = []
    for i, c in enumerate(codes):  # "offset + scale * c, product and sum in IEEE double"
        offset, scale = (number(widen(x[i // block], "BF16")) for x in (offsets, scales))
        out.append(held(offset + scale * c, plan.dtype.name) if math.isfinite(scale) else 0x7FC00000)
    return out


def hash_of(i: int) -> int:
    """08-wire#rounding: h of an index, for seed 0."""
    x = i * 0x9E3779B9 & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16


def rotated_back(values: list[float]) -> list[int]:
    """08-wire#tiles: "Rotating back is steps 2 and 3 with the signs of step 1 applied before" the last."""
    t, d = len(values), 1
    while d < t:
        for i in range(t):
            if not i & d:
                values[i], values[i + d] = values[i] + values[i + d], values[i] - values[i + d]
        d *= 2
    out = []
    for i, value in enumerate(values):
        signed = value / math.isqrt(t) * (-1 if hash_of(i) >> 31 else 1)
        out.append(0 if abs(signed) < 2.0**-126 else held(signed, "F32"))
    return out


def tiled(plan: Plan, payload: Payload, flag: bool) -> list[int]:
    """08-wire#tiles: F32 patterns of n values."""
    head = payload.part(2 + plan.tiles)
    top, steps = unpack(2, head[:2])[0], head[2:]
    widths = payload.packed(plan.rows, 4)
    planes = payload.part(plan.planes * plan.row // 8)
    # "a top that is too great, a width below 2 or above 8, widths that exceed P"
    need(top <= 0x7F7F and (254 in steps) == flag, "W5")
    need(all(2 <= b <= 8 for b in widths) and sum(widths) <= plan.planes, "W5")
    need(not any(planes[sum(widths) * plan.row // 8 :]), "W5")
    bits, out, at = int.from_bytes(planes, "little"), [], 0
    for r, b in enumerate(widths):
        plane = [bits >> at + i * plan.row & (1 << plan.row) - 1 for i in range(b)]
        at += b * plan.row
        codes = [sum((p >> j & 1) << i for i, p in enumerate(plane)) for j in range(plan.row)]
        for first in range(0, plan.row, plan.tile):
            step = steps[(r * plan.row + first) // plan.tile]
            peak = number(widen(max(top - 16 * step, 0x0880), "BF16")) if step <= 253 else 0.0
            scale, most = peak * (1 / ((1 << b) - 1)), (1 << b) - 1
            exact = [nearest((2 * c - most) * scale) for c in codes[first : first + plan.tile]]
            if step == 254:
                out += [0x7FC00000] * plan.tile
            else:
                exact = [0] * plan.tile if not peak else exact
                out += rotated_back([number(x) for x in exact]) if plan.options["rotate"] else exact
    return out[: plan.n]


def gaps(plan: Plan, payload: Payload, r: int) -> list[int]:
    """08-wire#topk: "Mode 1 + r, r from 0 to 16" "codes the gaps between ones"; gives the positions."""
    need(plan.options["index"] != "bitmap" and 0 <= r <= 16, "W5")
    length = unpack(4, payload.part(4))[0]
    need(plan.k <= length <= plan.k + (plan.n >> r), "W5")
    unary = payload.packed(length, 1)
    ends = [i for i, bit in enumerate(unary) if bit]
    need(len(ends) == plan.k and unary[-1] == 1, "W5")
    low = payload.packed(plan.k, min(r, 8)) if r else [0] * plan.k
    high = payload.packed(plan.k, r - 8) if r > 8 else [0] * plan.k
    at, before, out = -1, -1, []
    for end, a, b in zip(ends, low, high, strict=True):
        at += 1 + (end - before - 1 << r) + a + (b << 8)
        before = end
        need(at < plan.n, "W5")
        out.append(at)
    return out


class Receiver:
    """One end of a link."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row
        self.seen: dict[Any, int] = {}  # messages of a slot
        self.state: dict[Any, list[int]] = {}  # a, of a slot
        self.positions: dict[Any, list[int]] = {}  # of activations, by step and microbatch

    def receive(self, due: dict[str, Any], data: bytes) -> bytes:
        """The tensor of a message, or a refusal."""
        plan = Plan(self.row, due["direction"], due["eval"])
        header = self.header(plan, due, data)
        slot = due["direction"], due["microbatch"]
        payload = data[64 : 64 + header["payload_bytes"]]
        need(len(payload) == header["payload_bytes"] and checksum(payload) == header["checksum"], "W4")
        patterns = self.patterns(
            plan, due, Payload(payload), header["mode"], bool(header["flags"] & NOT_FINITE)
        )
        self.seen[slot] = self.seen.get(slot, 0) + (not due["eval"])
        return pack(plan.dtype.size, patterns)

    def header(self, plan: Plan, due: dict[str, Any], data: bytes) -> dict[str, int]:
        """08-wire#header."""
        need(len(data) >= 64, "W1")
        names, letters = HEADER.split()[::2], HEADER.split()[1::2]
        got = dict(zip(names, struct.unpack("<" + "".join(letters), data[:64]), strict=True))
        need((got["magic"], got["version"], got["length"]) == (0x5A57, 1, 4) and got["flags"] < 64, "W1")
        need(checksum(data[:56]) == got["header_checksum"], "W1")
        flags = BACKWARD * (due["direction"] == "backward") | REUSE * plan.reuse | DELTA * plan.has_state
        flags |= EVAL * due["eval"] | got["flags"] & (NOT_FINITE if plan.codec != RAW else 0)
        slot = due["direction"], due["microbatch"]
        right = {"codec": plan.codec, "param": plan.param, "dtype": plan.dtype.id, "flags": flags}
        right |= {"src": self.row["src"], "dst": self.row["dst"], "tensor": 0, "step": due["step"]}
        right |= {"microbatch": due["microbatch"], "plan": due["plan"], "n": plan.n, "count": plan.count}
        right |= {"state_seq": 0 if due["eval"] else self.seen.get(slot, 0), "batch": 0}
        need(all(got[name] == value for name, value in right.items()), "W2")
        need(got["payload_bytes"] <= plan.limit and got["payload_bytes"] % 16 == 0, "W3")
        return got

    def patterns(self, plan: Plan, due: dict[str, Any], payload: Payload, mode: int, flag: bool) -> list[int]:
        """08-wire#codecs and #state."""
        name, slot = plan.dtype.name, (due["direction"], due["microbatch"])
        if plan.codec == RAW:
            data = payload.part(plan.dtype.patterns([plan.n]) * plan.dtype.size)
            need(payload.left == 0 and mode == 0 and not flag, "W5")
            return list(unpack(plan.dtype.size, data))
        if plan.codec == UNIFORM:
            f32_patterns = uniform(plan, payload, mode, flag)
        elif plan.codec == TILED:
            need(mode == 0, "W5")
            f32_patterns = tiled(plan, payload, flag)
        else:
            f32_patterns = self.topk(plan, due, payload, mode, flag)
        need(payload.left == 0, "W5")
        if plan.adds:  # "a = a + C(x - a)"; "A message with flag 4" "leaves all state as it is"
            before = self.state.get(slot, [0] * plan.n)
            f32_patterns = [nearest(number(a) + number(p)) for a, p in zip(before, f32_patterns, strict=True)]
            if not flag:
                self.state[slot] = f32_patterns
        return [cast(held(number(p), name) if finite(p, "F32") else p, name) for p in f32_patterns]

    def topk(self, plan: Plan, due: dict[str, Any], payload: Payload, mode: int, flag: bool) -> list[int]:
        """08-wire#topk: "All other elements are +0"."""
        place = due["step"], due["microbatch"]
        if plan.reuse:
            need(place in self.positions and mode == 0, "W6")
            where = self.positions[place]
        elif mode == 0:
            where = [i for i, bit in enumerate(payload.packed(plan.n, 1)) if bit]
        else:
            where = gaps(plan, payload, mode - 1)
        self.positions[place] = where
        per = [0] * plan.samples  # "a sample with another number of ones than k"
        for i in where:
            per[i * plan.samples // plan.n] += 1
        need(set(per) == {plan.k // plan.samples}, "W5")
        if plan.options["values"] == 16:
            kind = "F16" if plan.dtype.name == "F16" else "BF16"
            values = [widen(u, kind) for u in unpack(2, payload.part(2 * plan.k))]
            need(any(not finite(p, "F32") for p in values) == flag, "W5")
        else:
            values = uniform(plan, payload, 0, flag)
        f32_patterns = [0] * plan.n
        for i, p in zip(where, values, strict=True):
            f32_patterns[i] = p
        return f32_patterns


def main() -> int:
    """The command line: 0 if every session was read."""
    manifest = Path(sys.argv[1])
    for row in json.loads(manifest.read_text())["vectors"]:
        receiver, results = Receiver(row), []
        for due in row.get("messages", []):
            try:
                data = receiver.receive(due, (manifest.parent / due["path"]).read_bytes())
                results.append(hashlib.sha256(data).hexdigest())
            except Refusal as refusal:
                results.append(refusal.rule)
        if results:
            print(json.dumps({"name": row["name"], "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
