"""The rANS coder against the entropy of its input and against other coders.

    python -m bench.product.entropy_coder [--rounds N]

4 Mi codes (2^22) from quantized Gaussian and Laplacian sources, coded in chunks of 2^20 as a frame's planes
are. Sizes count frequency tables, lane states and coder bytes; the entropy is that of each chunk's own
histogram. Every coder runs on one thread, in turn, and every result is decoded and compared.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import matplotlib.pyplot as plt
import numpy as np
import zstandard
from numpy.typing import NDArray

from bench.core.measure import (
    RESULTS,
    Row,
    Timing,
    interleave,
    machine,
    parser_of,
    save_rows,
    timed,
    verdict,
)
from bench.core.peers import Peers
from bench.core.report import finish
from ckptz.bits import ByteReader
from ckptz.codec.units import CHUNK_UNITS
from ckptz.entropy.frequency import cost_bits, entropy_bits, normalise, pack_table, parse_table
from ckptz.entropy.streams import CoderId, Segments, decode_rans, decode_stream, encode_rans, encode_stream
from ckptz.kernels import compiled as cpu

N_SYMBOLS: Final = 4 * CHUNK_UNITS
BITS: Final = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 7.5)
TARGETS: Final = {0.05: 0.05, 0.1: 0.03} | dict.fromkeys(
    (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0), 0.005
)
SPEED_BITS: Final = (0.1, 1.0, 3.0, 6.0)  # where speeds are taken

Codes = NDArray[np.uint8]
Streams = list[tuple[int, bytes]]


# --- sources ------------------------------------------------------------------------------------


def _gaussian(scale: float) -> NDArray[np.float64]:
    return np.exp(-0.5 * (np.arange(-128, 128) / scale) ** 2)


def _laplacian(scale: float) -> NDArray[np.float64]:
    return np.exp(-np.abs(np.arange(-128, 128)) / scale)


SOURCES: Final = {"Gaussian": _gaussian, "Laplacian": _laplacian}


def _entropy(weights: NDArray[np.float64]) -> float:
    p = weights / weights.sum()
    p = p[p > 0]
    return float(-(p * np.log2(p)).sum())


def draw_codes(kind: str, bits: float, n: int = N_SYMBOLS) -> Codes:
    """Codes [n] of a quantized source whose entropy is `bits`, found by bisection over its width."""
    low, high = 0.01, 1e4
    for _ in range(80):
        scale = (low * high) ** 0.5
        low, high = (scale, high) if _entropy(SOURCES[kind](scale)) < bits else (low, scale)
    weights = SOURCES[kind](scale)
    return np.random.default_rng(5).choice(256, n, p=weights / weights.sum()).astype(np.uint8)


def chunks_of(codes: Codes) -> list[Codes]:
    """Chunks as in a frame."""
    return [codes[begin : begin + CHUNK_UNITS] for begin in range(0, len(codes), CHUNK_UNITS)]


# --- coders -------------------------------------------------------------------------------------


def _segments(table: NDArray[np.uint16], n: int) -> Segments:
    return Segments(np.array([n], np.int64), np.zeros(1, np.int64), table[None])


def encode_own_rans(codes: Codes) -> bytes:
    """A chunk by rANS with its own table, whether or not another coder would be smaller."""
    counts = cpu().histogram(codes)
    table = normalise(counts)
    return pack_table(table) + encode_rans(codes, _segments(table, len(codes)), cost_bits(counts, table) / 8)


def decode_own_rans(stream: bytes, out: Codes) -> None:
    """Inverse of `encode_own_rans`."""
    source = ByteReader(stream)
    table = parse_table(source)
    decode_rans(source, _segments(table, len(out)), out)


def encode_chosen(chunks: list[Codes]) -> Streams:
    """Each chunk by the coder that a frame would choose."""
    return [encode_stream(chunk) for chunk in chunks]


def decode_chosen(streams: Streams, chunks: list[Codes]) -> None:
    """Inverse of `encode_chosen`, into `chunks`."""
    for (coder, stream), chunk in zip(streams, chunks, strict=True):
        decode_stream(coder, memoryview(stream), chunk)


# --- sizes --------------------------------------------------------------------------------------


def _checked_rans_bytes(chunks: list[Codes]) -> int:
    total = 0
    for chunk in chunks:
        stream, out = encode_own_rans(chunk), np.empty_like(chunk)
        decode_own_rans(stream, out)
        if not np.array_equal(out, chunk):
            raise AssertionError("rANS does not restore its input")
        total += len(stream)
    return total


def size_row(kind: str, bits: float, peers: Peers) -> Row:
    """Sizes of all coders on one source, as excess over the entropy."""
    codes = draw_codes(kind, bits)
    chunks = chunks_of(codes)
    ideal = sum(entropy_bits(np.bincount(chunk, minlength=256)) for chunk in chunks) / 8
    streams = encode_chosen(chunks)
    peers.load("codes", codes)
    sizes = {
        "rANS": _checked_rans_bytes(chunks),
        "chosen": sum(len(stream) for _, stream in streams),
        "constriction": peers.compress("constriction", "codes")[1],
        "zstd -1": sum(len(zstandard.ZstdCompressor(1).compress(chunk)) for chunk in chunks),
        "zlib -6": sum(len(zlib.compress(chunk, 6)) for chunk in chunks),
    }
    target = TARGETS.get(bits)
    return {
        "source": kind,
        "entropy bits": f"{8 * ideal / len(codes):.4f}",
        **{f"{name} %": f"{100 * (size / ideal - 1):+.2f}" for name, size in sizes.items()},
        "chosen coder": "/".join(sorted({CoderId(coder).name.lower() for coder, _ in streams})),
        "target": target and f"<= {100 * target:g} %",
        "verdict": verdict(sizes["rANS"] / ideal - 1 <= target) if target else None,
    }


# --- speeds -------------------------------------------------------------------------------------


def _decompress_all(decompress: Callable[[bytes], Any], blobs: list[bytes]) -> None:
    for blob in blobs:
        decompress(blob)


def speed_cases(codes: Codes, peers: Peers) -> dict[str, Callable[[], float]]:
    """What is timed on one source; "ckptz" chooses its coder, "rANS" does not."""
    chunks, outputs = chunks_of(codes), chunks_of(np.ones_like(codes))
    own, chosen = [encode_own_rans(chunk) for chunk in chunks], encode_chosen(chunks)
    zstd, unzstd = zstandard.ZstdCompressor(1), zstandard.ZstdDecompressor()
    zstd_blobs = [zstd.compress(chunk) for chunk in chunks]
    zlib_blobs = [zlib.compress(chunk, 6) for chunk in chunks]

    def decode_own() -> None:
        for stream, out in zip(own, outputs, strict=True):
            decode_own_rans(stream, out)

    peers.load("codes", codes)
    peers.compress("constriction", "codes")
    return {
        "rANS encode": lambda: timed(lambda: [encode_own_rans(chunk) for chunk in chunks]),
        "rANS decode": lambda: timed(decode_own),
        "ckptz encode": lambda: timed(lambda: encode_chosen(chunks)),
        "ckptz decode": lambda: timed(lambda: decode_chosen(chosen, outputs)),
        "constriction encode": lambda: peers.compress("constriction", "codes")[0],
        "constriction decode": functools.partial(peers.decompress, "constriction", "codes"),
        "zstd -1 encode": lambda: timed(lambda: [zstd.compress(chunk) for chunk in chunks]),
        "zstd -1 decode": lambda: timed(lambda: _decompress_all(unzstd.decompress, zstd_blobs)),
        "zlib -6 encode": lambda: timed(lambda: [zlib.compress(chunk, 6) for chunk in chunks]),
        "zlib -6 decode": lambda: timed(lambda: _decompress_all(zlib.decompress, zlib_blobs)),
    }


def speed_rows(bits: float, n: int, timings: Mapping[str, Timing]) -> list[Row]:
    """Million symbols a second, best and median."""
    return [
        {
            "source": "Gaussian",
            "entropy bits": bits,
            "coder": case.removesuffix(" encode"),
            "encode Msym/s": round(n / timing.best / 1e6),
            "encode median": round(n / timing.median / 1e6),
            "decode Msym/s": round(n / (back := timings[case.replace("encode", "decode")]).best / 1e6),
            "decode median": round(n / back.median / 1e6),
        }
        for case, timing in timings.items()
        if case.endswith("encode")
    ]


# --- picture and command line -------------------------------------------------------------------


def draw(rows: list[Row]) -> None:
    """results/entropy_coder.png: excess over the entropy."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for kind, style in (("Gaussian", "-"), ("Laplacian", "--")):
        here = [row for row in rows if row["source"] == kind]
        bits = [float(str(row["entropy bits"])) for row in here]
        for i, name in enumerate(("rANS", "chosen", "constriction", "zstd -1", "zlib -6")):
            excess = [max(float(str(row[f"{name} %"])), 0.001) for row in here]
            label = name if style == "-" else None
            axes.plot(bits, excess, style, color=f"C{i}", marker=".", label=label)
    axes.plot([0.05, 0.1, 0.5, 6], [5, 3, 0.5, 0.5], "kv", label="target for rANS")
    axes.set(xscale="log", yscale="log", xlabel="entropy, bits a symbol (log)")
    axes.set(ylabel="size over entropy, % (log)", title="Gaussian solid, Laplacian dashed")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(RESULTS / "entropy_coder.png", dpi=120)


def main() -> None:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    options = parser.parse_args()
    sizes: list[Row] = []
    speeds: list[Row] = []
    with Peers() as peers:
        facts = machine(constriction=peers.versions()["constriction"])
        for kind in SOURCES:
            sizes += [size_row(kind, bits, peers) for bits in BITS]
        for bits in SPEED_BITS:
            timings = interleave(speed_cases(draw_codes("Gaussian", bits), peers), options.rounds)
            speeds += speed_rows(bits, N_SYMBOLS, timings)
    save_rows("entropy_coder_sizes", sizes)
    save_rows("entropy_coder_speeds", speeds)
    draw(sizes)
    finish("entropy_coder", facts, sizes)


if __name__ == "__main__":
    main()
