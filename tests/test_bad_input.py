"""Damaged and hostile files: one line and an exit code by cause, or else exactly the right tensors."""

from __future__ import annotations

import contextlib
import json
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cli_support import (
    Content,
    a_state,
    bomb,
    ckptz,
    content_of,
    forge,
    plain_bytes,
    spread,
    write_index,
    write_plain,
)
from conftest import Chain

from ckptz.bits.checksum import xxh64
from ckptz.codec.frame import CHECKSUM_BYTES
from ckptz.container.index import envelope_metadata
from ckptz.convert.inspect import inspect_file
from ckptz.convert.restore import RestoreOptions, restore_file
from ckptz.convert.verify import VerifyOptions, verify_file
from ckptz.entropy.streams import CoderId, decode_stream, encode_stream
from ckptz.errors import CkptzError, FormatError, LimitError

N_SAMPLES = 300

# --- files that are not what they seem ------------------------------------------------------------


@pytest.mark.parametrize("verb", ["compress", "restore", "inspect", "verify"])
def test_a_missing_file_is_named(verb: str, tmp_path: Path) -> None:
    run = ckptz(verb, tmp_path / "gone.safetensors", fails=True)
    assert run.exit_code == 5
    assert "gone.safetensors" in run.error


def test_a_folder_without_tensors_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    run = ckptz("compress", tmp_path / "empty", fails=True)
    assert run.exit_code == 2
    assert "empty" in run.error


def test_a_truncated_safetensors_file_leaves_nothing(tmp_path: Path) -> None:
    whole = plain_bytes(a_state())
    for n in spread(len(whole), 30):
        if n < len(whole):
            (tmp_path / "cut.safetensors").write_bytes(whole[:n])
            run = ckptz("compress", tmp_path / "cut.safetensors", fails=True)
            assert run.exit_code == 3, n
            assert "cut.safetensors" in run.error
    assert [path.name for path in tmp_path.iterdir()] == ["cut.safetensors"]


HEADERS = {
    "a key twice": b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
    "a field twice": b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
    "overlap": b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    b'"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
    "a hole": b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}',
    "a negative shape": b'{"a":{"dtype":"U8","shape":[-1,-1],"data_offsets":[0,1]}}',
    "an absurd shape": b'{"a":{"dtype":"U8","shape":[9223372036854775807,9],"data_offsets":[0,1]}}',
    "an endless number": b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}',
    "a float for a size": b'{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}',
    "a half surrogate": b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
    "half a surrogate in bytes": b'{"\xed\xa0\x80":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
    "half a surrogate in a value": b'{"__metadata__":{"a":"\\udfff"},'
    b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
    "UTF-16": '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.encode("utf-16-le"),
    "no object": b"[]",
    "not JSON": b"{",
    "deep nesting": b"[" * 100_000,
    "a number for metadata": b'{"__metadata__":{"a":1},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_hostile_safetensors_header_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(len(HEADERS[what]).to_bytes(8, "little") + HEADERS[what] + b"\0")
    run = ckptz("compress", path, fails=True)
    assert run.exit_code == 3
    assert "bad.safetensors" in run.error
    assert len(run.error) < 1000


def test_a_dtype_of_the_future_is_unsupported(tmp_path: Path) -> None:
    path = write_plain(tmp_path / "new.safetensors", {"a": ("F128", (1,), bytes(16))})
    assert ckptz("compress", path, fails=True).exit_code == 4


@pytest.mark.parametrize("name", ["../../etc/passwd", "/abs", "a\x1b[2Jb", "line\nbreak", "\u202egnp", ""])
def test_hostile_tensor_names_survive_and_never_reach_the_terminal(name: str, tmp_path: Path) -> None:
    rows = {name: ("U8", (3,), b"abc"), "layer.weight": ("F32", (2,), bytes(8))}
    path = write_plain(tmp_path / "names.safetensors", rows, {name: name})
    ckptz("compress", path)
    packed = tmp_path / "names.ckptz"
    ckptz("restore", packed, "-o", tmp_path / "back.safetensors")
    assert content_of(tmp_path / "back.safetensors") == content_of(path)
    shown = ckptz("inspect", packed, "--tensors").stdout
    assert all(line.isprintable() for line in shown.split("\n"))
    assert ckptz("inspect", packed, "--json").json["tensors"][0]["name"] == name
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "back.safetensors",
        "names.ckptz",
        "names.safetensors",
    ]


def test_errors_escape_control_characters(tmp_path: Path) -> None:
    path = write_plain(tmp_path / "a\x1b[31m\nb.safetensors", a_state())
    packed = tmp_path / "a.ckptz"
    ckptz("compress", path, "-o", packed)
    other = write_plain(tmp_path / "other.safetensors", {"x\x1b[0m\r": ("U8", (1,), b"1")})
    for arguments in (["compress", f"{path}.gone"], ["verify", packed, "--against", other]):
        assert ckptz(*arguments, fails=True).error.isprintable()


def test_a_reserved_tensor_name_is_refused(tmp_path: Path) -> None:
    path = write_plain(tmp_path / "r.safetensors", {"__ckptz__.index": ("U8", (1,), b"1")})
    run = ckptz("compress", path, fails=True)
    assert "__ckptz__.index" in run.error
    assert run.exit_code in (2, 3)


# --- damage ---------------------------------------------------------------------------------------


def outcome(path: Path) -> Content | CkptzError:
    """What restoring would give, or the error."""
    try:
        return content_of(path)
    except CkptzError as error:
        return error


def check_damage(path: Path, variants: Iterable[bytes], target: Path | None = None) -> int:
    """Restore each variant of `target`, or of `path`; all must fail cleanly or change nothing.

    Returns:
        How many changed nothing.
    """
    expected = content_of(path)
    target = target or path
    whole, n_same = target.read_bytes(), 0
    try:
        for variant in variants:
            target.write_bytes(variant)
            found = outcome(path)
            if isinstance(found, CkptzError):
                assert "\n" not in str(found)
            else:
                assert found == expected
                n_same += 1
    finally:
        target.write_bytes(whole)
    return n_same


def flipped(whole: bytes, bits: Iterable[int]) -> Iterator[bytes]:
    for bit in bits:
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


def cut(whole: bytes, lengths: Iterable[int]) -> Iterator[bytes]:
    return (whole[:n] for n in lengths if n < len(whole))


def regions_of(raw: bytes) -> dict[str, range]:
    """Header, first frame header, streams, index: bit positions."""
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    index = header["__ckptz__.index"]["data_offsets"][0] + begin
    n_frame = int.from_bytes(raw[begin : begin + 4], "little")
    return {
        "header": range(8 * begin),
        "frame header": range(8 * begin, 8 * (begin + n_frame)),
        "payload": range(8 * (begin + n_frame), 8 * index),
        "index": range(8 * index, 8 * len(raw)),
    }


@pytest.mark.parametrize("name", ["anchor", "delta"])
def test_a_cut_file_is_never_believed(name: str, chain: Chain) -> None:
    path: Path = getattr(chain, name)
    whole = path.read_bytes()
    assert check_damage(path, cut(whole, spread(len(whole), N_SAMPLES))) == 0


def test_a_longer_file_is_never_believed(chain: Chain) -> None:
    whole = chain.anchor.read_bytes()
    assert check_damage(chain.anchor, [whole + b"\0", whole + whole]) == 0


@pytest.mark.parametrize("region", ["header", "frame header", "payload", "index"])
@pytest.mark.parametrize("name", ["anchor", "delta"])
def test_a_flipped_bit_is_never_believed(name: str, region: str, chain: Chain) -> None:
    path: Path = getattr(chain, name)
    whole = path.read_bytes()
    where = regions_of(whole)[region]
    bits = random.Random(0).sample(where, min(N_SAMPLES, len(where)))
    assert check_damage(path, flipped(whole, bits)) == 0


def test_a_flipped_bit_in_the_base_is_never_believed(chain: Chain) -> None:
    whole = chain.anchor.read_bytes()
    bits = random.Random(1).sample(range(8 * len(whole)), N_SAMPLES)
    check_damage(chain.delta, flipped(whole, bits), target=chain.anchor)


def test_a_file_that_denies_being_ckptz_is_not_read_as_plain(chain: Chain) -> None:
    whole = chain.anchor.read_bytes()
    changed = whole.replace(b'"ckptz.format":"ckptz"', b'"ckptz.format":"cjptz"')
    assert changed != whole
    assert check_damage(chain.anchor, [changed]) == 0


def small_chain(folder: Path) -> Chain:
    """As `chain`, small enough for every bit: BF16 weights that move little use shared tables."""
    made = Chain(folder)
    state = {key: a_state(n=2100)[key] for key in ("layer.half", "counts", "scalar")}
    moved = {key: a_state(n=2100, drift=0.002)[key] for key in state}
    write_plain(made.first, state, {"step": "1"})
    write_plain(made.second, moved, {"step": "2"})
    ckptz("compress", made.first, made.second, "--chain", "--jobs", 1)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", ["anchor", "delta"])
def test_every_cut_and_every_flipped_bit_is_noticed(name: str, tmp_path: Path) -> None:
    path: Path = getattr(small_chain(tmp_path), name)
    whole = path.read_bytes()
    assert check_damage(path, cut(whole, range(len(whole)))) == 0
    assert check_damage(path, flipped(whole, range(8 * len(whole)))) == 0


@pytest.mark.slow
def test_every_flipped_bit_of_a_plain_base_is_noticed(tmp_path: Path) -> None:
    chain = small_chain(tmp_path)
    chain.anchor.unlink()
    whole = chain.first.read_bytes()
    check_damage(chain.delta, flipped(whole, range(8 * len(whole))), target=chain.first)


# --- forgeries: damage with checksums that fit ----------------------------------------------------


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of files need not last a power cut."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def try_everything(path: Path, folder: Path) -> None:
    """Every verb ends well or with an error of ours, in bounded memory; nothing appears elsewhere."""
    target = folder / "forged-out"
    actions: tuple[Callable[[], object], ...] = (
        lambda: inspect_file(path),
        lambda: verify_file(path, VerifyOptions(jobs=1)),
        lambda: restore_file(path, target, RestoreOptions(jobs=1, force=True, max_decoded_bytes=1 << 24)),
    )
    for action in actions:
        with contextlib.suppress(CkptzError, FileNotFoundError):
            action()


HOSTILE: tuple[Any, ...] = (
    -1,
    0,
    1 << 40,
    1 << 63,
    1 << 70,
    1e308,
    True,
    None,
    "",
    "../x",
    "/x",
    "\0",
    [],
    {},
)


def mutations(value: Any) -> Iterator[Any]:
    """`value` with one part replaced by something hostile, removed or added, at every depth."""
    yield from HOSTILE
    if isinstance(value, dict):
        for key in value:
            yield {k: v for k, v in value.items() if k != key}
            yield from ({**value, key: part} for part in mutations(value[key]))
        yield {**value, "unknown": 1}
    if isinstance(value, list) and value:
        yield value[1:]
        yield [*value, value[-1]]
        for i in (0, len(value) - 1):
            yield from ([*value[:i], part, *value[i + 1 :]] for part in mutations(value[i]))


def hf_folder(folder: Path) -> Path:
    """Two shards, their index and another file."""
    folder.mkdir()
    state = a_state(n=200)
    names = list(state)
    homes = {name: f"model-0000{1 + (i > 3)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(homes.values()):
        write_plain(folder / file, {n: state[n] for n in names if homes[n] == file}, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    (folder / "config.json").write_text("{}")
    return folder


def sampled(variants: Iterable[Any], most: int) -> list[Any]:
    found = list(variants)
    return [found[i] for i in spread(len(found), most)]


@pytest.mark.parametrize("most", [400, pytest.param(10**9, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("quick_disk")
def test_a_forged_index_gives_an_error_of_ours(most: int, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf")
    ckptz("compress", folder)
    kept: list[Any] = []
    genuine = forge(
        folder / "model.ckptz", folder / "forged.ckptz", lambda index: kept.append(index) or index
    )
    try_everything(genuine, tmp_path)
    for variant in sampled(mutations(kept[0]), most):
        path = forge(folder / "model.ckptz", folder / "forged.ckptz", lambda _, v=variant: v)
        try_everything(path, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} <= {"hf", "forged-out"}


@pytest.mark.parametrize("most", [300, pytest.param(10**9, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["anchor", "delta"])
@pytest.mark.usefixtures("quick_disk")
def test_a_forged_frame_header_gives_an_error_of_ours(name: str, most: int, chain: Chain) -> None:
    path: Path = getattr(chain, name)
    whole = path.read_bytes()
    where = regions_of(whole)["frame header"]
    begin, end = where.start // 8, where.stop // 8 - CHECKSUM_BYTES
    bits = range(8 * begin, 8 * end)
    for bit in (bits[i] for i in spread(len(bits), most)):
        [changed] = flipped(whole, [bit])
        checksum = xxh64(changed[begin:end]).to_bytes(CHECKSUM_BYTES, "little")
        path.write_bytes(changed[:end] + checksum + changed[end + CHECKSUM_BYTES :])
        try_everything(path, chain.folder)


@pytest.mark.parametrize("n_cases", [1500, pytest.param(60_000, marks=pytest.mark.slow)])
def test_any_bytes_given_to_any_coder_end_in_an_error_or_in_codes(n_cases: int) -> None:
    """Damaged streams reach the decoders before any checksum is looked at."""
    rng = np.random.default_rng(0)
    for _ in range(n_cases):
        n = int(rng.integers(1, 3000))
        codes = np.minimum(rng.geometric(rng.uniform(0.05, 0.999), n) - 1, 255).astype(np.uint8)
        coder, stream = encode_stream(codes)
        data = np.frombuffer(stream, np.uint8)[: rng.integers(0, len(stream) + 1) or None].copy()
        data[rng.integers(0, len(data), 3)] = rng.integers(0, 256, 3)
        out = np.empty(int(rng.integers(1, 3000)) if rng.random() < 0.3 else n, np.uint8)
        coder = CoderId(rng.integers(0, 6)) if rng.random() < 0.2 else coder
        with contextlib.suppress(FormatError):
            decode_stream(coder, data.data, out)


# --- sizes ----------------------------------------------------------------------------------------


def test_a_valid_bomb_is_refused_before_the_disk_fills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bomb(tmp_path / "bomb.ckptz", 4000)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1 << 30))
    run = ckptz("restore", path, fails=True)
    assert run.exit_code == 3
    assert "free some space" in run.error
    assert [p.name for p in tmp_path.iterdir()] == ["bomb.ckptz"]
    assert ckptz("inspect", path, "--json").json["tensor_bytes"] == 4000 << 20


def test_a_limit_of_the_caller_is_kept(tmp_path: Path) -> None:
    path = bomb(tmp_path / "bomb.ckptz", 4)
    with pytest.raises(LimitError, match=r"bomb\.ckptz"):
        restore_file(path, options=RestoreOptions(max_decoded_bytes=(4 << 20) - 1))
    restore_file(path, options=RestoreOptions(max_decoded_bytes=4 << 20))
    assert (tmp_path / "bomb.safetensors").stat().st_size > 4 << 20


def edit_first_tensor(**fields: object) -> Callable[[Any], Any]:
    def edit(index: Any) -> Any:
        index["tensors"][0].update(fields)
        return index

    return edit


@pytest.mark.parametrize(
    "fields",
    [
        {"shape": [1 << 62, 1 << 62]},
        {"shape": [-1]},
        {"shape": [1] * 65},
        {"shape": [1 << 200]},
        {"n_bytes": 1 << 60},
        {"offset": 1 << 60},
        {"offset": -8},
        {"checksum": "0" * 15 + "g"},
        {"dtype": "F31"},
        {"name": "another"},
    ],
    ids=str,
)
def test_an_index_with_absurd_claims_is_refused(fields: dict[str, object], chain: Chain) -> None:
    path = forge(chain.anchor, chain.folder / "forged.ckptz", edit_first_tensor(**fields))
    for verb in ("restore", "verify", "inspect"):
        run = ckptz(verb, path, fails=True)
        assert run.exit_code == (4 if "dtype" in fields else 3)
        assert "forged.ckptz" in run.error


def test_an_index_that_inflates_without_end_is_refused(chain: Chain) -> None:
    header = {"__metadata__": envelope_metadata(["lossless"], b"")}
    packed = b"\x01" + zlib.compress(b" " * (65 << 20))
    path = write_index(chain.folder / "inflating.ckptz", header, b"", packed)
    assert len(packed) < 100_000
    run = ckptz("inspect", path, fails=True)
    assert run.exit_code == 3
    assert "64 MiB" in run.error


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 100_000, b"\xff", b""])
def test_an_index_that_is_no_index_is_refused(text: bytes, chain: Chain) -> None:
    header = {"__metadata__": envelope_metadata(["lossless"], b"")}
    for packed in (b"\x00" + text, b"\x01" + zlib.compress(text), b"\x02" + text, text):
        path = write_index(chain.folder / "no-index.ckptz", header, b"", packed)
        assert ckptz("inspect", path, fails=True).exit_code == 3


def test_a_shape_of_millions_of_dimensions_takes_no_time(tmp_path: Path) -> None:
    sizes = b",".join([b"9223372036854775807"] * 1_000_000)
    header = b'{"a":{"dtype":"U8","shape":[' + sizes + b'],"data_offsets":[0,1]}}'
    path = tmp_path / "wide.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"1")
    assert ckptz("compress", path, fails=True).exit_code == 3


def test_more_dimensions_than_a_frame_holds_are_refused_when_written(tmp_path: Path) -> None:
    path = write_plain(tmp_path / "deep.safetensors", {"a": ("U8", (1,) * 65, b"1")})
    run = ckptz("compress", path, fails=True)
    assert run.exit_code == 4
    assert "deep.safetensors" in run.error
    assert "'a'" in run.error


# --- newer files, wrong and missing bases ---------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"ckptz.required_features":"lossless"', b'"ckptz.required_features":"sideways"'),
        (b'"ckptz.version":"0.1"', b'"ckptz.version":"9.1"'),
    ],
)
def test_what_a_newer_ckptz_wrote_is_unsupported(old: bytes, new: bytes, chain: Chain) -> None:
    whole = chain.anchor.read_bytes()
    assert old in whole
    chain.anchor.write_bytes(whole.replace(old, new))
    for verb in ("restore", "verify", "inspect"):
        run = ckptz(verb, chain.anchor, "--json", fails=True)
        assert run.exit_code == 4
        assert run.json["error"]["kind"] == "UnsupportedError"
        assert "step-1.ckptz" in run.error


def test_a_missing_base_is_named(chain: Chain) -> None:
    chain.anchor.unlink()
    chain.first.unlink()
    for verb in ("restore", "verify"):
        run = ckptz(verb, chain.delta, fails=True)
        assert run.exit_code == 5
        assert "step-1.ckptz" in run.error
        assert "--search-path" in run.error
    report = ckptz("inspect", chain.delta, "--json").json
    assert "step-1.ckptz" in report["broken"]
    assert report["chain"][0]["path"] is None
    assert {tensor["n_frames"] for tensor in report["tensors"]} == {1, None}


def test_a_wrong_base_is_not_taken_for_the_right_one(chain: Chain) -> None:
    write_plain(chain.first, a_state(seed=5))
    ckptz("compress", chain.first, "-o", chain.anchor, "--force")
    run = ckptz("restore", chain.delta, "-o", chain.folder / "out.safetensors", fails=True)
    assert run.exit_code == 5
    assert "another checkpoint" in run.error


def test_a_base_that_is_its_own_delta_ends(chain: Chain) -> None:
    def to_itself(index: Any) -> Any:
        index["base"] |= {"content_id": index["content_id"], "file": "loop.ckptz"}
        return index

    path = forge(chain.delta, chain.folder / "loop.ckptz", to_itself)
    chain.second.unlink()  # it would be a base with that content id
    assert ckptz("restore", path, fails=True).exit_code == 5


@pytest.mark.parametrize("file", ["../step-1.ckptz", "/etc/passwd", "..", ""])
def test_a_base_name_does_not_lead_out_of_the_folder(file: str, chain: Chain) -> None:
    def elsewhere(index: Any) -> Any:
        index["base"]["file"] = file
        return index

    path = forge(chain.delta, chain.folder / "elsewhere.ckptz", elsewhere)
    run = ckptz("verify", path, fails=True)
    assert run.exit_code == 3
    assert "plain file name" in run.error


@pytest.mark.parametrize("file", ["../evil", "/tmp/evil", "a/b", "a\\b", "..", "c:evil", "nul\0"])
def test_a_shard_does_not_lead_out_of_the_folder(file: str, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf")
    ckptz("compress", folder)

    def elsewhere(index: Any) -> Any:
        index["sharding"]["shards"][0]["file"] = file
        return index

    path = forge(folder / "model.ckptz", tmp_path / "evil.ckptz", elsewhere)
    before = sorted(tmp_path.rglob("*"))
    run = ckptz("restore", path, "-o", tmp_path / "out", fails=True)
    assert run.exit_code == 3
    assert set(tmp_path.rglob("*")) - set(before) <= {tmp_path / "out"}


def test_a_pickle_that_needs_code_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    path = tmp_path / "evil.pt"
    torch.save({"a": Evil()}, path)
    run = ckptz("compress", path, fails=True)
    assert run.exit_code == 4
    assert "evil.pt" in run.error
    assert not (tmp_path / "ran").exists()
