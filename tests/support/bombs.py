"""Decompression bombs: small valid files that decode to very much data."""

import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Final

from ckptz.format.bits import xxh64
from ckptz.format.sources import CHUNK_VALUES
from tests.support.spec_files import CONSTANT, SHARED, File, Frame, embedded, plan, varint

ONE: Final = (0x3F800000).to_bytes(4, "little")
MAX_OUTER: Final = 1 << 24
MAX_DEPTH: Final = 64


def constant_vector(pattern: bytes) -> bytes:
    """Encode an outer vector of any length, all of whose values are one F32 pattern."""
    return b"".join(embedded(pattern[j : j + 1], CONSTANT) for j in range(4))


def explicit_map(*entries: bytes) -> bytes:
    """Encode a quantization map of one row."""
    return b"\0" + varint(1) + varint(len(entries)) + b"".join(entries)


def flat_table(n_contexts: int) -> bytes:
    """Encode one frequency table of one symbol that all contexts share."""
    return b"\1" + b"\0\0\0" + varint(n_contexts) + b"\0"


def _file(frames: Mapping[str, Frame], features: str = "lossless,maps", **fields: object) -> bytes:
    """Return the bytes of a file with a deflated index."""
    file = File(frames, features=features, **fields)
    text = file.packed_index()[1:]
    return File(frames, features=features, packed=b"\1" + zlib.compress(text, 9), **fields).bytes()


def outer_vectors() -> bytes:
    """Build two hundred empty tensors with outer vectors of 64 MiB each."""
    vectors = b"".join(embedded(b"") for _ in range(4)) + constant_vector(ONE)
    body, shape = explicit_map(ONE) + vectors, (0, MAX_OUTER)
    encoded_plan = plan(dtype="F32", domain=1, predictor=2, shape=shape, tail=body)
    frame = Frame(encoded_plan, (), b"", "F32", shape, n_chunks=0)
    return _file({f"t{i:05d}": frame for i in range(200)})


def outer_vectors_of_rows() -> bytes:
    """Build tensors of one column, with 32 MiB of outer vectors to 32 MiB of values."""
    n = 1 << 23
    body = explicit_map(bytes(4)) + constant_vector(ONE) * 2
    encoded_plan = plan(dtype="F32", domain=1, predictor=2, shape=(n, 1), tail=body)
    frame = Frame(
        encoded_plan, [(CONSTANT, b"\0")], ONE * CHUNK_VALUES, "F32", (n, 1), n_chunks=n // CHUNK_VALUES
    )
    return _file({f"t{i:05d}": frame for i in range(2)})


def term_codes() -> bytes:
    """Build tensors with 64 low-rank terms: a few bytes decode to 16 MiB of codes and 128 MiB of vectors."""
    n = (1 << 24) // 64 - 4
    body = explicit_map(bytes(4)) + varint(64) + ONE * 64 + embedded(b"\1", CONSTANT)
    encoded_plan = plan(dtype="F32", domain=1, predictor=4, shape=(n, 4), tail=body)
    decoded = struct.pack("<f", 64.0) * CHUNK_VALUES
    frame = Frame(encoded_plan, [(CONSTANT, b"\0")], decoded[: 16 * n], "F32", (n, 4))
    version = {"ckptz.version": "1.1"}
    return _file({f"t{i:05d}": frame for i in range(20)}, "lossless,low-rank,maps", metadata=version)


def expanded_maps() -> bytes:
    """Build maps of 4096 rows and 256 codes from the scales, levels and offsets in a frame's header."""
    labels = [b"\3" + varint(radix) + varint(4) + embedded(b"\0", CONSTANT) for radix in (256, 16)]
    body = b"\1" + varint(4096) + varint(256) + struct.pack("<d", 1.0) * (2 * 4096 + 256)
    body += varint(4096) + b"\0" + flat_table(4096)
    encoded_plan = plan(dtype="F32", domain=1, shape=(4,), rules=labels, tail=body)
    frame = Frame(encoded_plan, [(CONSTANT, b"\0")], struct.pack("<f", 2.0) * 4, "F32", (4,))
    return _file({f"t{i:05d}": frame for i in range(400)})


def labels() -> bytes:
    """Build tensors of 2^24 one-byte patterns with a context label for each pattern."""
    rule = b"\3" + varint(1) + varint(1) + embedded(b"\0", CONSTANT)
    n = 1 << 24
    encoded_plan = plan(shape=(n,), rules=[rule], tail=flat_table(1))
    chunk = bytes(CHUNK_VALUES)
    frame = Frame(encoded_plan, [(CONSTANT, b"\0")], chunk, "U8", (n,), n_chunks=n // CHUNK_VALUES)
    return _file({f"t{i:05d}": frame for i in range(8)})


def product_levels() -> bytes:
    """Build tensors with contexts by 64 products: a few bytes decode to 16 MiB of levels."""
    n = (1 << 24) // 64 - 4
    rule = b"\6\0" + varint(64) + embedded(b"\1", CONSTANT)
    encoded_plan = plan(shape=(n, 4), rules=[rule], tail=flat_table(256))
    frame = Frame(encoded_plan, [(SHARED, b"\0\0\0\1\0")], bytes(4 * n), "U8", (n, 4))
    version = {"ckptz.version": "1.3"}
    return _file({f"t{i:05d}": frame for i in range(8)}, "lossless,products", metadata=version)


def metadata_keys() -> bytes:
    """Build a file with four million keys of metadata."""
    return _file({"w": Frame()}, "lossless", index={"metadata": {f"{i:07x}": "" for i in range(4_000_000)}})


def constant_chunks() -> bytes:
    """Build a tensor of four gigabytes of zeros."""
    shape, stream = (1 << 12, CHUNK_VALUES), (CONSTANT, b"\0")
    frame = Frame(plan(shape=shape), [stream], bytes(CHUNK_VALUES), "U8", shape, n_chunks=1 << 12)
    return _file({"w": frame}, "lossless")


def base_codes() -> bytes:
    """Build a chain of 64 files, each with contexts by the codes of its base and by another tensor."""
    shape, zeros = (CHUNK_VALUES,), bytes(4 * CHUNK_VALUES)
    rules = [b"\1" + varint(1) + b"b", b"\4" + varint(1)]
    grouped = plan(
        dtype="F32",
        domain=1,
        predictor=1,
        shape=shape,
        rules=rules,
        tail=explicit_map(bytes(4)) + flat_table(256),
    )
    codes = xxh64(bytes(CHUNK_VALUES))
    a = Frame(grouped, [(CONSTANT, b"\0")], zeros, "F32", shape, base_codes=codes)
    b = Frame(
        plan(dtype="F32", predictor=1, mode=2, shape=shape), [(CONSTANT, b"\0")] * 4, zeros, "F32", shape
    )
    last = plan(dtype="F32", domain=1, shape=shape, tail=explicit_map(bytes(4)))
    anchor_a = Frame(last, [(CONSTANT, b"\0")], zeros, "F32", shape)
    anchor_b = Frame(plan(dtype="F32", shape=shape), [(CONSTANT, b"\0")] * 4, zeros, "F32", shape)
    levels = [{"a": a, "b": b}] * MAX_DEPTH
    inline = [*levels[1:], {"a": anchor_a, "b": anchor_b}]
    return _file(levels[0], "inline,lossless,maps", inline=inline)


def context_tensors() -> bytes:
    """Build ten thousand tensors, each with contexts by the magnitudes of the next one."""
    n, frames = 10_000, {}
    for i in range(n):
        name = f"t{(i + 1) % n:05d}".encode()
        encoded_plan = plan(
            dtype="F16", shape=(1,), rules=[b"\1" + varint(6) + name], tail=flat_table(256) * 2
        )
        frames[f"t{i:05d}"] = Frame(encoded_plan, [(CONSTANT, b"\0")] * 2, bytes(2), "F16", (1,))
    return _file(frames)


BOMBS: Final[Mapping[str, Callable[[], bytes]]] = {
    build.__name__: build
    for build in (
        outer_vectors,
        outer_vectors_of_rows,
        term_codes,
        expanded_maps,
        labels,
        product_levels,
        metadata_keys,
        constant_chunks,
        base_codes,
        context_tensors,
    )
}
