"""Files that a reader must refuse for other reasons than a frame, by the id of the refusal."""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptz.format.bits import xxh64
from ckptz.format.index import content_id
from tests.support.spec_cases import (
    ONE,
    ZEROS,
    coded,
    delta,
    empty,
    exact,
    in_contexts,
    low_rank,
    magnitude_rule,
    over,
    products_rule,
    quantized,
    tables,
    terms,
)
from tests.support.spec_files import (
    ABSENT,
    HUFFMAN,
    File,
    Folder,
    Frame,
    Input,
    Members,
    Raw,
    plain_file,
    plan,
)


def cut(n_bytes: int) -> Input:
    return Raw(File().bytes()[:n_bytes])


def index_text(text: bytes) -> Input:
    return File(packed=b"\0" + text)


def edited(change: Callable[[str], str]) -> bytes:
    """Return the index of a file as changed text."""
    return change(File().packed_index()[1:].decode()).encode()


def packed_text() -> bytes:
    """Return the index as a zlib stream of one stored block, which is the same with every zlib."""
    text = File().packed_index()[1:]
    sizes = len(text).to_bytes(2, "little") + (len(text) ^ 0xFFFF).to_bytes(2, "little")
    return b"\x78\x01\x01" + sizes + text + zlib.adler32(text).to_bytes(4, "big")


def sharded(*files: str, tensors: tuple[str, ...] = ("w",), **fields: Any) -> File:
    """Build a file with a record of shards; the first shard has the tensors."""
    shards = [{"file": file, "tensors": [] if i else list(tensors)} for i, file in enumerate(files)]
    return File(index={"sharding": {"shards": shards, **fields}})


def swapped() -> File:
    """Build a file with a frame after the index."""
    data = File().packed_index()
    n, m = len(Frame().bytes), len(data)
    offsets = {"w": (m, m + n), "__ckptz__.index": (0, m)}
    return File(
        header={k: {"dtype": "U8", "shape": [e - b], "data_offsets": [b, e]} for k, (b, e) in offsets.items()}
    )


def full(shape: tuple[int, ...] = (4,)) -> Frame:
    """Build a frame of zeros, as in an anchor."""
    return exact("F32", bytes(16), shape)


def inlined(*bases: dict[str, Frame], top: Frame | None = None, **fields: Any) -> File:
    """Build a delta with inline bases, by default with the one that it needs."""
    features = fields.pop("features", "inline,lossless")
    bases = bases or ({"w": full()},)
    return File({"w": delta() if top is None else top}, inline=bases, features=features, **fields)


def inline_index(change: Callable[[list[Any]], object]) -> Input:
    """Build a file whose index lists other inline bases than the file has."""
    bases = json.loads(inlined().packed_index()[1:])["inline"]
    changed = change(bases)
    return inlined(index={"inline": bases if changed is None else changed})


def misplaced() -> File:
    """Build a file with an optional section before a frame."""
    result = File({"__ckptz__.optional.a": Frame(), "w": Frame()})
    result.index = {"tensors": result.entries()[1:], "content_id": File().content_id()}
    return result


PAIR: Members = {"a": ((3,), b"\1\2\3"), "b": ((), b"\4")}
GROUP = "__ckptz__.group.0"


def grouped(
    frame: Frame | None = None,
    members: Members = PAIR,
    frames_after: Mapping[str, Frame] | None = None,
    features: str = "groups,lossless",
    **fields: Any,
) -> File:
    """Build a file with a group, by default of two tensors of bytes."""
    frames = {GROUP: Frame() if frame is None else frame, **(frames_after or {})}
    version = {"ckptz.version": "1.2"}
    return File(frames, groups={GROUP: members}, features=features, metadata=version, **fields)


def floats(frame: Frame | None = None, members: Sequence[str] = "ab") -> File:
    """Build a group of two tensors of F32, by default of zeros."""
    frame = full() if frame is None else frame
    first, second = members
    return grouped(frame, {first: ((3,), frame.decoded[:12]), second: ((), frame.decoded[12:])})


def two_groups() -> File:
    """Build a file with a group of bytes, and a group of F32 whose first tensor is listed between theirs."""
    frames = {GROUP: Frame(), "__ckptz__.group.1": full()}
    groups = {GROUP: PAIR, "__ckptz__.group.1": {"c": ((1, 2), bytes(8)), "d": ((2,), bytes(8))}}
    version = {"ckptz.version": "1.2"}
    return File(frames, groups=groups, order="acbd", features="groups,lossless", metadata=version)


def group_entries(change: Callable[[list[Any]], object], file: File | None = None) -> Input:
    """Build a file with a group whose entries are changed."""
    file = grouped(frames_after={"w": Frame()}) if file is None else file
    entries = file.entries()
    change(entries)
    rows = ((e["name"], e["dtype"], tuple(e["shape"]), int(e["checksum"], 16)) for e in entries)
    return replace(file, index={"tensors": entries, "content_id": content_id(rows)})


def delta_group(base: File, group: File | None = None) -> Folder:
    """Build a delta with a group, and its base."""
    reference = {"content_id": base.content_id(), "file": "anchor.ckptz", "depth": 1}
    delta_file = replace(floats(delta()) if group is None else group, features="delta,groups,lossless")
    delta_file = replace(delta_file, index={"base": reference})
    return Folder({"delta.ckptz": delta_file.bytes(), "anchor.ckptz": base.bytes()})


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
        Raw(grouped().bytes().replace(b"group.0", b"group.1")),
        Raw(grouped().bytes().replace(b"group.0", b"group.a")),
        Raw(two_groups().bytes().replace(b"group.0", b"group.2")),
    ],
    "C15": [
        inlined(inline_entry={"dtype": "I32"}),
        inlined(inline_entry={"shape": [2, 2]}),
        inlined(inline_entry={"checksum": "0" * 16}),
        File(entry={"dtype": "I8"}),
        File(entry={"shape": [2, 2]}),
        File(entry={"checksum": "0" * 16}),
        File({"w": Frame(behind=b"\0")}),
        grouped(members={**PAIR, "c": ((), b"\5")}),
        grouped(Frame(plan(shape=(2, 2)))),
        grouped(Frame(plan(dtype="I8"))),
    ],
    "C16": [File(index={"content_id": "0" * 64})],
    "C17": [
        Raw(plain_file({"__ckptz__.w": PLAIN_ROW}, b"a")),
        File({"__ckptz__.w": Frame()}),
        inlined({"__ckptz__.w": full()}),
        group_entries(lambda entries: entries[0].update(name="__metadata__")),
        inlined(inline_entry={"name": "__metadata__"}),
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
        floats(delta()),
    ],
    "C20": [
        File({"w": quantized()}),
        inlined({"w": quantized()}),
        File({"w": low_rank(terms(ONE, codes=bytes((1,) * 5)))}, features="lossless,maps"),
        File({"w": coded(HUFFMAN, ZEROS)}),
        grouped(coded(HUFFMAN, ZEROS)),
        File({"w": in_contexts(products_rule(0, 1, bytes(5)), n_contexts=256)}),
        grouped(in_contexts(products_rule(0, 1, bytes(5)), n_contexts=256)),
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
    "C24": [
        inlined({"w": full(), "v": full()}, inline_entry={"name": "w"}),
        *(group_entries(lambda entries, name=name: entries[1].update(name=name)) for name in "aw"),
    ],
    "C25": [
        grouped(features="lossless"),
        File(entry={"group": 0}),
        inlined(inline_entry={"group": 0}, features="groups,inline,lossless"),
    ],
    "C26": [
        group_entries(lambda entries: entries[0].update(group=1)),
        group_entries(lambda entries: entries[1].update(group=2)),
        *(
            group_entries(lambda entries, change=change: entries[1].update(change))
            for change in (
                *({"dtype": "I8"}, {"offset": 1}, {"n_bytes": 1}, {"shape": [0]}, {"lossy": LOSSY}),
                {"shape": [65_534]},
            )
        ),
    ],
    "C27": [
        grouped(quantized(), {"a": ((4,), ONE * 4)}, features="groups,lossless,maps"),
        grouped(
            Frame(plan(rules=[magnitude_rule(b"w")], tail=tables(256))),
            frames_after={"w": Frame()},
        ),
    ],
    "C28": [
        group_entries(lambda entries: entries[0].update(checksum="0" * 16)),
        group_entries(lambda entries: entries[1].update(checksum="0" * 16)),
    ],
}


# --- chains -------------------------------------------------------------------------------------


ANCHOR = File({"w": full()})
DEEP_ANCHOR = File(  # has a base itself, as the depth in the delta requires
    {"w": full()},
    features="delta,lossless",
    index={"base": {"content_id": "0" * 64, "file": "x.ckptz", "depth": 1}},
)
INLINE_ANCHOR = inlined(top=delta(bytes(16)))


def chain(anchor: File = ANCHOR, depth: int = 1, file: str = "anchor.ckptz", **ref: Any) -> Folder:
    """Build an anchor and a delta."""
    base = {"content_id": anchor.content_id(), "file": file, "depth": depth, **ref}
    delta_file = File({"w": delta()}, features="delta,lossless", index={"base": base})
    return Folder({"delta.ckptz": delta_file.bytes(), "anchor.ckptz": anchor.bytes()})


PT = {"format": "pt"}
PLAIN_ROWS = {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}


def text_field(text: str) -> bytes:
    return len(text.encode()).to_bytes(8, "little") + text.encode()


def metadata_section(metadata: dict[str, str] | None) -> bytes:
    """Encode the metadata of a plain base; see spec/07-chain.md#metadata-of-a-plain-base."""
    pairs = sorted((metadata or {}).items(), key=lambda pair: pair[0].encode())
    data = b"".join(text_field(text) for pair in pairs for text in pair)
    checksum = xxh64(bytes((metadata is not None,)) + data).to_bytes(8, "little")
    return checksum + xxh64(checksum).to_bytes(8, "little")


MADE = metadata_section(PT)


def of_plain(section: bytes, **rows: Any) -> Folder:
    """Build a delta of a plain file with the section `base-metadata`."""
    base = {"content_id": File({"w": full()}).content_id(), "file": "base.safetensors", "depth": 1}
    delta_file = File(
        {"w": delta()}, features="delta,lossless", index={"base": base}, optional={"base-metadata": section}
    )
    plain = plain_file({"__metadata__": PT, **rows, **PLAIN_ROWS}, bytes(16))
    return Folder({"delta.ckptz": delta_file.bytes(), "base.safetensors": plain})


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
        delta_group(File({"a": full((3,)), "b": full(())})),
        delta_group(floats(members="ac")),
        delta_group(floats(members="ba")),
        delta_group(replace(floats(), order="ba")),
        delta_group(grouped(full(), {"a": ((3, 1), bytes(12)), "b": ((), bytes(4))})),
        delta_group(File({"w": full()})),
    ],
    "H5": [of_plain(metadata) for metadata in (MADE[:15], MADE + b"\0", MADE[:8] + bytes(8))],
    "H6": [of_plain(MADE, __metadata__=other) for other in (None, {}, {"format": "pu"}, {**PT, "a": "b"})],
}
