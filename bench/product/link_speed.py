"""Speed and size of every codec of the wire on one core, and the link speed below which each saves time.

    python -m bench.product.link_speed [--rounds N] [--elements N]

Speeds are raw bytes of fp32 per second, for complete messages including header and checksum. A codec saves
time on a link of L raw bytes per second if L < (1 - r) E D / (E + D), where r is sent / raw bytes, E the
speed of encoding and D the speed of decoding. If encoding and decoding overlap with sending, it saves time if
L < min(E, D). Writes results/link_speed.csv, link_sizes.csv and link_speed.json; about a minute.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.core.measure import machine, save_rows, timed, verdict
from bench.core.report import finish
from ckptz.format.dtypes import dtype_of
from ckptz.kernels import wire_cpu, wire_torch
from ckptz.wire import LinkPolicy, TensorLink, Tiled, TopK, Uniform
from ckptz.wire.endpoint import Link
from ckptz.wire.header import Direction
from ckptz.wire.policy import PRESETS
from ckptz.wire.state import MessageKey

FORWARD, BACKWARD, F32 = Direction.FORWARD, Direction.BACKWARD, dtype_of("F32")
TOP10 = TopK(0.1, 8, "bitmap")
POLICIES = {
    "raw": LinkPolicy(),
    "q8": LinkPolicy(forward=Uniform(8)),
    "q4": LinkPolicy(forward=Uniform(4)),
    "q4, stochastic": LinkPolicy(forward=Uniform(4), rounding="stochastic"),
    "q4, rANS": LinkPolicy(forward=Uniform(4, rans=True)),
    "q3": LinkPolicy(forward=Uniform(3)),
    "q2": LinkPolicy(forward=Uniform(2)),
    "Top10, bitmap, 8-bit values": LinkPolicy(forward=TOP10),
    "Top10, bitmap, 16-bit values": LinkPolicy(forward=TopK(0.1, 16, "bitmap")),
    "Top2, Rice, 8-bit values": LinkPolicy(forward=TopK(0.02, 8, "rice")),
    "tiles, 3.9375 bits": LinkPolicy(forward=Tiled(3.9375)),
    "q4, EF21": LinkPolicy(forward=Uniform(4), feedback="ef21"),
}
IN_TORCH = ("q8", "q4", "Top10, bitmap, 8-bit values")
TORCH_TENSOR, LEAST = ", torch tensor", 1.5  # GB/s of q4, encoded and decoded
REUSE = "Top10, positions reused"


class Case:
    """One codec with one set of kernels; `encode` and `decode` must be called in turn."""

    def __init__(self, policy: LinkPolicy, patterns: Any, shape: tuple[int, ...], kernels: Any) -> None:
        self._policy, self._patterns, self._shape, self._kernels = policy, patterns, shape, kernels
        self._links, self._step, self.message = self._pair(), -1, None

    def _pair(self) -> Any:
        like = torch.zeros(0, dtype=torch.uint8) if self._kernels is wire_torch else None
        return tuple(Link(0, 1, self._policy, kernels=self._kernels, like=like) for _ in range(2))

    def _prepare(self, key: MessageKey) -> None:
        """Send the messages that precede the timed message, without timing them."""

    def _send(self, key: MessageKey) -> Any:
        return self._links[0].send(FORWARD, self._patterns, F32, self._shape, key).message

    def _receive(self, key: MessageKey) -> None:
        self._links[1].receive(FORWARD, self.message, F32, self._shape, key)

    def encode(self) -> float:
        """Encode the next message and return the seconds."""
        self._step += 1
        key = MessageKey(self._step)
        self._prepare(key)

        def run() -> None:
            self.message = self._send(key)

        return timed(run)

    def decode(self) -> float:
        """Decode the last encoded message and return the seconds."""
        return timed(lambda: self._receive(MessageKey(self._step)))


class TensorCase(Case):
    """A torch tensor on the CPU, sent through `TensorLink` as pipeline stages do."""

    def _pair(self) -> Any:
        return tuple(TensorLink(0, 1, self._policy) for _ in range(2))

    def _send(self, key: MessageKey) -> Any:
        return self._links[0].send(FORWARD, self._patterns, key)[0]

    def _receive(self, key: MessageKey) -> None:
        self._links[1].receive(FORWARD, self.message, torch.float32, self._shape, key)


class IndexReuseCase(Case):
    """Gradients at the positions that were sent with the activations; only the backward message is timed."""

    def _prepare(self, key: MessageKey) -> None:
        self._links[1].receive(FORWARD, super()._send(key), F32, self._shape, key)

    def _send(self, key: MessageKey) -> Any:
        return self._links[1].send(BACKWARD, self._patterns, F32, self._shape, key).message

    def _receive(self, key: MessageKey) -> None:
        self._links[0].receive(BACKWARD, self.message, F32, self._shape, key)


def make_cases(values: np.ndarray[Any, Any], shape: tuple[int, ...]) -> dict[str, Case]:
    """Create the cases: all codecs with compiled kernels, some also with torch tensors or torch kernels."""
    patterns = values.view(np.uint32)
    cases = {name: Case(policy, patterns, shape, wire_cpu) for name, policy in POLICIES.items()}
    cases[REUSE] = IndexReuseCase(PRESETS["paper_top10"], patterns, shape, wire_cpu)
    as_torch = torch.from_numpy(values.view(np.int32))
    for name in ("q8", "q4"):
        tensor = torch.from_numpy(values).view(shape)
        cases[name + TORCH_TENSOR] = TensorCase(POLICIES[name], tensor, shape, None)
    for name in IN_TORCH:
        cases[f"{name}, torch kernels"] = Case(POLICIES[name], as_torch, shape, wire_torch)
    return cases


def _speed_rows(
    cases: dict[str, Case], n_bytes: int, rounds: int, extra: dict[str, Callable[[], float]]
) -> list[dict[str, object]]:
    timed_cases: dict[str, Callable[[], float]] = dict(extra)
    for name, case in cases.items():
        timed_cases |= {f"{name}|encode": case.encode, f"{name}|decode": case.decode}
    order = list(timed_cases)
    times = best_of(timed_cases, order, rounds)
    speeds = {name: n_bytes / seconds / 1e9 for name, seconds in times.items()}
    memcpy = speeds["memcpy"]
    rows = []
    for name, case in cases.items():
        encode, decode = speeds[f"{name}|encode"], speeds[f"{name}|decode"]
        ratio = len(case.message) / n_bytes
        link = max((1 - ratio) * encode * decode / (encode + decode), 0)
        row: dict[str, object] = {
            "codec": name,
            "encode GB/s": f"{encode:.2f}",
            "decode GB/s": f"{decode:.2f}",
        }
        row |= {"encode / memcpy": f"{encode / memcpy:.3f}", "sent / raw": f"{ratio:.4f}"}
        row |= {"pays below, serial, Gb/s": f"{8 * link:.1f}"}
        row |= {"pays below, overlapped, Gb/s": f"{8 * min(encode, decode) if ratio < 1 else 0:.1f}"}
        row |= {"target": "", "verdict": ""}
        if name == "q4":
            row |= {"target": "encode / memcpy >= 0.25", "verdict": verdict(encode / memcpy >= 0.25)}
        if name == "q4" + TORCH_TENSOR:
            row |= {"target": f"both >= {LEAST} GB/s", "verdict": verdict(min(encode, decode) >= LEAST)}
        rows.append(row)
    for name in extra:
        row = {"codec": name, "encode GB/s": f"{speeds[name]:.3f}"}
        rows.append(row | {"encode / memcpy": f"{speeds[name] / memcpy:.3f}"})
    gain = speeds["TopK threshold and mask, ours"] / speeds["torch.topk"]
    rows[-1] |= {"target": f"ours >= 10x torch.topk: {gain:.1f}x", "verdict": verdict(gain >= 10)}
    return rows


def best_of(cases: dict[str, Callable[[], float]], order: list[str], rounds: int) -> dict[str, float]:
    """Return the best seconds of each case; in `order`, each decode follows its encode."""
    best = dict.fromkeys(order, float("inf"))
    for i in range(rounds + 1):
        for name in order:
            seconds = cases[name]()
            if i:
                best[name] = min(best[name], seconds)
    return best


def size_rows() -> list[dict[str, object]]:
    """Build a row for each codec: the bytes of a message of 2^20 fp32 elements."""
    n = 1 << 20
    values = np.random.default_rng(0).standard_normal(n).astype(np.float32).view(np.uint32)
    shape, rows = (16, n // 16), []
    targets = {"q8": 1.02, "q4": 0.52, "Top10, bitmap, 8-bit values": 0.23, REUSE: 0.11}
    for name, policy in (POLICIES | {REUSE: PRESETS["paper_top10"]}).items():
        link = Link(0, 1, policy)
        message = link.send(FORWARD, values, F32, shape, MessageKey(0)).message
        if name == REUSE:
            message = link.send(BACKWARD, values, F32, shape, MessageKey(0)).message
        size = len(message) / n
        row: dict[str, object] = {"codec": name, "bytes": len(message), "bytes / element": f"{size:.4f}"}
        if name in targets:
            row |= {"target": f"<= {targets[name]}", "verdict": verdict(size <= targets[name])}
        rows.append({"target": "", "verdict": ""} | row)
    return [{n: row[n] for n in ("codec", "bytes", "bytes / element", "target", "verdict")} for row in rows]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--elements", type=int, default=1 << 24)
    options = parser.parse_args()
    torch.set_num_threads(1)
    values = np.random.default_rng(0).standard_normal(options.elements).astype(np.float32)
    shape, copy, k = (64, options.elements // 64), np.empty_like(values), options.elements // 640
    rows_of = torch.from_numpy(values).view(shape)
    extra: dict[str, Callable[[], float]] = {
        "memcpy": lambda: timed(lambda: np.copyto(copy, values)),
        "q4 codes alone, ours": lambda: timed(
            lambda: wire_cpu.pack(wire_cpu.quantize(values.view(np.uint32), 256, 4, None)[2], 4)
        ),
        "torch.topk": lambda: timed(lambda: torch.topk(rows_of.abs(), k, dim=1, sorted=False)),
        "TopK threshold and mask, ours": lambda: timed(
            lambda: wire_cpu.top_mask(values.view(np.uint32), 64, k)
        ),
    }
    np.copyto(copy, values)
    save_rows("link_sizes", size_rows())
    rows = _speed_rows(make_cases(values, shape), values.nbytes, options.rounds, extra)
    names = list(rows[0])
    save_rows("link_speed", [{name: row.get(name, "") for name in names} for row in rows])
    finish("link_speed", machine(), elements=options.elements)


if __name__ == "__main__":
    main()
