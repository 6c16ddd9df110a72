"""Writes spec/examples.md: one small file, annotated byte by byte as the reader takes it apart.

    python spec/make_examples.py

The fields and their order come from the reader itself, whose cursor is replaced by one that takes notes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np

from ckptz.codec.chunk import encode_chunk, encode_values
from ckptz.codec.tensor_plan import TensorPlan
from ckptz.format.bits import ByteReader, xxh64
from ckptz.format.byte_source import MemoryBytes
from ckptz.format.context_rules import Row, RuleId
from ckptz.format.dtypes import dtype_of, dtype_of_id
from ckptz.format.envelope import Region, build_header
from ckptz.format.frame import ChunkRecord, FrameHeader, StreamRecord, TableKind
from ckptz.format.frequency import parse_table
from ckptz.format.index import INDEX_NAME, Index, TensorEntry, content_id, envelope_metadata
from ckptz.format.plan import (
    Domain,
    ExplicitTable,
    Plan,
    PlaneMode,
    Predictor,
    QuantizationMap,
    StreamTables,
    exact_plan,
)
from ckptz.format.sources import ArraySource, ChunkSources
from ckptz.format.streams import LANE_CHOICES, CoderId, Segments, encode_rans
from ckptz.store.resolve import open_checkpoint
from tests.support import reference

PAGE = Path(__file__).with_name("examples.md")
BYTES_PER_LINE, TEXT_PER_LINE = 12, 100

BIAS = np.array([0x3F80, 0xBF00, 0x0000, 0x4000], np.uint16)  # BF16: 1, -0.5, 0, 2
CODES = np.array([[1, 1, 0, 1, 2, 1], [1, 2, 1, 1, 1, 0], [0, 2, 1, 2, 0, 3], [2, 0, 0, 1, 2, 2]], np.uint8)
LEVELS = np.array([[-0.125, 0, 0.125, 0], [-0.5, 0, 0.5, 0]], np.float32)
ROW_LABELS = np.array([0, 0, 1, 1], np.uint8)
ESCAPED = np.array([3.25], np.float32)
FREQUENCIES = ((768, 2560, 768, 0), (1280, 768, 1280, 768))

NAMES_OF_IDS: Mapping[str, Callable[[int], str]] = {
    "frame dtype": lambda i: dtype_of_id(i).name,
    "frame domain": lambda i: _name(Domain(i)),
    "frame predictor": lambda i: _name(Predictor(i)),
    "frame flags": lambda i: {0: "none", 2: "escape"}[i],
    "plane mode": lambda i: _name(PlaneMode(i)),
    "context rule": lambda i: _name(RuleId(i)),
    "table kind": lambda i: _name(TableKind(i)),
    "coder": lambda i: _name(CoderId(i)),
    "context indices: coder": lambda i: _name(CoderId(i)),
    "lane index": lambda i: f"{LANE_CHOICES[i]} lane",
}
NAMES_OF_PAGES = {  # where the reader's messages use other words than the pages
    "frequency table first": "first symbol",
    "frequency table last": "last symbol",
    "frequency table order": "order",
    "frequency table": "frequencies",
}


def _name(member: Any) -> str:
    return str(member.name).lower().replace("_", "-")


# --- the file -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Framed:
    """A tensor and its frame."""

    name: str
    header: FrameHeader
    payload: bytes

    @property
    def frame(self) -> bytes:
        """Header and the one chunk."""
        return self.header.pack() + self.payload


def lossless_tensor() -> Framed:
    """Byte planes, each by the coder that the writer chooses."""
    dtype = dtype_of("BF16")
    source, plan = ArraySource(dtype, BIAS.shape, BIAS), exact_plan(dtype)
    chunk = encode_chunk(source, TensorPlan(plan), ChunkSources(0, BIAS.size))
    return Framed("bias", FrameHeader(dtype, BIAS.shape, plan, (chunk.record,)), chunk.payload)


def quantized_tensor() -> Framed:
    """Two contexts of rows with their own levels and frequencies, and one escaped value."""
    dtype, shape, codes = dtype_of("F32"), CODES.shape, CODES.reshape(-1)
    table_of = np.arange(2)
    frequencies = np.zeros((2, 256), np.uint16)
    frequencies[:, :4] = FREQUENCIES
    tables = StreamTables(frequencies, table_of)
    quant_map = QuantizationMap(ExplicitTable(LEVELS.view(np.uint32)), np.arange(2), escape_code=3)
    plan = Plan(quant_map=quant_map, domain=Domain.LINEAR, rules=(Row(2, ROW_LABELS),), tables=(tables,))
    labels = np.repeat(ROW_LABELS, shape[1])
    segments = Segments(np.cumsum(np.bincount(labels)), table_of, frequencies)
    in_contexts = encode_rans(reference.group(codes, labels, np.array([len(codes)])), segments, 0)
    streams = [(CoderId.RANS_SHARED, in_contexts), *encode_values(ESCAPED.view(np.uint32))]
    decoded = LEVELS[labels, codes]
    decoded[codes == 3] = ESCAPED
    payload = b"".join(data for _, data in streams)
    records = tuple(StreamRecord(coder, len(data)) for coder, data in streams)
    record = ChunkRecord(xxh64(payload), xxh64(decoded), records)
    return Framed("weight", FrameHeader(dtype, shape, plan, (record,)), payload)


def build() -> tuple[bytes, bytes, list[Framed]]:
    """The file, its index, and what it is made of; the index is plain, so that it can be read."""
    framed, entries, offset = [lossless_tensor(), quantized_tensor()], [], 0
    for tensor in framed:
        header, n_bytes = tensor.header, len(tensor.frame)
        checksum = f"{header.checksum:016x}"
        entries.append(TensorEntry(tensor.name, header.dtype.name, header.shape, offset, n_bytes, checksum))
        offset += n_bytes
    index = Index(
        writer="by hand",
        content_id=content_id((e.name, e.dtype, e.shape, int(e.checksum, 16)) for e in entries),
        tensors=tuple(entries),
        metadata={"epoch": "3"},
        step=120,
    )
    packed = b"\0" + msgspec.json.encode(index)
    blobs = [(e.name, e.offset, e.n_bytes) for e in entries] + [(INDEX_NAME, offset, len(packed))]
    regions = [Region(name, dtype_of("U8"), (n,), begin, begin + n) for name, begin, n in blobs]
    envelope = build_header(regions, envelope_metadata(["lossless", "maps"], packed))
    return envelope + b"".join(t.frame for t in framed) + packed, packed, framed


# --- the notes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Note:
    """Some bytes and what they are."""

    offset: int
    raw: bytes
    field: str
    value: str


@dataclass
class Notes:
    """All notes of one part, in order."""

    notes: list[Note] = field(default_factory=list)

    def add(self, offset: int, raw: bytes, what: str, value: str) -> None:
        self.notes.append(Note(offset, raw, NAMES_OF_PAGES.get(what, what), value))


class Noting(ByteReader):
    """A cursor that notes every field it reads."""

    def __init__(self, source: bytes | memoryview, notes: Notes) -> None:
        super().__init__(source)
        self._notes = notes

    def _noted(self, what: str, read: Callable[[str], int]) -> int:
        begin, n_notes = self.offset, len(self._notes.notes)
        value = read(what)
        del self._notes.notes[n_notes:]  # one note for all bytes of a varint
        raw = bytes(self._view[begin : self.offset])
        shown = str(value) if len(raw) < 8 else f"0x{value:016x}"
        if name := NAMES_OF_IDS.get(what):
            shown = f"{value}: {name(value)}"
        self._notes.add(begin, raw, what, shown)
        return value

    def u8(self, what: str) -> int:
        return self._noted(what, super().u8)

    def u32(self, what: str) -> int:
        return self._noted(what, super().u32)

    def u64(self, what: str) -> int:
        return self._noted(what, lambda what: int.from_bytes(self.take(8, what), "little"))

    def varint(self, what: str) -> int:
        return self._noted(what, super().varint)

    def take(self, n_bytes: int, what: str) -> memoryview:
        taken = super().take(n_bytes, what)
        if what in VALUES:
            self._notes.add(self.offset - n_bytes, bytes(taken), what, VALUES[what](bytes(taken)))
        if what == "chunk records":  # of one chunk, without base codes
            end, self.offset = self.offset, self.offset - n_bytes
            self.u64("stored checksum")
            self.u64("decoded checksum")
            while self.offset < end:
                self.u8("coder")
                self.u32("stream length")
        return taken


VALUES: Mapping[str, Callable[[bytes], str]] = {  # fields of several numbers, which the reader takes at once
    "context indices": lambda raw: "labels " + ", ".join(map(str, raw)),
    "quantization table": lambda raw: "F32: " + ", ".join(f"{x:g}" for x in np.frombuffer(raw, "<f4")),
    "frequency table": lambda raw: "Exp-Golomb codes",
}


def header_notes(framed: Framed) -> list[Note]:
    """The fields of a frame's header."""
    notes, packed = Notes(), framed.header.pack()
    with mock.patch("ckptz.format.frame.ByteReader", lambda source: Noting(source, notes)):
        parsed = FrameHeader.parse(packed)
    assert parsed.pack() == packed
    shown = [part for n in notes.notes for part in (_each_table(n) if n.field == "frequencies" else (n,))]
    checksum = packed[-8:]
    return [
        *shown,
        Note(len(packed) - 8, checksum, "header checksum", f"0x{int.from_bytes(checksum, 'little'):016x}"),
    ]


def _each_table(note: Note) -> Iterator[Note]:
    """Tables of frequencies, which the reader takes at once."""
    source = ByteReader(note.raw)
    while source.left:
        begin, row = source.offset, parse_table(source)
        value = "frequencies " + ", ".join(str(int(f)) for f in np.trim_zeros(row))
        yield Note(note.offset + begin, note.raw[begin : source.offset], note.field, value)


def stream_notes(coder: int, raw: bytes, offset: int) -> Iterator[Note]:
    """Yield notes on the parts of one stream."""
    notes, at = Notes(), 0
    if coder == CoderId.RANS_OWN:
        source = Noting(raw, notes)
        parse_table(source)
        at = source.offset
        yield from (Note(offset + n.offset, n.raw, n.field, n.value) for n in notes.notes)
    if coder not in (CoderId.RANS_OWN, CoderId.RANS_SHARED):
        what = {CoderId.CONSTANT: "every code is", CoderId.STORED: "codes"}[CoderId(coder)]
        yield Note(offset, raw, "stream", f"{what} {raw.hex(' ')}")
        return
    assert raw[at] == 0, "the example has one lane"
    yield Note(offset + at, raw[at : at + 1], "lane index", "0: 1 lane")
    state = int.from_bytes(raw[at + 1 : at + 5], "little")
    yield Note(offset + at + 1, raw[at + 1 : at + 5], "lane states", str(state))
    words = np.frombuffer(raw[at + 5 :], "<u2")
    yield Note(offset + at + 5, raw[at + 5 :], "words", ", ".join(map(str, words)))


# --- the page -----------------------------------------------------------------------------------

INTRODUCTION = """\
# Examples

One small `.ckptz` file, byte by byte. `make_examples.py` of this folder makes it, reads it with the parser of
our reader and notes each field; a test holds this page to that.

The file has two tensors: `bias`, BF16 of shape [4], lossless, and `weight`, F32 of shape [4, 6], quantized.
It has {n_bytes} bytes. The offsets count from the beginning of the file. Writers deflate the index; here it
is plain, so that it can be read.
"""


def rows(notes: Sequence[Note], base: int) -> list[str]:
    """A table of notes; long fields take several lines."""
    lines = ["| offset | bytes | field | value |", "|---|---|---|---|"]
    for note in notes:
        pieces = [note.raw[i : i + BYTES_PER_LINE] for i in range(0, len(note.raw), BYTES_PER_LINE)]
        for i, piece in enumerate(pieces):
            at = base + note.offset + i * BYTES_PER_LINE
            what, value = (note.field, note.value) if not i else ("", "")
            lines.append(f"| {at} | `{piece.hex(' ')}` | {what} | {value} |")
    return lines


def json_block(text: bytes, base: int) -> list[str]:
    """Text as it stands, broken into lines that the file does not have."""
    shown = text.decode()
    visible = shown.rstrip(" ")
    body = [visible[i : i + TEXT_PER_LINE] for i in range(0, len(visible), TEXT_PER_LINE)]
    n_spaces = len(shown) - len(visible)
    padding = f", the last {n_spaces} of them spaces" if n_spaces else ""
    return [f"Bytes {base} to {base + len(text) - 1}{padding}, in lines that the file does not have:", ""] + [
        "    " + line for line in body
    ]


def frame_lines(framed: Framed, base: int) -> list[str]:
    """A frame: header and chunk."""
    header = framed.header.pack()
    lines = ["", f"## Frame of {framed.name}", "", "The header:", "", *rows(header_notes(framed), base)]
    lines += ["", "The chunk:", ""]
    notes: list[Note] = []
    offset = len(header)
    for i, record in enumerate(framed.header.chunks[0].streams):
        raw = framed.frame[offset : offset + record.n_bytes]
        parts = stream_notes(record.coder, raw, offset)
        notes.extend(Note(n.offset, n.raw, f"stream {i}: {n.field}", n.value) for n in parts)
        offset += record.n_bytes
    return lines + rows(notes, base)


def decoded_lines(data: bytes) -> list[str]:
    """Return the lines of a page that show what a reader decodes."""
    lines = ["", "## Decoded", "", "| tensor | patterns |", "|---|---|"]
    checkpoint = open_checkpoint(MemoryBytes(data))
    for name, source in checkpoint.tensors.items():
        patterns = source.patterns(0, source.dtype.n_patterns(source.shape))
        digits = 2 * source.dtype.pattern_bytes
        lines.append(f"| {name} | {' '.join(f'{int(u):0{digits}x}' for u in patterns)} |")
    return lines


def render() -> str:
    """The page."""
    data, packed, framed = build()
    n_header = int.from_bytes(data[:8], "little")
    lines = INTRODUCTION.format(n_bytes=len(data)).splitlines()
    lines += ["", "## Envelope header", "", *rows([Note(0, data[:8], "header length", str(n_header))], 0)]
    lines += ["", *json_block(data[8 : 8 + n_header], 8)]
    base = 8 + n_header
    for tensor in framed:
        lines += frame_lines(tensor, base)
        base += len(tensor.frame)
    lines += ["", "## The index itself", "", *rows([Note(0, packed[:1], "plain", "0: not deflated")], base)]
    lines += ["", *json_block(packed[1:], base + 1)]
    lines += decoded_lines(data)
    lines += ["", "An encoder may choose anything that decodes."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
