"""Bytes saved and CPU seconds spent by each part of `effort`; `effort="default"` was chosen by these tables.

    python -m bench.product.effort [--rounds N] [--only files|coders|held-out]

One thread, CPU seconds, best of N interleaved rounds. The inputs are the weights of bench.product.lossless
and deltas of its training run. A part is in the default if it saves 1 % of a file, and Huffman coding is used
if a stream grows by at most 1 %. The held-out part reads the training states that `make demo` writes, which
were not used to choose an effort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from bench.core import codecs_ckptz as codecs
from bench.core.measure import Row, cpu_seconds, interleave, machine, parser_of, save_rows
from bench.core.report import finish
from bench.core.sources import Tensors, as_bf16, concatenated, model_path, n_bytes, read_tensors, run_pairs
from ckptz.codec.effort import DEFAULT, FAST, SMALL, Effort
from ckptz.format.bits import ByteReader
from ckptz.format.frequency import entropy_bits, normalise, slot_tables
from ckptz.format.huffman import encode_huffman_streams, pack_lengths
from ckptz.format.index import BaseRef
from ckptz.format.sources import CHUNK_VALUES
from ckptz.format.streams import (
    CoderId,
    Segments,
    decode_rans,
    decode_stream,
    encode_rans,
)
from ckptz.kernels import compiled, cpu
from ckptz.parallel import Workers
from ckptz.write import frame_writer
from ckptz.write.frame_writer import FilePlan
from ckptz.write.job import WriteJob, prepared
from ckptz.write.writer import write_container

DEMO: Final = Path("demo-output/uncompressed")
BLOCKS: Final = (20, 18, 17, 16, 15, 14)  # binary logarithms of codes that share a table
EFFORTS: Final[dict[str, Effort]] = {
    "small": SMALL,
    "default": DEFAULT,
    "fast": FAST,
    "default, all contexts of runs": replace(DEFAULT, run_gain=0.0),
    "default, no contexts of runs": replace(DEFAULT, run_gain=None),
    "default, no contexts of deltas": replace(DEFAULT, delta_gain=None),
    "default, no exclusive or": replace(DEFAULT, tries_xor=False),
    "default, no Huffman": replace(DEFAULT, huffman_margin=None),
    "default, Huffman for 2 % more": replace(DEFAULT, huffman_margin=0.02),
    "default, Huffman for 10 % more": replace(DEFAULT, huffman_margin=0.1),
    "fast, Huffman for 10 % more": replace(FAST, huffman_margin=0.1),
}


def written(tensors: Tensors, bases: Tensors | None, effort: Effort) -> memoryview:
    """Write a file, as a delta if `bases` are passed, and return its bytes."""
    sink = codecs.Memory(n_bytes(tensors) + codecs.HEADERS * (len(tensors) + 16))
    ref = BaseRef(codecs.BASE_ID, "base.ckptz", 1) if bases is not None else None
    job = WriteJob(tensors=tensors, base=ref, bases=bases or {})
    # A job names one of three efforts, so any other effort is patched in.
    with (
        prepared(job) as ready,
        Workers(1) as workers,
        mock.patch.object(frame_writer, "effort_of", return_value=effort),
    ):
        write_container(sink, FilePlan.of(ready), workers)
    return sink.content()


def files() -> dict[str, tuple[Tensors, Tensors | None]]:
    """Return the tensors to write, and their bases, by the name of the file."""
    fp32 = read_tensors(model_path(), "F32")
    inputs: dict[str, tuple[Tensors, Tensors | None]] = {"weights, bf16": (as_bf16(fp32), None)}
    inputs["weights, fp32"] = fp32, None
    pairs = run_pairs()
    for name in ("training 0350 to 0420", "fine-tune 000 to 015"):
        _, base, current = next(pair for pair in pairs if pair[0] == name)
        inputs[f"delta, {name}"] = read_tensors(current, "BF16"), read_tensors(base, "BF16")
    return inputs


def rows_of(
    file: str, tensors: Tensors, bases: Tensors | None, efforts: Iterable[str], rounds: int
) -> list[Row]:
    """Measure size, write and read of one file with each effort."""
    outputs, cases, raw = codecs.outputs_for(tensors), dict[str, Callable[[], float]](), n_bytes(tensors)
    chosen = {name: EFFORTS[name] for name in efforts}
    encoded = {name: memoryview(bytearray(written(tensors, bases, e))) for name, e in chosen.items()}

    def write(effort: Effort) -> float:
        return cpu_seconds(lambda: written(tensors, bases, effort))[1]

    def read(data: memoryview) -> float:
        return cpu_seconds(lambda: codecs.read_file(data, outputs, bases))[1]

    for name, effort in chosen.items():
        cases[f"{name} write"] = partial(write, effort)
        cases[f"{name} read"] = partial(read, encoded[name])
    timings = interleave(cases, rounds)
    assert codecs.equal(tensors, outputs)
    best = {name: timing.best for name, timing in timings.items()}
    return [
        {
            "file": file,
            "effort": name,
            "of raw": f"{len(encoded[name]) / raw:.4f}",
            "of default": f"{len(encoded[name]) / len(encoded['default']):.4f}",
            "write, CPU of default": f"{best[f'{name} write'] / best['default write']:.2f}",
            "read, CPU of default": f"{best[f'{name} read'] / best['default read']:.2f}",
            "write, MB/CPU s": f"{raw / best[f'{name} write'] / 1e6:.0f}",
            "read, MB/CPU s": f"{raw / best[f'{name} read'] / 1e6:.0f}",
        }
        for name in chosen
    ]


def held_out_files() -> dict[str, tuple[Tensors, Tensors | None]]:
    """Read two training states of the demo (fp32 weights and both moments of Adam), and cast them to bf16."""
    states = [read_tensors(DEMO / f"step-{step:04d}.safetensors", "F32") for step in (200, 240)]
    narrow = [as_bf16(state) for state in states]
    return {
        "state, fp32": (states[1], None),
        "state, bf16": (narrow[1], None),
        "delta of states, fp32": (states[1], states[0]),
        "delta of states, bf16": (narrow[1], narrow[0]),
    }


def file_rows(
    name: str, inputs: Mapping[str, tuple[Tensors, Tensors | None]], efforts: Iterable[str], rounds: int
) -> None:
    """Measure all files with each effort, and write the table."""
    rows = [
        row
        for file, (tensors, bases) in inputs.items()
        for row in rows_of(file, tensors, bases, efforts, rounds)
    ]
    save_rows(name, rows)


# --- coders -------------------------------------------------------------------------------------


def exponents() -> list[NDArray[np.uint8]]:
    """Return the first eight chunks of exponents of the bf16 weights."""
    flat = concatenated(as_bf16(read_tensors(model_path(), "F32")))
    codes = (flat >> np.uint16(7)).astype(np.uint8)
    return [codes[i : i + CHUNK_VALUES] for i in range(0, len(codes) - CHUNK_VALUES, CHUNK_VALUES)][:8]


def coder_rows(rounds: int) -> None:
    """Measure nanoseconds and bits per code of both entropy coders, with tables fitted to each stream."""
    compiled()
    chunks = exponents()
    counts = np.array([compiled().histogram(chunk) for chunk in chunks])
    segments = [
        Segments(s.ends, s.table_of, s.tables, slot_tables(s.tables))
        for s in (
            Segments(np.array([CHUNK_VALUES]), np.array([0]), table[None]) for table in normalise(counts)
        )
    ]
    out = np.empty(CHUNK_VALUES, np.uint8)

    lengths = cpu().huffman_lengths(counts)
    packed, n_bytes = [pack_lengths(row) for row in lengths], (counts * lengths).sum(axis=1) // 8 + 4

    def huffman(k: int) -> Any:
        stream = slice(k, k + 1)
        return encode_huffman_streams(
            chunks[k], np.array([CHUNK_VALUES]), lengths[stream], n_bytes[stream], packed[stream]
        )[0]

    def rans(k: int) -> Any:
        return encode_rans(chunks[k], segments[k], CHUNK_VALUES)

    streams = {
        name: [memoryview(bytearray(encode(k))) for k in range(len(chunks))]
        for name, encode in (("rANS, 32 lanes", rans), ("Huffman", huffman))
    }
    coders: dict[str, Callable[[int], object]] = {
        "rANS, 32 lanes encode": rans,
        "rANS, 32 lanes decode": lambda k: decode_rans(
            ByteReader(streams["rANS, 32 lanes"][k]), segments[k], out
        ),
        "Huffman encode": huffman,
        "Huffman decode": lambda k: decode_stream(CoderId.HUFFMAN, streams["Huffman"][k], out),
        "histogram encode": lambda k: compiled().histogram(chunks[k]),
    }
    cases = {
        name: (lambda f=f: cpu_seconds(lambda: [f(k) for k in range(len(chunks))])[1])
        for name, f in coders.items()
    }
    timings, n = interleave(cases, rounds), len(chunks) * CHUNK_VALUES
    rows: list[Row] = [
        {
            "coder": name,
            "encode, ns a code": f"{timings[f'{name} encode'].best / n * 1e9:.2f}",
            "decode": f"{timings[f'{name} decode'].best / n * 1e9:.2f}" if name in streams else None,
            "bits a code": f"{8 * sum(map(len, streams[name])) / n:.3f}" if name in streams else None,
        }
        for name in (*streams, "histogram")
    ]
    rows.append({"coder": "entropy", "bits a code": f"{entropy_bits(counts) / n:.3f}"})
    for bits in BLOCKS:
        block_counts = np.concatenate(
            [[np.bincount(p, minlength=256) for p in chunk.reshape(-1, 1 << bits)] for chunk in chunks]
        )
        lengths = cpu().huffman_lengths(block_counts)
        n_bits = (block_counts * lengths).sum() + 8 * sum(len(pack_lengths(row)) + 12 for row in lengths)
        rows.append({"coder": f"Huffman, a table each 2^{bits} codes", "bits a code": f"{n_bits / n:.3f}"})
    save_rows("effort_coders", rows)


def main() -> None:
    """Run the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds (default 7)")
    parser.add_argument("--only", choices=("files", "coders", "held-out"), help="one part")
    options = parser.parse_args()
    if options.only in (None, "coders"):
        coder_rows(options.rounds)
    if options.only in (None, "files"):
        file_rows("effort", files(), EFFORTS, options.rounds)
    if options.only in (None, "held-out"):
        file_rows("effort_held_out", held_out_files(), ("small", "default", "fast"), options.rounds)
    finish("effort" if options.only != "held-out" else "effort_held_out", machine())


if __name__ == "__main__":
    main()
