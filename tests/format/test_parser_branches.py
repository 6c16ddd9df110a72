"""Branches of the parsers that no vector reaches: other callers, other threads, files that change."""

from __future__ import annotations

import itertools
import json
import os
import threading
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from ckptz.codec.restored import CachedTensor
from ckptz.errors import (
    ConfigError,
    CorruptionError,
    FormatError,
    LimitError,
    MissingBaseError,
    TruncatedError,
)
from ckptz.format import byte_source, caches, index, reader
from ckptz.format.bits import ByteReader, ByteWriter, xxh64
from ckptz.format.byte_source import FileBytes, MemoryBytes, UrlBytes, path_of
from ckptz.format.caches import (
    MAX_FRAMES,
    MAX_IDLE_ELEMENTS,
    CachedChunks,
    Decoded,
    DecodedBases,
    HeaderCache,
    Node,
    gather,
)
from ckptz.format.decode import decode_chunk
from ckptz.format.dtypes import dtype_of
from ckptz.format.envelope import build_header, read_envelope, strict_json
from ckptz.format.frame import ChunkRecord, FrameHeader, StreamRecord
from ckptz.format.index import Index, TensorEntry, pack_index, parse_index
from ckptz.format.plan import exact_plan
from ckptz.format.publish import Publication
from ckptz.format.reader import Container
from ckptz.format.sources import ArraySource, ChunkSources
from ckptz.format.streams import CoderId
from tests.support.spec_files import File, Frame, open_bytes

VALUES = np.zeros(8, np.uint32)


# --- bits ---------------------------------------------------------------------------------------


def test_integers_are_little_endian_and_bounded() -> None:
    out = ByteWriter()
    out.u32(0x1234)
    out.varint(300)
    assert out.getvalue() == b"\x34\x12\x00\x00\xac\x02"
    source = ByteReader(out.getvalue())
    assert (source.u32("n"), source.left, bytes(source.peek())) == (0x1234, 2, b"\xac\x02")
    with pytest.raises(CorruptionError, match="2 bytes follow"):
        source.end("here")
    with pytest.raises(TruncatedError, match="n: need -1 bytes"):
        source.take(-1, "n")


# --- frame --------------------------------------------------------------------------------------


def test_a_header_of_another_length_than_it_says_is_corrupt() -> None:
    content = Frame().header[:-8] + b"\0"
    with pytest.raises(CorruptionError, match="length does not match"):
        FrameHeader.parse(content + xxh64(content).to_bytes(8, "little"))
    with pytest.raises(CorruptionError, match="of 11 bytes"):
        FrameHeader.parse(bytes(11))


def test_bytes_that_do_not_fit_their_header_are_corrupt() -> None:
    stream, out = StreamRecord(CoderId.RANS_SHARED, 9), np.empty(4, np.uint8)
    payload = np.zeros(9, np.uint8)
    record = ChunkRecord(xxh64(payload), 0, (stream,))
    header = FrameHeader(dtype_of("U8"), (4,), exact_plan(dtype_of("U8")), (record,))
    with pytest.raises(CorruptionError, match="uses the tensor's tables, and the frame has none"):
        decode_chunk(header, 0, payload, ChunkSources(0, 4), out)
    record = ChunkRecord(xxh64(payload[:8]), 0, (stream,))
    with pytest.raises(CorruptionError, match="8 stored bytes, 9 recorded"):
        decode_chunk(replace(header, chunks=(record,)), 0, payload[:8], ChunkSources(0, 4), out)


# --- byte sources -------------------------------------------------------------------------------


def test_a_read_beyond_the_end_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(10))
    for source in (FileBytes(path), MemoryBytes(bytes(10))):
        assert len(source.read(8, 2)) == 2
        with pytest.raises(TruncatedError, match="is cut off: it has 10 bytes and should have 11"):
            source.read(8, 3)
        source.close()


def test_a_file_that_is_cut_while_it_is_read_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(10))
    source = FileBytes(path)
    os.truncate(path, 4)
    with pytest.raises(TruncatedError, match="was cut at byte 4"):
        source.read(0, 10)


def test_a_disk_that_fails_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(10))

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    source = FileBytes(path)
    monkeypatch.setattr(byte_source.os, "preadv", fail)
    with pytest.raises(OSError, match="f'"):
        source.read(0, 10)


def test_a_system_without_reads_at_a_place_seeks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(b"0123456789")
    monkeypatch.delattr(os, "preadv", raising=False)  # as on Windows
    source = FileBytes(path)
    assert (source.read(3, 4).tobytes(), source.read(0, 1).tobytes()) == (b"3456", b"0")
    source.close()


def test_large_reads_are_made_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(range(10)))
    monkeypatch.setattr(byte_source, "MAX_READ", 3)
    assert FileBytes(path).read(0, 10).tolist() == list(range(10))


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        FileBytes(tmp_path / "pipe")


# --- caches -------------------------------------------------------------------------------------


def test_the_chunk_cache_holds_what_was_used_last_and_no_more_than_it_may() -> None:
    cache = CachedChunks(3 * VALUES.nbytes)
    for i in range(3):
        cache.get(("w", i), lambda: Decoded(VALUES.copy(), None))
    cache.get(("w", 0), lambda: pytest.fail("it is held"))
    cache.get(("w", 3), lambda: Decoded(VALUES.copy(), None))
    assert cache.weight == 3 * VALUES.nbytes
    again: list[int] = []
    cache.get(("w", 1), lambda: again.append(1) or Decoded(VALUES.copy(), None))
    assert again == [1]
    cache.get(("big", 0), lambda: Decoded(np.zeros(1000, np.uint8), None))
    assert cache.weight == 3 * VALUES.nbytes
    cache.clear()
    assert cache.weight == 0


def test_threads_that_want_one_chunk_wait_for_one_decoding() -> None:
    cache, started, release, calls = CachedChunks(), threading.Event(), threading.Event(), []

    def slow() -> Decoded:
        calls.append(1)
        started.set()
        release.wait(60)
        return Decoded(VALUES, None)

    threads = [threading.Thread(target=cache.get, args=(("w", 0), slow)) for _ in range(2)]
    threads[0].start()
    started.wait(60)
    threads[1].start()
    threads[1].join(0.1)  # time to come to the lock; without it the test holds too
    release.set()
    for thread in threads:
        thread.join(60)
    assert calls == [1]


def test_a_chunk_that_another_thread_kept_meanwhile_is_not_kept_twice() -> None:
    cache, chunk = CachedChunks(), Decoded(VALUES, None)

    def decode() -> Decoded:
        cache._keep(("w", 0), chunk)
        return chunk

    cache.get(("w", 0), decode)
    assert cache.weight == VALUES.nbytes


def test_the_last_chunks_hold_no_more_than_they_may() -> None:
    last, records = caches.LastChunks(lambda: 2 * VALUES.nbytes), [ChunkRecord(i, i, ()) for i in range(2)]
    for i in range(3):
        last.put("w", i, records[0], Decoded(VALUES, None))
    assert [last.get("w", i, records[0]) is not None for i in range(3)] == [True, True, False]
    assert last.get("w", 0, records[1]) is None, "of another file"
    last.put("w", 0, records[1], Decoded(np.zeros(100, np.uint32), None))  # which replaces what fitted
    assert last.get("w", 0, records[0]) is last.get("w", 0, records[1]) is None
    assert last.n_bytes == VALUES.nbytes


def test_the_header_cache_keeps_one_header_whatever_it_weighs() -> None:
    cache, header = HeaderCache(1), Frame().parse()

    def parse() -> FrameHeader:
        cache.get("a", lambda: header)  # another thread was first
        return header

    assert cache.get("a", parse) is header
    assert cache.get("b", lambda: header) is header
    again: list[int] = []
    cache.get("b", lambda: pytest.fail("it is held"))
    cache.get("a", lambda: again.append(1) or header)
    assert again == [1]


# --- container ----------------------------------------------------------------------------------


def test_a_plain_file_is_no_container() -> None:
    source = MemoryBytes(build_header([], None))
    with pytest.raises(FormatError, match=r"not a \.ckptz file"):
        Container(source, read_envelope(source))


def is_text(text: str) -> bool:
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False


def test_a_string_of_json_has_no_half_of_a_surrogate_pair() -> None:
    pieces = (r"\ud800", r"\uDBff", r"\udc00", r"\uDFFF", r"\ud7ff", r"\ue000", r"\\", r"\n", "ud800", "x")
    for some in itertools.product(pieces, repeat=4):
        text = f'["{"".join(some)}"]'
        if is_text(json.loads(text)[0]):
            assert strict_json(text.encode(), "it") == json.loads(text)
        else:
            with pytest.raises(CorruptionError, match="it: not valid JSON"):
                strict_json(text.encode(), "it")


def test_json_means_the_same_as_we_write_it_and_with_blanks() -> None:
    entry = TensorEntry("w", "F32", (2, 3), 0, 40, "0" * 16)
    packed = pack_index(Index("by hand", "0" * 64, (entry,), metadata={"a": "ä"}, tree={"x": [1, 0.5, None]}))
    text = zlib.decompress(packed[1:])
    spaced = json.dumps(json.loads(text), indent=1).encode()
    assert parse_index(b"\0" + spaced) == parse_index(b"\0" + text) == parse_index(packed)
    for twice in (b'{"a":1,"a":1}', b'{"a": 1, "a": 1}'):
        with pytest.raises(CorruptionError, match="a key occurs twice"):
            strict_json(twice, "it")


def test_an_index_larger_than_any_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MAX_INDEX_BYTES", 10)
    with pytest.raises(CorruptionError, match="larger than 64 MiB"):
        open_bytes(File().bytes())


def test_a_frame_that_was_decoded_is_a_source_like_others() -> None:
    source = open_bytes(File().bytes()).tensors["w"]
    held = reader._DecodedChunk(source, source.decoded(0, False, {}))
    cached = CachedTensor.of_frame(source)
    assert source.decoded(0, True, {(source, False): held.chunk}) is held.chunk
    for one in (held, cached):
        assert (one.dtype, one.shape) == (source.dtype, source.shape)
        assert one.patterns(0, 4).tobytes() == b"\1\2\3\4"
        assert one.codes(0, 4) is None
    assert cached.n_codes is None
    assert cached.stored == source.stored


def test_a_source_without_a_frame_has_no_codes() -> None:
    source = ArraySource.from_buffer(dtype_of("U8"), (4,), b"\1\2\3\4")
    assert (source.stored, source.n_codes) == (None, None)
    patterns, codes = source.patterns_and_codes(1, 3)
    assert (patterns.tobytes(), codes) == (b"\2\3", None)


def test_sources_of_a_chunk_that_are_not_open() -> None:
    none = ChunkSources(0, 2)
    with pytest.raises(MissingBaseError, match="its base is not open"):
        none.base_patterns()
    with pytest.raises(MissingBaseError, match="the base is not open"):
        none.base_codes()
    with pytest.raises(CorruptionError, match="'v', which is not open"):
        none.patterns_of("v")


# --- bytes behind URLs ----------------------------------------------------------------------------


def test_bytes_behind_a_url_are_read_by_ranges() -> None:
    path = path_of("memory://parser/bytes")
    path.write_bytes(b"0123456789")
    source = UrlBytes(path)
    assert (source.size, source.read(3, 4).tobytes()) == (10, b"3456")
    with pytest.raises(TruncatedError, match="should have 11"):
        source.read(10, 1)
    source.size = 20  # it was so long when it was opened
    with pytest.raises(OSError, match="only 2 of 5 bytes came through"):
        source.read(8, 5)
    source.close()
    with pytest.raises(FileNotFoundError, match="memory://parser/none"):
        UrlBytes(path_of("memory://parser/none"))


@pytest.mark.parametrize(
    ("missing", "remedy"), [("upath", r"'ckptz\[remote\]' s3fs"), ("botocore", "botocore")]
)
def test_a_url_whose_package_is_missing_names_it(
    missing: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def module(_: str) -> None:
        raise ImportError("no module", name=missing)

    monkeypatch.setattr(byte_source.lazy, "module", module)
    with pytest.raises(ConfigError, match=rf"s3://a/b: needs a package .* pip install {remedy}$"):
        path_of("s3://a/b")


def test_a_protocol_that_tells_nothing_of_a_file_can_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def tells_nothing(*_: object, **__: object) -> None:
        raise NotImplementedError

    path = path_of("memory://parser/silent")
    path.write_bytes(b"0")
    monkeypatch.setattr(type(path.fs), "info", tells_nothing)
    assert path_of("memory://parser/silent") == path


def test_a_server_that_sends_a_byte_now_and_then_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(step=byte_source.PATIENCE)
    monkeypatch.setattr(byte_source.time, "monotonic", lambda: next(now) * 1.01)
    pace = byte_source.Pace("http://slow")
    pace.add(int(2 * byte_source.LEAST_RATE * byte_source.PATIENCE))
    with pytest.raises(OSError, match="the server is too slow"):
        pace.add(1)


def test_a_bucket_that_needs_a_key_is_told_with_a_remedy() -> None:
    """By the class of botocore, which may be missing."""
    error = type("NoCredentialsError", (Exception,), {})("Unable to locate credentials")
    raised = byte_source.failed("s3://runs/a", error)
    assert raised.filename == "s3://runs/a"
    assert "Unable to locate credentials; set AWS_PROFILE, or pass --storage-options" in str(raised)


def test_errors_of_url_libraries_name_the_url_and_others_stay() -> None:
    class Refused(Exception):
        """Of a library."""

    @byte_source.naming_urls
    def read(name: str, error: Exception) -> None:
        raise error

    for name, error, kind in (
        ("s3://a/b", Refused("no access"), OSError),
        ("plain", Refused("no access"), Refused),
        ("s3://a/b", ConfigError("said"), ConfigError),
    ):
        with pytest.raises(kind, match=r"s3://a/b|no access|said"):
            read(name, error)


def test_paths_of_urls() -> None:
    assert path_of("file:///tmp/x") == path_of("/tmp/x") == Path("/tmp/x")
    assert path_of(Path("a")) == Path("a")
    with pytest.raises(ConfigError, match="nothing://x: Unsupported filesystem: 'nothing'"):
        path_of("nothing://x")


def test_errors_of_others_keep_their_names(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="other"), Publication().file(tmp_path / "x"):
        raise OSError(5, "other", "elsewhere")
    assert not list(tmp_path.iterdir())


def test_an_index_that_no_reader_accepts_is_not_written() -> None:
    with pytest.raises(ConfigError, match="does not fit into one file"):
        pack_index(Index("by hand", "", (), tree={"root": [0] * (1 << 22), "storages": []}))


def test_the_bounds_of_chunks_are_those_of_the_header() -> None:
    source = open_bytes(File().bytes()).tensors["w"]
    assert list(source.chunk_bounds()) == [(0, 4)]
    source.checked_payload(0)


# --- what a chunk is decoded from -----------------------------------------------------------------


@dataclass(eq=False)
class Link:
    """A frame that is decoded from some others."""

    below: list[Link] = field(default_factory=list)
    size: int = 1
    n_decoded: int = 0

    def needs(self, only_codes: bool) -> list[Node]:
        return [(one, only_codes) for one in self.below]

    def decoded(self, index: int, only_codes: bool, held: DecodedBases) -> Decoded:
        assert all((one, only_codes) in held for one in self.below)
        self.n_decoded += 1
        return Decoded(np.zeros(self.size, np.uint8), None)


def test_each_frame_below_a_chunk_is_decoded_once() -> None:
    bottom = Link()
    left, right = Link([bottom]), Link([bottom])
    top = Link([left, right, left])
    assert set(gather(0, [(top, False)])) == {(top, False)}
    assert [one.n_decoded for one in (bottom, left, right, top)] == [1, 1, 1, 1]


def test_a_chunk_that_needs_too_many_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    top = Link()
    for _ in range(MAX_FRAMES - 1):
        top = Link([top])
    gather(0, [(top, False)])
    with pytest.raises(LimitError, match="more than 256 others"):
        gather(0, [(Link([top]), False)])
    monkeypatch.setattr(caches, "MAX_HELD_BYTES", 10)
    with pytest.raises(LimitError, match="at once"):
        gather(0, [(Link([Link(size=5), Link(size=6)]), False)])


def test_vectors_that_nobody_needs_are_few() -> None:
    cache = HeaderCache()
    cache.charge_idle(MAX_IDLE_ELEMENTS)
    with pytest.raises(LimitError, match="tensors without patterns"):
        cache.charge_idle(1)
