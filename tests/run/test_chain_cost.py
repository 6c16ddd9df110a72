"""The cost of decoding a chain is linear in its length, for all dependencies of its frames."""

from pathlib import Path
from typing import Any

import pytest

from ckptz.format import caches, reader
from ckptz.format.caches import HeaderCache
from ckptz.store.resolve import open_checkpoint
from tests.support.spec_files import STORED, File, Frame, plan, varint

ZEROS = bytes(4)
FLAT_TABLES = b"\1" + b"\0\0\0" + varint(256) + b"\0"  # one table of one symbol, for all 256 contexts


def xor_frame(context_tensor: str | None) -> Frame:
    """Return a frame of an XOR delta of zeros, with contexts by another tensor's magnitude."""
    rules = [b"\1" + varint(len(context_tensor)) + context_tensor.encode()] if context_tensor else []
    frame_plan = plan(predictor=1, mode=2, rules=rules, tail=FLAT_TABLES if rules else b"")
    return Frame(frame_plan, [(STORED, ZEROS)], ZEROS)


def crossed_chain(folder: Path, depth: int) -> Path:
    """Write a chain whose tensors a and b alternate as each other's context: most frames have two users."""
    file = File({name: Frame(plan(), [(STORED, ZEROS)], ZEROS) for name in "ab"})
    folder.joinpath("0.ckptz").write_bytes(file.bytes())
    for level in range(1, depth + 1):
        base = {"content_id": file.content_id(), "file": f"{level - 1}.ckptz", "depth": level}
        first, second = ("b", None) if level % 2 == 0 else (None, "a")
        frames = {"a": xor_frame(first), "b": xor_frame(second)}
        file = File(frames, features="delta,lossless", index={"base": base})
        folder.joinpath(f"{level}.ckptz").write_bytes(file.bytes())
    return folder / f"{depth}.ckptz"


def test_two_ways_to_a_frame_do_not_multiply_along_a_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, decode = [], reader.decode_chunk

    def counting(*arguments: Any) -> Any:
        calls.append(arguments)
        return decode(*arguments)

    monkeypatch.setattr(reader, "decode_chunk", counting)
    depth = 40
    checkpoint = open_checkpoint(crossed_chain(tmp_path, depth))
    try:
        assert checkpoint.tensors["a"].patterns(0, 4).tobytes() == ZEROS
    finally:
        checkpoint.close()
    assert len(calls) <= 4 * (depth + 1)


def test_headers_are_kept_up_to_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "_weight", lambda header: header)
    cache, parsed = HeaderCache(max_bytes=10), []

    def get(name: str, weight: int) -> None:
        cache.get(name, lambda: parsed.append(name) or weight)

    for name in (*"abacab", "huge", "huge"):
        get(name, 99 if name == "huge" else 4)
    assert parsed == ["a", "b", "c", "b", "huge"]
