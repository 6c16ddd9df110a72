"""Whole files that a reader must refuse, by the id of the refusal; see `spec_cases`."""

import json
import zlib
from collections.abc import Callable
from typing import Any

from ckptz.format.bits import xxh64
from tests.support.spec_cases import ONE, ZEROS, coded, delta, empty, low_rank, over, quantized, terms
from tests.support.spec_files import (
    ABSENT,
    HUFFMAN,
    STORED,
    File,
    Folder,
    Frame,
    Input,
    Raw,
    plain_file,
    plan,
)


def cut(n_bytes: int) -> Input:
    return Raw(File().bytes()[:n_bytes])


def index_text(text: bytes) -> Input:
    return File(packed=b"\0" + text)


def edited(change: Callable[[str], str]) -> bytes:
    """The index as text, changed."""
    return change(File().packed_index()[1:].decode()).encode()


def packed_text() -> bytes:
    """The index as a zlib stream of one stored block, so that no library's choices are in it."""
    text = File().packed_index()[1:]
    sizes = len(text).to_bytes(2, "little") + (len(text) ^ 0xFFFF).to_bytes(2, "little")
    return b"\x78\x01\x01" + sizes + text + zlib.adler32(text).to_bytes(4, "big")


def sharded(*files: str, tensors: tuple[str, ...] = ("w",), **fields: Any) -> File:
    """A file with a record of shards of these names, the first with these tensors."""
    shards = [{"file": file, "tensors": [] if i else list(tensors)} for i, file in enumerate(files)]
    return File(index={"sharding": {"shards": shards, **fields}})


def swapped() -> File:
    """A frame behind the index."""
    data = File().packed_index()
    n, m = len(Frame().bytes), len(data)
    places = {"w": (m, m + n), "__ckptz__.index": (0, m)}
    return File(
        header={k: {"dtype": "U8", "shape": [e - b], "data_offsets": [b, e]} for k, (b, e) in places.items()}
    )


def full(shape: tuple[int, ...] = (4,)) -> Frame:
    """Zeros, as an anchor holds them."""
    made = plan(dtype="F32", shape=shape)
    return Frame(made, [(STORED, bytes(4))] * 4, bytes(16), "F32", shape)


def inlined(*bases: dict[str, Frame], own: Frame | None = None, **fields: Any) -> File:
    """A delta with its bases within, by default one that holds what it needs."""
    features = fields.pop("features", "inline,lossless")
    bases = bases or ({"w": full()},)
    return File({"w": delta() if own is None else own}, inline=bases, features=features, **fields)


def inline_index(change: Callable[[list[Any]], object]) -> Input:
    """A file of which the index lists other inline bases than it has."""
    bases = json.loads(inlined().packed_index()[1:])["inline"]
    changed = change(bases)
    return inlined(index={"inline": bases if changed is None else changed})


def misplaced() -> File:
    """An optional section before a frame."""
    made = File({"__ckptz__.optional.a": Frame(), "w": Frame()})
    made.index = {"tensors": made.entries()[1:], "content_id": File().content_id()}
    return made


LOSSY = {
    **{"method": "kmeans", "role": "weight", "layer_type": "linear", "settings": {"levels": 4, "prune": 0.5}},
    **{"n_pruned": 1, "n_protected": 2, "max_abs_error": 0.5, "rms_error": 0.25, "rms": 1.0},
    "promise": "none",
}
BIN, PLACES, MAP = "a.bin", "a.bin.index.json", '{"weight_map":{"w":"a.bin"}}'
PLAIN_ROW = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}

CONTAINER: dict[str, list[Input]] = {
    "C1": [cut(0), cut(7), cut(100), cut(len(File().bytes()) - 1)],
    "C2": [Raw((100_000_001).to_bytes(8, "little") + bytes(100)), File(before=b" "), File(text=b"[]")],
    "C3": [
        File(text=b"{"),
        File(text=b'{"w":1,"w":1}'),
        index_text(edited(lambda t: t.replace('"writer"', '"writer":"x","writer"'))),
        index_text(edited(lambda t: t.replace("[4]", "[NaN]"))),
        index_text(edited(lambda t: t.replace("[4]", "[1e999]"))),
        index_text(edited(lambda t: t.replace("by hand", "," * (1 << 22)))),
        index_text(edited(lambda t: t.replace("[4]", "[4.0]"))),
        index_text(edited(lambda t: t.replace("by hand", "\\ud800"))),
        index_text(edited(lambda t: t.replace("[4]", "[1" + "0" * 400 + "]"))),
        File(index={"tree": {"root": 10**309, "storages": []}}),
        index_text(b"\xef\xbb\xbf" + edited(str)),
        index_text(edited(str).decode().encode("utf-16")),
        index_text(edited(str).replace(b"by hand", b"\xff")),
    ],
    "C4": [
        File(region={"extra": 1}),
        File(region={"shape": [1]}),
        File(region={"shape": [1.0]}),
        File(region={"data_offsets": [0]}),
        File(header={"__metadata__": {"a": 1}}),
    ],
    "C5": [
        File(behind=b"\0"),
        Raw(plain_file({"a": {**PLAIN_ROW, "data_offsets": [1, 2]}}, b"ab")),
        Raw(plain_file({"a": PLAIN_ROW, "b": PLAIN_ROW}, b"a")),
        Raw(plain_file({"a": PLAIN_ROW, "b": {**PLAIN_ROW, "data_offsets": [2, 3]}}, b"abc")),
    ],
    "C6": [File(region={"dtype": "U9"}), File(entry={"dtype": "Q7"})],
    "C7": [
        *(File(metadata={"ckptz.version": v}) for v in ("0.1", "2.0", "10.0", "", ABSENT)),
        *(File(metadata={"ckptz.version": v}) for v in ("1", "1.", "1.0.0", "01.0", "1.00")),
        File(metadata={"ckptz.version": "2.0", "ckptz.more": "1"}),
    ],
    "C8": [
        *(File(features=names) for names in ("lossless,warp", "", "lossless,", "lossless, delta")),
        # what comes with a feature is not looked at by who does not know the feature
        File(features="lossless,warp", metadata={"ckptz.more": "1"}),
        File(features="lossless,warp", index={"warp": 1}),
        File({"w": Frame(plan(version=2))}, features="lossless,warp"),
        File(features="lossless,x-mine"),
    ],
    "C9": [
        File(metadata={"ckptz.more": "1"}),
        File(metadata={"ckptz.required_features": ABSENT}),
        *(File(features=names) for names in ("delta", "lossless,delta", "lossless,lossless")),
    ],
    "C10": [
        swapped(),
        File(region={"dtype": "I8"}),
        File(region={"shape": [1, len(Frame().bytes)]}),
        File(index_region={"dtype": "I8"}),
    ],
    "C11": [File(metadata={"ckptz.index_sha256": "0" * 64})],
    "C12": [
        File(packed=b"\2" + edited(str)),
        File(packed=b""),
        File(packed=b"\1" + edited(str)),
        File(packed=b"\1" + packed_text()[:-1]),
        File(packed=b"\1" + packed_text() + b"\0"),
        File(packed=b"\1" + zlib.compress(b" " * ((64 << 20) + 1))),
    ],
    "C13": [
        *(File(index={field: ABSENT}) for field in ("writer", "content_id", "tensors")),
        *(
            File(index=change)
            for change in ({"more": 1}, {"writer": 1}, {"step": "1"}, {"metadata": {"a": 1}})
        ),
        *(File(index={"base": {"content_id": "", "file": "a", "depth": d}}) for d in (-1, "1")),
        *(File(entry={"shape": shape}) for shape in ([-4], [1 << 64, 0], [1] * 65, [True])),
        *(File(entry={field: ABSENT}) for field in ("name", "dtype", "shape", "offset", "checksum")),
        File(entry={"lossy": {"method": "kmeans"}}),
        File(entry={"checksum": "0123456789ABCDEF"}),
        File(entry={"checksum": "0"}),
        File(entry={"lossy": {**LOSSY, "promise": 1}}),
        File(entry={"lossy": {**LOSSY, "rms": -1.0}}),
        File(index={"tree": []}),
        File(index={"quality": None}),
        *(File(index={"step": step}) for step in (-1, 1 << 63)),
        inline_index(lambda bases: []),
        inline_index(lambda bases: bases * 65),
        inline_index(lambda bases: {}),
        inline_index(lambda bases: bases[0].update(tensors=[])),
        inline_index(lambda bases: bases[0].update(depth=0)),
        *(
            inline_index(lambda bases, f=f: [{k: v for k, v in bases[0].items() if k != f}])
            for f in ("tensors", "content_id", "file")
        ),
        inlined(inline_entry={"checksum": "0"}),
    ],
    "C14": [
        *(File(entry=change) for change in ({"name": "v"}, {"offset": 1}, {"n_bytes": 1})),
        *(inlined(inline_entry=change) for change in ({"offset": 0}, {"offset": 1}, {"n_bytes": 1})),
        inline_index(lambda bases: bases * 2),
        inline_index(lambda bases: bases[0].update(tensors=bases[0]["tensors"] * 2)),
        Raw(inlined().bytes().replace(b"inline.1.0", b"inline.0.0")),
        Raw(inlined().bytes().replace(b"inline.1.0", b"inline.1.1")),
        File(inline=[{"w": full()}], features="inline,lossless", index={"inline": None}),
        Raw(File(optional={"a": b"1"}).bytes().replace(b"__ckptz__.optional.a", b"__ckptz__.optionaL.a")),
        misplaced(),
    ],
    "C15": [
        inlined(inline_entry={"dtype": "I32"}),
        inlined(inline_entry={"shape": [2, 2]}),
        inlined(inline_entry={"checksum": "0" * 16}),
        File(entry={"dtype": "I8"}),
        File(entry={"shape": [2, 2]}),
        File(entry={"checksum": "0" * 16}),
        File({"w": Frame(behind=b"\0")}),
    ],
    "C16": [File(index={"content_id": "0" * 64})],
    "C17": [
        Raw(plain_file({"__ckptz__.w": PLAIN_ROW}, b"a")),
        File({"__ckptz__.w": Frame()}),
        inlined({"__ckptz__.w": full()}),
    ],
    "C18": [File(index={"base": {"content_id": "", "file": "a", "depth": 1}})],
    "C19": [
        File({"w": delta()}),
        File({"w": empty(predictor=1, mode=2)}),
        *(
            inlined(base)
            for base in ({"v": full()}, {"w": full((2, 2))}, {"w": Frame()}, {"w": delta(), "v": full()})
        ),
        inlined({"w": delta()}, {"v": full()}),
    ],
    "C20": [
        File({"w": quantized()}),
        inlined({"w": quantized()}),
        File({"w": low_rank(terms(ONE, codes=bytes((1,) * 5)))}, features="lossless,maps"),
        File({"w": coded(HUFFMAN, ZEROS)}),
    ],
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
    "C22": [inlined(features="lossless"), inlined(features="delta,lossless")],
    "C23": [
        inlined(features="delta,inline,lossless", index={"base": {"content_id": "", "file": "a", "depth": 1}})
    ],
    "C24": [inlined({"w": full(), "v": full()}, inline_entry={"name": "w"})],
}


# --- chains -------------------------------------------------------------------------------------


ANCHOR = File({"w": full()})
DEEP_ANCHOR = File(  # a chain of its own, as deep as the delta says that it is
    {"w": full()},
    features="delta,lossless",
    index={"base": {"content_id": "0" * 64, "file": "x.ckptz", "depth": 1}},
)
INLINE_ANCHOR = inlined(own=delta(bytes(16)))


def chain(anchor: File = ANCHOR, depth: int = 1, file: str = "anchor.ckptz", **ref: Any) -> Folder:
    """An anchor and a delta."""
    base = {"content_id": anchor.content_id(), "file": file, "depth": depth, **ref}
    made = File({"w": delta()}, features="delta,lossless", index={"base": base})
    return Folder({"delta.ckptz": made.bytes(), "anchor.ckptz": anchor.bytes()})


PT = {"format": "pt"}
PLAIN_ROWS = {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}


def text_field(text: str) -> bytes:
    return len(text.encode()).to_bytes(8, "little") + text.encode()


def metadata_section(metadata: dict[str, str] | None) -> bytes:
    """spec/07-chain.md#metadata-of-a-plain-base."""
    pairs = sorted((metadata or {}).items(), key=lambda pair: pair[0].encode())
    data = b"".join(text_field(text) for pair in pairs for text in pair)
    checksum = xxh64(bytes((metadata is not None,)) + data).to_bytes(8, "little")
    return checksum + xxh64(checksum).to_bytes(8, "little")


MADE = metadata_section(PT)


def of_plain(section: bytes, **rows: Any) -> Folder:
    """A delta of a plain file with the section `base-metadata`."""
    base = {"content_id": File({"w": full()}).content_id(), "file": "base.safetensors", "depth": 1}
    made = File(
        {"w": delta()}, features="delta,lossless", index={"base": base}, optional={"base-metadata": section}
    )
    plain = plain_file({"__metadata__": PT, **rows, **PLAIN_ROWS}, bytes(16))
    return Folder({"delta.ckptz": made.bytes(), "base.safetensors": plain})


CHAIN: dict[str, list[Input]] = {
    "H1": [chain(depth=0), chain(depth=65)],
    "H2": [
        chain(file=n)
        for n in (
            *("", ".", "..", "a/b", "../anchor.ckptz", "/anchor.ckptz", "anchor.ckptz/"),
            *("a\n", "a\0", "a\x7f", "a" * 256, "é" * 128),
        )
    ],
    "H3": [chain(content_id="0" * 64), chain(DEEP_ANCHOR, depth=1), chain(INLINE_ANCHOR, depth=1)],
    "H4": [
        over(Frame(), empty(predictor=1, mode=2)),
        chain(File({"v": full()})),
        chain(File({"w": full((2, 2))})),
        chain(File({"w": Frame()})),
    ],
    "H5": [of_plain(metadata) for metadata in (MADE[:15], MADE + b"\0", MADE[:8] + bytes(8))],
    "H6": [of_plain(MADE, __metadata__=found) for found in (None, {}, {"format": "pu"}, {**PT, "a": "b"})],
}
