"""Branches of the parsers that no vector reaches: threads, caches, URLs, failing disks, files that change."""

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


def test_a_frame_header_whose_length_differs_from_its_length_field_is_corrupt() -> None:
    content = Frame().header[:-8] + b"\0"
    with pytest.raises(CorruptionError, match="length does not match"):
        FrameHeader.parse(content + xxh64(content).to_bytes(8, "little"))
    with pytest.raises(CorruptionError, match="of 11 bytes"):
        FrameHeader.parse(bytes(11))


def test_a_chunk_that_contradicts_its_frame_header_is_corrupt() -> None:
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


def test_an_error_of_the_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(10))

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    source = FileBytes(path)
    monkeypatch.setattr(byte_source.os, "preadv", fail)
    with pytest.raises(OSError, match="f'"):
        source.read(0, 10)


def test_a_system_without_preadv_seeks_and_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(b"0123456789")
    monkeypatch.delattr(os, "preadv", raising=False)  # as on Windows
    source = FileBytes(path)
    assert (source.read(3, 4).tobytes(), source.read(0, 1).tobytes()) == (b"3456", b"0")
    source.close()


def test_large_reads_are_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(range(10)))
    monkeypatch.setattr(byte_source, "MAX_READ", 3)
    assert FileBytes(path).read(0, 10).tolist() == list(range(10))


def test_a_pipe_is_not_opened_as_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        FileBytes(tmp_path / "pipe")


# --- caches -------------------------------------------------------------------------------------


def test_the_chunk_cache_evicts_the_least_recently_used_chunks() -> None:
    """Of four chunks with room for three, the second is decoded again; a larger chunk is never cached."""
    cache = CachedChunks(3 * VALUES.nbytes)
    for i in range(3):
        cache.get(("w", i), lambda: Decoded(VALUES.copy(), None))
    cache.get(("w", 0), lambda: pytest.fail("the value is cached"))
    cache.get(("w", 3), lambda: Decoded(VALUES.copy(), None))
    assert cache.weight == 3 * VALUES.nbytes
    decoded_again: list[int] = []
    cache.get(("w", 1), lambda: decoded_again.append(1) or Decoded(VALUES.copy(), None))
    assert decoded_again == [1]
    cache.get(("big", 0), lambda: Decoded(np.zeros(1000, np.uint8), None))
    assert cache.weight == 3 * VALUES.nbytes
    cache.clear()
    assert cache.weight == 0


def test_a_chunk_that_two_threads_need_is_decoded_once() -> None:
    cache, started, release, calls = CachedChunks(), threading.Event(), threading.Event(), []

    def decode() -> Decoded:
        calls.append(1)
        started.set()
        release.wait(60)
        return Decoded(VALUES, None)

    threads = [threading.Thread(target=cache.get, args=(("w", 0), decode)) for _ in range(2)]
    threads[0].start()
    started.wait(60)
    threads[1].start()
    threads[1].join(0.1)  # let it wait for the lock; the test also passes if it is later
    release.set()
    for thread in threads:
        thread.join(60)
    assert calls == [1]


def test_a_chunk_that_another_thread_cached_meanwhile_is_counted_once() -> None:
    cache, chunk = CachedChunks(), Decoded(VALUES, None)

    def decode() -> Decoded:
        cache._keep(("w", 0), chunk)
        return chunk

    cache.get(("w", 0), decode)
    assert cache.weight == VALUES.nbytes


def test_the_last_chunks_stay_within_their_capacity() -> None:
    """Two chunks fit. A chunk of the next file removes the one that it replaces, even if it does not fit."""
    last, records = caches.LastChunks(lambda: 2 * VALUES.nbytes), [ChunkRecord(i, i, ()) for i in range(2)]
    for i in range(3):
        last.put("w", i, records[0], Decoded(VALUES, None))
    assert [last.get("w", i, records[0]) is not None for i in range(3)] == [True, True, False]
    assert last.get("w", 0, records[1]) is None, "the record of another file"
    last.put("w", 0, records[1], Decoded(np.zeros(100, np.uint32), None))
    assert last.get("w", 0, records[0]) is last.get("w", 0, records[1]) is None
    assert last.n_bytes == VALUES.nbytes


def test_the_header_cache_keeps_the_newest_header_whatever_its_size() -> None:
    cache, header = HeaderCache(1), Frame().parse()

    def parse() -> FrameHeader:
        cache.get("a", lambda: header)  # as if another thread were faster
        return header

    assert cache.get("a", parse) is header
    assert cache.get("b", lambda: header) is header
    parsed_again: list[int] = []
    cache.get("b", lambda: pytest.fail("the value is cached"))
    cache.get("a", lambda: parsed_again.append(1) or header)
    assert parsed_again == [1]


# --- container ----------------------------------------------------------------------------------


def test_a_plain_safetensors_file_is_not_opened_as_a_container() -> None:
    source = MemoryBytes(build_header([], None))
    with pytest.raises(FormatError, match=r"not a \.ckptz file"):
        Container(source, read_envelope(source))


def test_json_with_an_unpaired_surrogate_is_corrupt() -> None:
    """Strings of four of these escapes and characters; the others must have the value that Python parses."""
    pieces = (r"\ud800", r"\uDBff", r"\udc00", r"\uDFFF", r"\ud7ff", r"\ue000", r"\\", r"\n", "ud800", "x")
    for combination in itertools.product(pieces, repeat=4):
        text = f'["{"".join(combination)}"]'
        value = json.loads(text)
        if any("\ud800" <= character <= "\udfff" for character in value[0]):
            with pytest.raises(CorruptionError, match="header: not valid JSON"):
                strict_json(text.encode(), "header")
        else:
            assert strict_json(text.encode(), "header") == value


def test_an_index_with_white_space_or_without_compression_is_parsed_the_same() -> None:
    entry = TensorEntry("w", "F32", (2, 3), 0, 40, "0" * 16)
    packed = pack_index(Index("test", "0" * 64, (entry,), metadata={"a": "ä"}, tree={"x": [1, 0.5, None]}))
    text = zlib.decompress(packed[1:])
    indented = json.dumps(json.loads(text), indent=1).encode()
    assert parse_index(b"\0" + indented) == parse_index(b"\0" + text) == parse_index(packed)
    for duplicate_key in (b'{"a":1,"a":1}', b'{"a": 1, "a": 1}'):
        with pytest.raises(CorruptionError, match="a key occurs twice"):
            strict_json(duplicate_key, "header")


def test_an_index_above_the_limit_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MAX_INDEX_BYTES", 10)
    with pytest.raises(CorruptionError, match="larger than 64 MiB"):
        open_bytes(File().bytes())


def test_decoded_and_cached_frames_are_tensor_sources() -> None:
    source = open_bytes(File().bytes()).tensors["w"]
    decoded = reader._DecodedChunk(source, source.decoded(0, False, {}))
    cached = CachedTensor.of_frame(source)
    assert source.decoded(0, True, {(source, False): decoded.chunk}) is decoded.chunk
    for view in (decoded, cached):
        assert (view.dtype, view.shape) == (source.dtype, source.shape)
        assert view.patterns(0, 4).tobytes() == b"\1\2\3\4"
        assert view.codes(0, 4) is None
    assert cached.n_codes is None
    assert cached.stored == source.stored


def test_an_array_source_has_no_codes() -> None:
    source = ArraySource.from_buffer(dtype_of("U8"), (4,), b"\1\2\3\4")
    assert (source.stored, source.n_codes) == (None, None)
    patterns, codes = source.patterns_and_codes(1, 3)
    assert (patterns.tobytes(), codes) == (b"\2\3", None)


def test_a_chunk_whose_base_or_context_tensor_is_not_open_is_refused() -> None:
    sources = ChunkSources(0, 2)
    with pytest.raises(MissingBaseError, match="its base is not open"):
        sources.base_patterns()
    with pytest.raises(MissingBaseError, match="the base is not open"):
        sources.base_codes()
    with pytest.raises(CorruptionError, match="'v', which is not open"):
        sources.patterns_of("v")


# --- URLs ---------------------------------------------------------------------------------------


def test_bytes_of_a_url_are_read_by_ranges() -> None:
    path = path_of("memory://parser/bytes")
    path.write_bytes(b"0123456789")
    source = UrlBytes(path)
    assert (source.size, source.read(3, 4).tobytes()) == (10, b"3456")
    with pytest.raises(TruncatedError, match="should have 11"):
        source.read(10, 1)
    source.size = 20  # as if the file had shrunk after it was opened
    with pytest.raises(OSError, match="only 2 of 5 bytes came through"):
        source.read(8, 5)
    source.close()
    with pytest.raises(FileNotFoundError, match="memory://parser/none"):
        UrlBytes(path_of("memory://parser/none"))


@pytest.mark.parametrize(
    ("missing", "remedy"), [("upath", r"'ckptz\[remote\]' s3fs"), ("botocore", "botocore")]
)
def test_a_url_whose_package_is_missing_says_what_to_install(
    missing: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def module(_: str) -> None:
        raise ImportError("no module", name=missing)

    monkeypatch.setattr(byte_source.lazy, "module", module)
    with pytest.raises(ConfigError, match=rf"s3://a/b: needs a package .* pip install {remedy}$"):
        path_of("s3://a/b")


def test_a_file_system_without_file_information_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def info(*_: object, **__: object) -> None:
        raise NotImplementedError

    path = path_of("memory://parser/no-info")
    path.write_bytes(b"0")
    monkeypatch.setattr(type(path.fs), "info", info)
    assert path_of("memory://parser/no-info") == path


def test_a_server_below_the_minimum_rate_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call is 1.01 `PATIENCE` later: one with twice `LEAST_RATE` passes, the next has one byte."""
    now = itertools.count(step=byte_source.PATIENCE)
    monkeypatch.setattr(byte_source.time, "monotonic", lambda: next(now) * 1.01)
    pace = byte_source.Pace("http://slow")
    pace.add(int(2 * byte_source.LEAST_RATE * byte_source.PATIENCE))
    with pytest.raises(OSError, match="the server is too slow"):
        pace.add(1)


def test_missing_credentials_are_reported_with_a_remedy() -> None:
    """The error is recognised by its class name, because botocore may not be installed."""
    error = type("NoCredentialsError", (Exception,), {})("Unable to locate credentials")
    os_error = byte_source.failed("s3://runs/a", error)
    assert os_error.filename == "s3://runs/a"
    assert "Unable to locate credentials; set AWS_PROFILE, or pass --storage-options" in str(os_error)


def test_only_errors_of_url_libraries_become_errors_that_name_the_url() -> None:
    class AccessError(Exception):
        """An error of a URL library."""

    @byte_source.naming_urls
    def read(name: str, error: Exception) -> None:
        raise error

    for name, error, kind in (
        ("s3://a/b", AccessError("no access"), OSError),
        ("plain", AccessError("no access"), AccessError),
        ("s3://a/b", ConfigError("other"), ConfigError),
    ):
        with pytest.raises(kind, match=r"s3://a/b|no access|other"):
            read(name, error)


def test_only_urls_of_files_become_local_paths() -> None:
    assert path_of("file:///tmp/x") == path_of("/tmp/x") == Path("/tmp/x")
    assert path_of(Path("a")) == Path("a")
    with pytest.raises(ConfigError, match="nothing://x: Unsupported filesystem: 'nothing'"):
        path_of("nothing://x")


def test_an_error_about_another_file_is_not_renamed(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="other"), Publication().file(tmp_path / "x"):
        raise OSError(5, "other", "another-file")
    assert not list(tmp_path.iterdir())


def test_an_index_above_the_limits_of_readers_is_not_written() -> None:
    with pytest.raises(ConfigError, match="does not fit into one file"):
        pack_index(Index("test", "", (), tree={"root": [0] * (1 << 22), "storages": []}))


def test_the_only_chunk_of_a_tensor_has_all_its_patterns() -> None:
    source = open_bytes(File().bytes()).tensors["w"]
    assert list(source.chunk_bounds()) == [(0, 4)]
    source.checked_payload(0)


# --- dependencies of a chunk --------------------------------------------------------------------


@dataclass(eq=False)
class FakeFrame:
    """A frame with given dependencies and decoded size in bytes, which counts how often it is decoded."""

    dependencies: list[FakeFrame] = field(default_factory=list)
    size: int = 1
    n_decoded: int = 0

    def needs(self, only_codes: bool) -> list[Node]:
        return [(frame, only_codes) for frame in self.dependencies]

    def decoded(self, index: int, only_codes: bool, dependencies: DecodedBases) -> Decoded:
        assert all(node in dependencies for node in self.needs(only_codes))
        self.n_decoded += 1
        return Decoded(np.zeros(self.size, np.uint8), None)


def test_each_dependency_of_a_chunk_is_decoded_once() -> None:
    bottom = FakeFrame()
    left, right = FakeFrame([bottom]), FakeFrame([bottom])
    top = FakeFrame([left, right, left])
    assert set(gather(0, [(top, False)])) == {(top, False)}
    assert [frame.n_decoded for frame in (bottom, left, right, top)] == [1, 1, 1, 1]


def test_a_chunk_with_too_many_dependencies_or_too_much_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    top = FakeFrame()
    for _ in range(MAX_FRAMES - 1):
        top = FakeFrame([top])
    gather(0, [(top, False)])
    with pytest.raises(LimitError, match="more than 256 others"):
        gather(0, [(FakeFrame([top]), False)])
    monkeypatch.setattr(caches, "MAX_HELD_BYTES", 10)
    with pytest.raises(LimitError, match="at once"):
        gather(0, [(FakeFrame([FakeFrame(size=5), FakeFrame(size=6)]), False)])


def test_outer_vectors_of_empty_tensors_are_limited() -> None:
    cache = HeaderCache()
    cache.charge_idle(MAX_IDLE_ELEMENTS)
    with pytest.raises(LimitError, match="tensors without patterns"):
        cache.charge_idle(1)
