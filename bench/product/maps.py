"""K-means maps: speed against memcpy, the fit against an exact one, and what grouping by the base saves.

    python -m bench.product.maps [--elements N] [--rounds N]

Three tables: compress and restore of 16 levels on one thread in memory against the machine's memcpy; the
centroids fitted on the sketch against an exact weighted k-means of the sorted values; and the codes of the
demo's deltas coded by Huffman, by rANS, and by rANS in groups of the base's codes.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.core.coders import huffman_bits, rans_bytes
from bench.core.measure import interleave, machine, save_rows, timed, verdict
from bench.core.report import finish
from bench.core.sources import STEPS, run_pairs
from ckptz import pipeline
from ckptz.codec.decode import decode_chunk
from ckptz.codec.frame import FrameHeader
from ckptz.codec.plan import Plan
from ckptz.codec.units import ArraySource, ChunkSources, TensorSource, chunk_bounds
from ckptz.container.byte_source import FileBytes, MemoryBytes
from ckptz.container.envelope import PlainFile
from ckptz.container.index import BaseRef
from ckptz.container.reader import Container, FrameSource
from ckptz.dtypes import dtype_of
from ckptz.encoding.chunk import EncodedChunk, encode_chunk
from ckptz.encoding.subject import Subject
from ckptz.kernels import floats, planning
from ckptz.methods.kmeans import Clusters, KMeans
from ckptz.parallel import Workers
from ckptz.pipeline import Job
from ckptz.quant.partitions import Partitions, fit_centroids, sample_weights
from ckptz.quant.sketch import Sketch

Values = NDArray[np.float32]
LEVELS = 16


def gaussian(n: int) -> Values:
    """Weights as a linear layer has them at the start."""
    return (np.random.default_rng(0).standard_normal(n) * 0.02).astype(np.float32)


# --- speed --------------------------------------------------------------------------------------


def encode(source: ArraySource) -> tuple[Plan, list[EncodedChunk]]:
    """Sketch, fit, quantize and code; everything that compressing a tensor takes but the file."""
    draft = Clusters(Partitions(LEVELS)).plan(Subject(source))
    n = source.dtype.n_units(source.shape)
    return draft.plan, [encode_chunk(source, draft, ChunkSources(*bounds)) for bounds in chunk_bounds(n)]


def speed_rows(values: Values, rounds: int) -> list[Mapping[str, object]]:
    """Compress and restore on one thread against memcpy of the same bytes, in turn."""
    source = ArraySource(dtype_of("F32"), (len(values) // 1024, 1024), values.view(np.uint32))
    copy = np.zeros_like(values)
    plan, chunks = encode(source)
    header = FrameHeader(source.dtype, source.shape, plan, tuple(chunk.record for chunk in chunks))
    payloads = [np.frombuffer(bytearray(chunk.payload), np.uint8) for chunk in chunks]
    packed, out = header.pack(), np.zeros(len(values), np.uint32)

    def restore() -> None:
        parsed = FrameHeader.parse(packed)
        for i, (begin, end) in enumerate(chunk_bounds(len(values))):
            decode_chunk(parsed, i, payloads[i], ChunkSources(begin, end), out[begin:end])

    timings = interleave(
        {
            "compress": lambda: timed(lambda: encode(source)),
            "restore": lambda: timed(restore),
            "memcpy": lambda: timed(lambda: np.copyto(copy, values)),
        },
        rounds,
    )
    copied = timings["memcpy"].best
    targets = {"compress": 20, "restore": 10}
    stored = len(packed) + sum(len(payload) for payload in payloads)
    return [
        {
            "case": f"{LEVELS} levels, {name}",
            "MB/s": round(values.nbytes / timing.best / 1e6),
            "of memcpy": f"1/{timing.best / copied:.1f}",
            "target": f">= 1/{targets[name]}" if name in targets else "",
            "verdict": verdict(timing.best / copied <= targets[name]) if name in targets else "",
            "bits per element": round(8 * stored / len(values), 3),
        }
        for name, timing in timings.items()
    ]


# --- the fit ------------------------------------------------------------------------------------


def exact_centroids(values: Values) -> NDArray[np.float64]:
    """Exact weighted k-means by sorting all values: the same programme on every distinct value."""
    distinct, counts = np.unique(values.astype(np.float64), return_counts=True)
    return fit_centroids(distinct, sample_weights(distinct, counts, 1.0), LEVELS)


def sketch_centroids(values: Values) -> NDArray[np.float64]:
    """What ckptz does: histogram, then the programme on its buckets."""
    buckets, counts = Sketch.of(values.view(np.uint32), floats.F32).occupied()
    return fit_centroids(buckets, sample_weights(buckets, counts, 1.0), LEVELS)


def square_error(values: NDArray[np.float64], centroids: NDArray[np.float64]) -> float:
    """Mean-square distance to the nearest centroid."""
    nearest = np.searchsorted((centroids[1:] + centroids[:-1]) / 2, values)
    return float(np.square(values - centroids[nearest]).mean())


def fit_rows(values: Values) -> list[Mapping[str, object]]:
    """Error and seconds of both fits."""
    planning()  # compiled before the clock starts
    sketch_centroids(values[:1000])
    exact_centroids(values[:1000])
    found: dict[str, Any] = {}
    seconds = {
        "sketch": min(timed(lambda: found.update(sketch=sketch_centroids(values))) for _ in range(3)),
        "exact, sorting": timed(lambda: found.update({"exact, sorting": exact_centroids(values)})),
    }
    sample = values.astype(np.float64)
    errors = {name: square_error(sample, centroids) for name, centroids in found.items()}
    best = errors["exact, sorting"]
    ratio = seconds["exact, sorting"] / seconds["sketch"]
    return [
        {
            "fit": name,
            "values": len(values),
            "seconds": round(seconds[name], 4),
            "mean-square error": f"{errors[name]:.6e}",
            "above exact": f"{100 * (errors[name] / best - 1):.3f} %",
            "times faster": round(ratio) if name == "sketch" else "",
            "target": "within 1 %, >= 20x" if name == "sketch" else "",
            "verdict": verdict(errors[name] <= 1.01 * best and ratio >= 20) if name == "sketch" else "",
        }
        for name in ("sketch", "exact, sorting")
    ]


# --- grouping -----------------------------------------------------------------------------------


def checkpoint(path: Path) -> dict[str, TensorSource]:
    """Weights of a plain file."""
    return dict(PlainFile(FileBytes(path)).tensors)


def compressed(tensors: Mapping[str, TensorSource], base: Container | None, config: KMeans) -> Container:
    """A `.ckptz` file in memory, open."""
    ref = None if base is None else BaseRef(base.index.content_id, "base.ckptz", base.index.depth + 1)
    bases = {} if base is None else base.tensors
    sink = io.BytesIO()
    with Workers() as workers:
        pipeline.write(sink, Job(tensors=tensors, base=ref, bases=bases, config=config), workers)
    container = Container(MemoryBytes(sink.getvalue()))
    container.bases = bases
    return container


def _code_sizes(source: FrameSource) -> tuple[int, int, int]:
    """(Huffman, plain rANS, as stored) bytes of the codes of one lossy tensor."""
    huffman = plain = stored = 0
    for i, (begin, end) in enumerate(source.chunk_bounds()):
        codes = source.codes(begin, end)
        assert codes is not None
        bits = huffman_bits(np.bincount(codes, minlength=256))
        huffman += -(-(bits or len(codes)) // 8)  # a lone symbol takes a bit, too
        plain += rans_bytes(codes, len(codes) / 2)
        stored += source.header.chunks[i].streams[0].n_bytes
    # What grouping adds to the header counts as its cost: class rule, tables and map.
    tables = source.header.plan.tables
    overhead = len(source.header.pack()) - _ungrouped_header_bytes(source) if tables else 0
    return huffman, plain, stored + overhead


def _ungrouped_header_bytes(source: FrameSource) -> int:
    header = source.header
    plan = replace(header.plan, rules=(), tables=())
    chunks = tuple(replace(chunk, base_codes=None) for chunk in header.chunks)
    return len(FrameHeader(header.dtype, header.shape, plan, chunks).pack())


def grouping_rows(levels: int) -> list[Mapping[str, object]]:
    """Sizes of the codes of every file of the demo run, as a chain."""
    paths = [base for name, base, _ in run_pairs() if name.startswith("training")]
    paths.append(next(p for name, _, p in reversed(run_pairs()) if name.startswith("training")))
    config, base, rows = KMeans(levels=levels, min_elements=4096), None, []
    for path, step in zip(paths, STEPS, strict=True):
        base = compressed(checkpoint(path), base, config)
        sizes = [_code_sizes(s) for s in base.tensors.values() if s.n_codes is not None]
        huffman, plain, stored = (sum(column) for column in zip(*sizes, strict=True))
        rows.append(
            {
                "levels": levels,
                "file": f"step {step}" + ("" if base.index.base else " (anchor)"),
                "Huffman, bytes": huffman,
                "rANS, bytes": plain,
                "rANS grouped, bytes": stored,
                "Huffman / grouped": round(huffman / stored, 2),
                "target": "grouped <= rANS",
                "verdict": verdict(stored <= plain),
            }
        )
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="K-means maps: speed, fit and grouping.")
    parser.add_argument("--elements", type=int, default=1 << 26, help="fp32 values of the speed table")
    parser.add_argument("--values", type=int, default=20_000_000, help="values of the fit table")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    save_rows("maps_speed", speed_rows(gaussian(options.elements), options.rounds))
    save_rows("maps_fit", fit_rows(gaussian(options.values)))
    save_rows("maps_grouping", [row for levels in (16, 8) for row in grouping_rows(levels)])
    finish("maps", machine())


if __name__ == "__main__":
    main()
