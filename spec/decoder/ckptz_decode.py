#!/usr/bin/env python3
"""A decoder of .ckptz files that implements the pages of the folder above, and nothing else.

This file is about files, the pages 06 and 07; `ckptz_frame.py` is about the tensors in them. The sections
follow the pages, and text in "double quotes" after `page#anchor:` is a sentence of that page, or a
part of one. Made for clarity, not for speed, with the standard library only; coder zstd needs the package
`zstandard`.

    python ckptz_decode.py FILE... [-o OUT.safetensors] [--limit BYTES]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ckptz_frame import (
    CHUNK,
    DTYPE_OF_NAME,
    Chunk,
    Decoding,
    Plan,
    Refusal,
    need,
    pack,
    unpack,
    xxh64,
)

FEATURES = {
    "lossless",
    "delta",
    "groups",
    "huffman",
    "inline",
    "low-rank",
    "maps",
    "products",
}  # registry#features
MAX_INDEX = 67_108_864  # registry#limits
MAX_GROUP = 65_536  # registry#limits

# --- 06-container ---------------------------------------------------------------------------------------


def parse_json(data: bytes) -> dict[str, Any]:
    """06-container#json."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len(dict(items)) == len(items), "C3")
        return dict(items)  # "No object has a key twice."

    def number(text: str) -> Any:  # "`NaN` and `Infinity` do not occur"
        need(math.isfinite(float(text)), "C3")
        return int(text) if text.lstrip("-").isdigit() else float(text)

    need(sum(map(data.count, b"[{,")) <= 4_194_304, "C3")
    hooks: dict[str, Any] = dict.fromkeys(("parse_int", "parse_float", "parse_constant"), number)
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=pairs, **hooks)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # "no half of a surrogate pair"
    except (ValueError, RecursionError):  # of which UnicodeError and JSONDecodeError are kinds
        raise Refusal("C3") from None
    need(type(value) is dict, "C3")
    return value


LEAVES: dict[str, Callable[[Any], Any]] = {
    "string": lambda x: type(x) is str,
    "boolean": lambda x: type(x) is bool,
    "integer": lambda x: type(x) is int and 0 <= x < 2**63,  # "is from 0 to 2^63 - 1"
    "number": lambda x: type(x) in (int, float),
    "amount": lambda x: type(x) in (int, float) and x >= 0,
    "xxh64": lambda x: type(x) is str and re.fullmatch("[0-9a-f]{16}", x),
    "object": lambda x: type(x) is dict,
    "texts": lambda x: type(x) is dict and all(type(y) is str for y in x.values()),
    "settings": lambda x: type(x) is dict and all(type(y) in (int, float, bool, str) for y in x.values()),
}
OBJECTS = {  # the fields of the pages; with `?` they may be missing or null, with `!` missing only
    "region": "dtype:string shape:[integer] data_offsets:[integer]",
    "index": "writer:string content_id:string tensors:[entry] metadata?:texts base?:base inline?:[inline] "
    "step?:integer sharding?:sharding tree?:object quality!:[quality]",
    "entry": "name:string dtype:string shape:[integer] offset:integer n_bytes:integer checksum:xxh64 "
    "lossy?:lossy group?:integer",
    "inline": "content_id:string file:string tensors:[entry]",
    "lossy": "method:string role:string layer_type:string settings:settings n_pruned:integer "
    "n_protected:integer max_abs_error:amount rms_error:amount rms:amount promise:string",
    "quality": "promise:string metric:string max_drop:amount is_relative:boolean lower_is_better:boolean "
    "exact:number measured:number is_met:boolean date:string data_digest?:string",
    "sharding": "shards:[shard] index_file?:string index_text?:string carried!:[string]",
    "shard": "file:string tensors:[string] metadata?:texts",
    "base": "content_id:string file:string depth:integer",
}


def fits(x: Any, kind: str) -> bool:
    """06-container#json: whether x is of a kind; "Fields that these pages do not name do not occur."."""
    if kind in LEAVES:
        return bool(LEAVES[kind](x))
    if kind.startswith("["):
        return type(x) is list and all(fits(y, kind[1:-1]) for y in x)
    fields = dict(field.split(":") for field in OBJECTS[kind].split())
    if type(x) is not dict or not x.keys() <= {name.rstrip("?!") for name in fields}:
        return False
    for name, of in fields.items():
        value = x.get(name.rstrip("?!"), ...)
        absent = (value is ... and name[-1] in "?!") or (value is None and name[-1] == "?")
        if not absent and not fits(value, of):
            return False
    return True


def check_version(metadata: dict[str, str]) -> list[str]:
    """06-container#reading: "Compare the version, then the features"; gives the features."""
    version = metadata.get("ckptz.version", "")
    need(re.fullmatch(r"1\.(0|[1-9][0-9]*)", version), "C7", f"version {version!r}")
    keys = {"ckptz.format", "ckptz.version", "ckptz.required_features", "ckptz.index_sha256"}
    features = metadata.get("ckptz.required_features", "lossless").split(",")
    for feature in features:
        need(feature in FEATURES, "C8", f"feature {feature!r}")
    # "exactly these keys"; "at least `lossless`, no name twice, sorted, joined with commas"
    need(set(metadata) == keys and "lossless" in features and features == sorted(set(features)), "C9")
    return features


def inflate(data: bytes) -> bytes:
    """06-container#index: "0, uncompressed; 1, one zlib stream (RFC 1950) that ends with the region"."""
    need(data[:1] in (b"\0", b"\1") and len(data) <= MAX_INDEX + 1, "C12")
    if data[0] == 0:
        return data[1:]
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(data[1:], MAX_INDEX + 1)
    except zlib.error:
        raise Refusal("C12") from None
    need(stream.eof and not stream.unused_data and len(text) <= MAX_INDEX, "C12")
    return text


class File:
    """A file, plain or .ckptz, whose envelope and index have been checked. 06-container#reading, 1 to 4."""

    def __init__(self, path: Path, shelf: Shelf) -> None:
        self.path, self.shelf, self.base, self.depth = path, shelf, None, 0
        self.data = path.read_bytes()
        need(len(self.data) >= 8, "C1")
        length = unpack(8, self.data[:8])[0]
        need(length <= 100_000_000, "C2")
        need(8 + length <= len(self.data), "C1")
        need(self.data[8:9] == b"{", "C2")
        header = parse_json(self.data[8 : 8 + length])
        self.metadata = header.pop("__metadata__", None)
        need(self.metadata is None or fits(self.metadata, "texts"), "C4")
        self.plain = (self.metadata or {}).get("ckptz.format") != "ckptz"
        self.features = [] if self.plain else check_version(self.metadata)
        self.at = 8 + length
        regions = self.read_regions(header)
        self.members: list[dict[str, Tensor]] = [{region.name: region for region in regions}]
        if not self.plain:
            self.read_index(regions)
        reserved = re.compile(r"__ckptz__|__metadata__\Z")
        need(not any(reserved.match(name) for member in self.members for name in member), "C17")

    def read_regions(self, header: dict[str, Any]) -> list[Tensor]:
        """06-container#envelope: "The regions in the order of their offsets begin at 0"."""
        regions = []
        for name, fields in header.items():
            need(fits(fields, "region") and len(fields["data_offsets"]) == 2, "C4")
            regions.append(Tensor(self, 0, name, fields["dtype"], fields["shape"], *fields["data_offsets"]))
            need(regions[-1].end - regions[-1].begin == regions[-1].n_bytes, "C4")
        # "A region without bytes comes before the one that begins at the same offset"
        regions.sort(key=lambda region: (region.begin, region.end))
        at = 0
        for region in regions:  # "leave no gaps, do not overlap and end with the file"
            need(region.begin == at, "C5")
            at = region.end
        need(self.at + at <= len(self.data), "C1")
        need(self.at + at == len(self.data), "C5")
        return regions

    def read_index(self, regions: list[Tensor]) -> None:
        """06-container#index."""
        # "Every region has dtype U8 and as its shape one dimension, its size."
        need(all(region.dtype.name == "U8" and len(region.shape) == 1 for region in regions), "C10")
        need(regions and regions[-1].name == "__ckptz__.index", "C10")
        data = regions[-1].read(0, regions[-1].n_bytes)
        need(hashlib.sha256(data).hexdigest() == self.metadata["ckptz.index_sha256"], "C11")
        index = parse_json(inflate(data))
        need(fits(index, "index"), "C13")
        self.metadata, self.base, inline = index.get("metadata"), index.get("base"), index.get("inline")
        need(inline is None or "inline" in self.features, "C22")
        need(inline is None or self.base is None, "C23")
        need(inline is None or 1 <= len(inline) <= 64, "C13")
        self.members = []
        for level, member in enumerate([index, *(inline or [])]):
            tensors = [Tensor.of_entry(self, level, entry) for entry in member["tensors"]]
            self.members.append({tensor.name: tensor for tensor in tensors})
            need(level == 0 or tensors, "C13")
            need(len(self.members[level]) == len(tensors), "C24")
        self.read_groups(index)
        self.match(regions[:-1])
        need(self.content_id == index["content_id"], "C16")
        if self.base is not None:
            need("delta" in self.features, "C18")
            need(1 <= self.base["depth"] <= 64, "H1")
            # "1 to 255 bytes of UTF-8, not `.` or `..`, and without `/`, characters below 0x20 and 0x7f"
            good = re.fullmatch(r"(?!\.\.?$)[^/\x00-\x1f\x7f]+", self.base["file"])
            need(good and len(self.base["file"].encode()) <= 255, "H2")
        self.depth = self.base["depth"] if self.base else len(inline or [])

    def read_groups(self, index: dict[str, Any]) -> None:
        """06-container#groups."""
        groups: list[Group] = []
        for inline in index.get("inline") or []:  # "An inline base has no groups."
            need(all(entry.get("group") is None for entry in inline["tensors"]), "C25")
        for entry in index["tensors"]:
            if (number := entry.get("group")) is None:
                continue
            need("groups" in self.features, "C25")
            member = self.members[0][entry["name"]]
            if number == len(groups):  # "numbered from 0 in the order in which they begin"
                groups.append(Group(member, number))
            need(number < len(groups), "C26")
            # "A member has at least one pattern, and no field `lossy`."
            need(member.patterns and entry.get("lossy") is None, "C26")
            groups[number].add(member)

    def match(self, regions: list[Tensor]) -> None:
        """06-container#envelope: frames "in the order of the index", then sections that may be skipped."""
        expected = []
        for level, member in enumerate(self.members):
            for j, (name, tensor) in enumerate(member.items()):
                if tensor.group is not None:
                    if tensor.group.members[0] is not tensor:
                        continue  # "Its position among the regions is that of the first member."
                    name = tensor.group.name
                name = f"__ckptz__.inline.{level}.{j}" if level else name
                expected.append((name, tensor.begin, tensor.end))
        found = [(region.name, region.begin, region.end) for region in regions]
        need(found[: len(expected)] == expected, "C14")
        need(all(name.startswith("__ckptz__.optional.") for name, *_ in found[len(expected) :]), "C14")

    @functools.cached_property
    def content_id(self) -> str:
        """07-chain#content-id: "tensors sorted by the UTF-8 bytes of their names"."""
        digest = hashlib.sha256()
        for tensor in sorted(self.members[0].values(), key=lambda tensor: tensor.name.encode()):
            for text in (tensor.name.encode(), tensor.dtype.name.encode()):
                digest.update(pack(8, [len(text)]) + text)
            digest.update(pack(8, [len(tensor.shape), *tensor.shape, tensor.checksum]))
        return digest.hexdigest()

    def bases(self, level: int) -> tuple[str, dict[str, Tensor]]:
        """The tensors among which a base is looked for, and what to refuse if it is not among them."""
        if level + 1 < len(self.members):
            return "C19", self.members[level + 1]
        need(self.base is not None, "C19")
        return "H4", self.shelf.base_of(self).members[0]


class Tensor:
    """A tensor of a file, or a region of its envelope; `level` is the number of its inline base, or 0."""

    def __init__(self, file: File, level: int, name: str, dtype: str, shape: list[int], *at: int) -> None:
        need(dtype in DTYPE_OF_NAME, "C6", f"dtype {dtype!r}")
        self.file, self.level, self.name, self.shape = file, level, name, shape
        self.dtype, (self.begin, self.end) = DTYPE_OF_NAME[dtype], at  # from the end of the header
        self.patterns = self.dtype.patterns(shape)
        self.n_bytes = self.patterns * self.dtype.size
        self.group: Group | None = None

    @classmethod
    def of_entry(cls, file: File, level: int, entry: dict[str, Any]) -> Tensor:
        """06-container#tensor-entries."""
        need(len(entry["shape"]) <= 64, "C13")
        begin, end = entry["offset"], entry["offset"] + entry["n_bytes"]
        tensor = cls(file, level, entry["name"], entry["dtype"], entry["shape"], begin, end)
        tensor.checksum = int(entry["checksum"], 16)
        return tensor

    def read(self, begin: int, end: int) -> bytes:
        """Bytes of its region."""
        at = self.file.at + self.begin
        return self.file.data[at + begin : at + end]

    @functools.cached_property
    def checksum(self) -> int:
        """07-chain#content-id: "computed from its bytes, divided into chunks as in a frame"."""
        step = CHUNK * self.dtype.size
        starts = range(0, self.n_bytes, step)
        return checksum_of(xxh64(self.read(at, min(at + step, self.n_bytes))) for at in starts)

    @functools.cached_property
    def plan(self) -> Plan:
        """06-container#reading: "compare dtype, shape, length and checksum of the tensor with its entry"."""
        if self.group is not None:
            return self.group.plan
        plan = Plan(self.read(0, self.end - self.begin), self.file.shelf.limit)
        need((plan.dtype, plan.shape) == (self.dtype, self.shape), "C15")
        need(plan.map is None or "maps" in self.file.features, "C20")
        need(not plan.terms or "low-rank" in self.file.features, "C20")
        need(not plan.has_huffman or "huffman" in self.file.features, "C20")
        need(not plan.has_products or "products" in self.file.features, "C20")
        need(checksum_of(decoded for _, decoded, *_ in plan.records) == self.checksum, "C15")
        return plan

    @functools.cached_property
    def base(self) -> Tensor | None:
        """07-chain#resolution: "The base of a tensor is the tensor of the same name in the base."."""
        if self.group is not None:
            return self.group.base
        if self.file.plain or not self.plan.needs_base:
            return None
        rule, tensors = self.file.bases(self.level)
        found = tensors.get(self.name)
        need(found is not None and (found.dtype, found.shape) == (self.dtype, self.shape), rule)
        return found

    def named(self, depth: int = 0) -> list[Tensor]:
        """03-transforms#contexts: "if A names B and B names C, then C must not name a tensor"."""
        names = [] if self.file.plain else [rule.source for rule in self.plan.rules if rule.source]
        found = [self.file.members[self.level].get(name) for name in names]
        for other in found:
            need(depth < 2, "T8")
            need(other is not None and other.patterns == self.patterns, "T7")
            other.named(depth + 1)
        return found

    def chunk(self, j: int, done: dict[Tensor, Chunk]) -> Chunk:
        """03-transforms#contexts: "decode each chunk of each file of a chain only once"."""
        if self not in done:
            done[self] = self.decode(j, done)
        return done[self]

    def decode(self, j: int, done: dict[Tensor, Chunk]) -> Chunk:
        """Chunk j, with the same chunk of whatever it needs."""
        if self.group is not None:
            return self.group.part(self, done)
        if self.file.plain:
            step = CHUNK * self.dtype.size
            data = self.read(j * step, min((j + 1) * step, self.n_bytes))
            return Chunk(self.dtype, unpack(self.dtype.size, data))
        base = self.base.chunk(j, done) if self.base else Chunk(self.dtype, ())
        named = {other.name: other.chunk(j, done) for other in self.named()}
        data = self.read(*self.plan.offsets[j : j + 2])
        return Decoding(self.plan, j, data, base, named).run()

    def chunks(self) -> Iterator[bytes]:
        """The bytes of its patterns, chunk after chunk; what it needs must be there also if there is none."""
        _ = self.base, self.named()
        for j in range(-(-self.patterns // CHUNK)):
            yield pack(self.dtype.size, self.chunk(j, {}).patterns)


class Group(Tensor):
    """06-container#groups: the one frame of "several tensors, its *members*"."""

    def __init__(self, first: Tensor, number: int) -> None:
        name, at = f"__ckptz__.group.{number}", (first.begin, first.end)
        super().__init__(first.file, 0, name, first.dtype.name, [0], *at)
        self.members: list[Tensor] = []

    def add(self, member: Tensor) -> None:
        """One more member: "Offset and size in the entries of all members are those of the region"."""
        own, shared = (member.dtype, member.begin, member.end), (self.dtype, self.begin, self.end)
        need(own == shared, "C26")
        member.group, member.first = self, self.patterns
        self.members.append(member)
        self.shape = [self.shape[0] + math.prod(member.shape)]  # "the total number of their elements"
        self.patterns += member.patterns
        self.n_bytes += member.n_bytes
        need(self.patterns <= MAX_GROUP, "C26")

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan of the frame: "has the domain `planes`, and none of its context rules names a tensor"."""
        plan = Plan(self.read(0, self.end - self.begin), self.file.shelf.limit)
        need((plan.dtype, plan.shape) == (self.dtype, self.shape), "C15")
        need(not plan.has_huffman or "huffman" in self.file.features, "C20")
        need(not plan.has_products or "products" in self.file.features, "C20")
        need(plan.map is None and not any(rule.source for rule in plan.rules), "C27")
        return plan

    @functools.cached_property
    def base(self) -> Tensor | None:
        """The "group of the base whose members have the same names and shapes in the same order"."""
        if not self.plan.needs_base:
            return None
        rule, tensors = self.file.bases(0)
        found = [tensors.get(member.name) for member in self.members]
        fits = zip(found, self.members, strict=True)
        need(all(f and (f.dtype, f.shape) == (m.dtype, m.shape) for f, m in fits), rule)
        if found[0].file.plain:  # "the patterns of the tensors with these names, shapes and this dtype"
            return Joined(found)
        group = found[0].group
        need(group is not None and group.members == found, rule)
        return group

    def part(self, member: Tensor, done: dict[Tensor, Chunk]) -> Chunk:
        """The patterns of a member: "those of the members, one after another"."""
        patterns = self.chunk(0, done).patterns[member.first : member.first + member.patterns]
        # "computed from the patterns of that member only"
        need(checksum_of([xxh64(pack(self.dtype.size, patterns))]) == member.checksum, "C28")
        return Chunk(self.dtype, patterns)


class Joined(Tensor):
    """Tensors of a plain file, "one after another"."""

    def __init__(self, parts: list[Tensor]) -> None:
        self.parts, self.dtype, self.file = parts, parts[0].dtype, parts[0].file

    def decode(self, j: int, done: dict[Tensor, Chunk]) -> Chunk:
        """Their only chunk."""
        return Chunk(self.dtype, [u for part in self.parts for u in part.chunk(j, done).patterns])


# --- 07-chain -------------------------------------------------------------------------------------------


def checksum_of(chunks: Iterable[int]) -> int:
    """05-frame#chunk-records: "XXH64 of the decoded checksums of all chunks, each as a u64"."""
    return xxh64(pack(8, chunks))


class Shelf:
    """The files that are open, each once, and how much may be decoded of each tensor."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.open = functools.cache(lambda path: File(path, self))
        self.base_of = functools.cache(self.find_base)

    def find_base(self, delta: File) -> File:
        """07-chain#resolution: "a checkpoint with the content id of the base reference"."""
        folder, reference = delta.path.parent, delta.base
        others = (path for suffix in ("ckptz", "safetensors") for path in sorted(folder.glob(f"*.{suffix}")))
        for path in filter(Path.is_file, itertools.chain([folder / reference["file"]], others)):
            with contextlib.suppress(Refusal, OSError):
                found = self.open(path)
                same = found.content_id == reference["content_id"]
                if same and found.depth < reference["depth"]:  # "and a lower depth than the one given there"
                    return found
        raise Refusal("H3", f"base {reference['file']!r} of {delta.path.name} is not found")


# --- command line ---------------------------------------------------------------------------------------


def plain_header(file: File) -> bytes:
    """06-container#envelope: the header of a plain safetensors file with the tensors of this one."""
    header: dict[str, Any] = {} if file.metadata is None else {"__metadata__": file.metadata}
    at = 0
    for name, tensor in file.members[0].items():
        offsets = [at, at := at + tensor.n_bytes]
        header[name] = {"dtype": tensor.dtype.name, "shape": tensor.shape, "data_offsets": offsets}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return pack(8, [len(text)]) + text


def decode(path: Path, shelf: Shelf, out: str) -> list[dict[str, Any]]:
    """Decode all tensors of a file into another, and describe them."""
    file = shelf.open(path)
    tensors = file.members[0]
    need(sum(tensor.n_bytes for tensor in tensors.values()) <= shelf.limit, "limit")
    described = []
    with open(out, "wb") as sink:
        sink.write(plain_header(file))
        for name, tensor in tensors.items():
            digest = hashlib.sha256()
            for data in tensor.chunks():
                digest.update(data)
                sink.write(data)
            row = {"name": name, "dtype": tensor.dtype.name, "shape": tensor.shape}
            described.append({**row, "sha256": digest.hexdigest()})
    return described


def main() -> int:
    """The command line: prints a line of JSON for each file; 0 if all are decoded, 1 if one is refused."""
    parser = argparse.ArgumentParser(description="Decode .ckptz files.")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("-o", "--out", default=os.devnull, help="the safetensors file to write, of one FILE")
    parser.add_argument("--limit", type=int, default=2**30, help="most bytes to decode of one file (2^30)")
    given = parser.parse_args()
    status = 0
    for path in given.files:
        try:
            line = {"file": str(path), "tensors": decode(path, Shelf(given.limit), given.out)}
        except Refusal as refusal:
            status, refused = 1, {"kind": refusal.kind, "rule": refusal.rule, "about": refusal.about}
            line = {"file": str(path), "refused": refused}
        print(json.dumps(line))
    return status


if __name__ == "__main__":
    sys.exit(main())
