"""Whole files that a reader must refuse, by the id of the refusal; see `spec_cases`."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spec_cases import F32, Case, delta, quantized
from spec_files import ABSENT, STORED, File, Frame, open_bytes, plain_file, plan, read_all

from ckptz.container.index import Shard, Sharding
from ckptz.convert.sharding import check_sharding
from ckptz.store.resolve import open_checkpoint

ChainCase = Callable[[Path], object]


def cut(n_bytes: int) -> Case:
    return lambda: open_bytes(File().bytes()[:n_bytes])


def index_text(text: bytes) -> Case:
    return File(packed=b"\0" + text).open


def edited(change: Callable[[str], str]) -> bytes:
    """The index as text, changed."""
    return change(File().packed_index()[1:].decode()).encode()


def packed_text() -> bytes:
    return zlib.compress(File().packed_index()[1:])


def sharded(*files: str, tensors: tuple[str, ...] = ("w",), **fields: Any) -> Case:
    """Shards of these names, the first with these tensors."""
    shards = tuple(Shard(file, () if i else tensors) for i, file in enumerate(files))
    return lambda: check_sharding(Sharding(shards, **fields), ["w"])


def swapped() -> File:
    """A frame behind the index."""
    data = File().packed_index()
    n, m = len(Frame().bytes), len(data)
    places = {"w": (m, m + n), "__ckptz__.index": (0, m)}
    return File(
        header={k: {"dtype": "U8", "shape": [e - b], "data_offsets": [b, e]} for k, (b, e) in places.items()}
    )


BIN, PLACES, MAP = "a.bin", "a.bin.index.json", '{"weight_map":{"w":"a.bin"}}'
PLAIN_ROW = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}

CONTAINER: dict[str, list[Case]] = {
    "C1": [cut(0), cut(7), cut(100), cut(len(File().bytes()) - 1)],
    "C2": [
        lambda: open_bytes((100_000_001).to_bytes(8, "little") + bytes(100)),
        File(before=b" ").open,
    ],
    "C3": [
        File(text=b"[]").open,
        File(text=b"{").open,
        File(text=b'{"w":1,"w":1}').open,
        index_text(edited(lambda t: t.replace('"writer"', '"writer":"x","writer"'))),
        index_text(edited(lambda t: t.replace("[4]", "[NaN]"))),
        index_text(edited(lambda t: t.replace("[4]", "[1e999]"))),
        index_text(edited(lambda t: t.replace("by hand", "," * (1 << 22)))),
        index_text(edited(lambda t: t.replace("[4]", "[4.0]"))),
        index_text(edited(lambda t: t.replace("by hand", "\\ud800"))),
        index_text(b"\xef\xbb\xbf" + edited(str)),
        index_text(edited(str).decode().encode("utf-16")),
        index_text(edited(str).replace(b"by hand", b"\xff")),
    ],
    "C4": [
        File(region={"extra": 1}).open,
        File(region={"shape": [1]}).open,
        File(region={"shape": [1.0]}).open,
        File(region={"data_offsets": [0]}).open,
        File(header={"__metadata__": {"a": 1}}).open,
    ],
    "C5": [
        File(behind=b"\0").open,
        lambda: open_bytes(plain_file({"a": {**PLAIN_ROW, "data_offsets": [1, 2]}}, b"ab")),
        lambda: open_bytes(plain_file({"a": PLAIN_ROW, "b": PLAIN_ROW}, b"a")),
        lambda: open_bytes(plain_file({"a": PLAIN_ROW, "b": {**PLAIN_ROW, "data_offsets": [2, 3]}}, b"abc")),
    ],
    "C6": [File(region={"dtype": "U9"}).open, File(entry={"dtype": "Q7"}).open],
    "C7": [File(metadata={"ckptz.version": v}).open for v in ("0.2", "1.0", "", ABSENT)],
    "C8": [File(features="lossless,warp").open],
    "C9": [
        File(metadata={"ckptz.more": "1"}).open,
        File(metadata={"ckptz.required_features": ABSENT}).open,
    ],
    "C10": [
        swapped().open,
        File(region={"dtype": "I8"}).open,
        File(region={"shape": [1, len(Frame().bytes)]}).open,
        File(index_region={"dtype": "I8"}).open,
    ],
    "C11": [File(metadata={"ckptz.index_sha256": "0" * 64}).open],
    "C12": [
        File(packed=b"\2" + edited(str)).open,
        File(packed=b"").open,
        File(packed=b"\1" + edited(str)).open,
        File(packed=b"\1" + packed_text()[:-1]).open,
        File(packed=b"\1" + packed_text() + b"\0").open,
        lambda: File(packed=b"\1" + zlib.compress(b" " * ((64 << 20) + 1))).open(),
    ],
    "C13": [
        *(File(index={field: ABSENT}).open for field in ("writer", "content_id", "tensors")),
        *(
            File(index=change).open
            for change in ({"more": 1}, {"writer": 1}, {"step": "1"}, {"metadata": {"a": 1}})
        ),
        *(File(index={"base": {"content_id": "", "file": "a", "depth": d}}).open for d in (-1, "1")),
        *(File(entry={"shape": shape}).open for shape in ([-4], [1 << 64, 0], [1] * 65, [True])),
        *(File(entry={field: ABSENT}).open for field in ("name", "dtype", "shape", "offset", "checksum")),
        File(entry={"lossy": {"method": "kmeans"}}).open,
        File(entry={"checksum": "0123456789ABCDEF"}).open,
        File(entry={"checksum": "0"}).open,
        *(File(index={"step": step}).open for step in (-1, 1 << 63)),
    ],
    "C14": [File(entry=change).open for change in ({"name": "v"}, {"offset": 1}, {"n_bytes": 1})],
    "C15": [
        File(entry={"dtype": "I8"}).read,
        File(entry={"shape": [2, 2]}).read,
        File(entry={"checksum": "0" * 16}).read,
        File({"w": Frame(behind=b"\0")}).read,
    ],
    "C16": [File(index={"content_id": "0" * 64}).open],
    "C17": [
        lambda: open_bytes(plain_file({"__ckptz__.w": PLAIN_ROW}, b"a")),
        File({"__ckptz__.w": Frame()}).open,
    ],
    "C18": [File(index={"base": {"content_id": "", "file": "a", "depth": 1}}).open],
    "C19": [File({"w": delta()}).read],
    "C20": [File({"w": quantized()}).read],
    "C21": [
        *(
            sharded(f"{file}.bin")
            for file in ("", ".", ".a", "a/b", "a\\b", "c:", "a\n", "a\x7f", "é" * 126, "../a", "/a")
        ),
        *(sharded(file) for file in ("", "a", "a.sh", "a.bin.sh", "a.BIN", "..", "a.pickle")),
        sharded(BIN, BIN),
        sharded(BIN, tensors=()),
        sharded(BIN, tensors=("w", "w")),
        sharded(BIN, tensors=("w", "v")),
        sharded(BIN, index_file=PLACES),
        sharded(BIN, index_text=MAP),
        sharded(BIN, index_file=BIN, index_text=MAP),
        *(
            sharded(BIN, index_file=file, index_text=MAP)
            for file in ("a.json", ".bin.index.json", "a.index.json", f"{PLACES}.sh", f"a/{PLACES}")
        ),
        *(
            sharded(BIN, index_file=PLACES, index_text=text)
            for text in (
                *("", "#!/bin/sh", "[]", "{}", '{"weight_map":{}}', '{"weight_map":[]}', MAP + MAP),
                *(MAP.replace(BIN, file) for file in ("b.bin", "../a.bin", "")),
                MAP.replace("}", f',"w":"{BIN}"}}', 1),
            )
        ),
        *(
            sharded(BIN, carried=(path,))
            for path in (
                *("/b", "../b", "b//c", "b/..", "/".join("b" * 33), BIN),
                *(".b", "b/.c", ".b/c", " ", " ."),
            )
        ),
    ],
}


# --- chains -------------------------------------------------------------------------------------


def full(shape: tuple[int, ...] = (4,)) -> Frame:
    """Zeros, as an anchor holds them."""
    made = plan(dtype="F32", shape=shape)
    return Frame(made, [(STORED, bytes(4))] * 4, bytes(16), "F32", shape)


ANCHOR = File({"w": full()})
DEEP_ANCHOR = File(  # a chain of its own, as deep as the delta says that it is
    {"w": full()},
    features="delta,lossless",
    index={"base": {"content_id": "0" * 64, "file": "x.ckptz", "depth": 1}},
)


def chain(
    folder: Path, anchor: File = ANCHOR, depth: int = 1, file: str = "anchor.ckptz", **ref: Any
) -> None:
    """Write an anchor and a delta, and read the delta."""
    folder.joinpath("anchor.ckptz").write_bytes(anchor.bytes())
    base = {"content_id": anchor.content_id(), "file": file, "depth": depth, **ref}
    made = File({"w": delta()}, features="delta,lossless", index={"base": base})
    folder.joinpath("delta.ckptz").write_bytes(made.bytes())
    checkpoint = open_checkpoint(folder / "delta.ckptz")
    try:
        assert read_all(checkpoint) == {"w": F32}
    finally:
        checkpoint.close()


CHAIN: dict[str, list[ChainCase]] = {
    "H1": [lambda f: chain(f, depth=0), lambda f: chain(f, depth=65)],
    "H2": [
        lambda f, n=n: chain(f, file=n)
        for n in (
            *("", ".", "..", "a/b", "../anchor.ckptz", "/anchor.ckptz", "anchor.ckptz/"),
            *("a\n", "a\0", "a\x7f", "a" * 256, "é" * 128),
        )
    ],
    "H3": [
        lambda f: chain(f, content_id="0" * 64),
        lambda f: chain(f, DEEP_ANCHOR, depth=1),
    ],
    "H4": [
        lambda f: chain(f, File({"v": full()})),
        lambda f: chain(f, File({"w": full((2, 2))})),
        lambda f: chain(f, File({"w": Frame()})),
    ],
}
