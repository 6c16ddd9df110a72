"""Hostile files: one line of error and an exit code by cause, or exactly the right tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptz.errors import CkptzError
from tests.support.cli_support import (
    Chain,
    a_state,
    ckptz,
    content_of,
    forge,
    hf_folder,
    write_plain,
)

# --- files that are not what they seem ------------------------------------------------------------


HEADERS = {
    "a field twice": b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
    "a negative shape": b'{"a":{"dtype":"U8","shape":[-1,-1],"data_offsets":[0,1]}}',
    "an absurd shape": b'{"a":{"dtype":"U8","shape":[9223372036854775807,9],"data_offsets":[0,1]}}',
    "an endless number": b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}',
    "a half surrogate": b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
    "half a surrogate in a value": b'{"__metadata__":{"a":"\\udfff"},'
    b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
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


@pytest.mark.parametrize("suffix", [".safetensors", ".ckptz", ".pt"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "version https://git-lfs.github.com/spec/v1\n",
            "a pointer of Git LFS in place of the file; git lfs pull",
        ),
        ("<!DOCTYPE html>", "get it again"),
    ],
)
def test_what_was_not_downloaded_is_told_with_a_remedy(
    suffix: str, text: str, words: str, tmp_path: Path
) -> None:
    path = (tmp_path / "model").with_suffix(suffix)
    path.write_text(text)
    verb = ["restore", "-o", tmp_path / "out.safetensors"] if suffix == ".ckptz" else ["compress"]
    assert words in ckptz(*verb, path, fails=True).error


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
    assert {path.name for path in tmp_path.iterdir()} == {"back.safetensors", packed.name, path.name}


def test_errors_escape_control_characters(tmp_path: Path) -> None:
    path = write_plain(tmp_path / "a\x1b[31m\nb.safetensors", a_state())
    packed = tmp_path / "a.ckptz"
    ckptz("compress", path, "-o", packed)
    other = write_plain(tmp_path / "other.safetensors", {"x\x1b[0m\r": ("U8", (1,), b"1")})
    for arguments in (["compress", f"{path}.gone"], ["verify", packed, "--against", other]):
        assert ckptz(*arguments, fails=True).error.isprintable()


def test_a_file_that_denies_being_ckptz_is_not_read_as_plain(chain: Chain) -> None:
    content = chain.full.read_bytes()
    changed = content.replace(b'"ckptz.format":"ckptz"', b'"ckptz.format":"cjptz"')
    assert changed != content
    chain.full.write_bytes(changed)
    with pytest.raises(CkptzError):
        content_of(chain.full)


# --- newer files, wrong and missing bases ---------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"ckptz.required_features":"lossless"', b'"ckptz.required_features":"sideways"'),
        (b'"ckptz.version":"1.0"', b'"ckptz.version":"9.1"'),
    ],
)
def test_what_a_newer_ckptz_wrote_is_unsupported(old: bytes, new: bytes, chain: Chain) -> None:
    content = chain.full.read_bytes()
    assert old in content
    chain.full.write_bytes(content.replace(old, new))
    for verb in ("restore", "verify", "inspect"):
        run = ckptz(verb, chain.full, "--json", fails=True)
        assert run.exit_code == 4
        assert run.json["error"]["kind"] == "UnsupportedError"
        assert "step-1.ckptz" in run.error


def test_a_missing_base_is_named_and_the_rest_described(chain: Chain) -> None:
    chain.full.unlink()
    chain.first.unlink()
    assert "--search-path" in ckptz("restore", chain.delta, fails=True).error
    report = ckptz("inspect", chain.delta, "--json").json
    assert "step-1.ckptz" in report["broken"]
    assert report["chain"][0]["path"] is None
    assert {tensor["n_frames"] for tensor in report["tensors"]} == {1, None}


def test_a_base_that_is_its_own_delta_ends(chain: Chain) -> None:
    def to_itself(index: Any) -> Any:
        index["base"] |= {"content_id": index["content_id"], "file": "loop.ckptz"}
        return index

    path = forge(chain.delta, chain.folder / "loop.ckptz", to_itself)
    chain.second.unlink()  # it would pass as a base with that content id
    assert ckptz("restore", path, fails=True).exit_code == 5


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
