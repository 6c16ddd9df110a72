"""`ckptz seal`: what it finds of files that are not ours, what it leaves alone, and seals that lie."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptz import seal, verify
from ckptz.bits import xxh64
from ckptz.commands.seal import MAX_NAMED, MAX_SEAL_BYTES, SEAL_NAME
from ckptz.container.envelope import tensor_checksum
from ckptz.errors import ConfigError, CorruptionError, SealError, UnsupportedError
from ckptz.formats.inputs import open_input
from tests.support.cli_support import a_state, ckptz, hf_folder, temporaries, write_plain

SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = write_plain(tmp_path / "model.safetensors", a_state(), {"format": "pt"})
    seal(path, jobs=1)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = hf_folder(tmp_path / "hf")
    seal(path, jobs=1)
    return path


@pytest.fixture
def torch_folder(tmp_path: Path) -> Path:
    path = tmp_path / "dcp"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": torch.zeros(5000), "b": torch.ones(5000), "step": 3}, checkpoint_id=path, no_dist=True)
    seal(path, jobs=1)
    return path


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def differences(path: Path) -> list[str]:
    with pytest.raises(SealError) as caught:
        verify(path, jobs=1)
    assert all(difference in str(caught.value) for difference in caught.value.differences[:MAX_NAMED])
    return sorted(caught.value.differences)


def edited(path: Path, edit: Callable[[Any], None], *, is_checked: bool = True) -> None:
    """Change a seal, and what guards it."""
    raw = json.loads(path.read_bytes())
    edit(raw)
    if is_checked:
        raw["checksum"] = f"{xxh64(msgspec.json.encode(raw['files'])):016x}"
    path.write_bytes(json.dumps(raw).encode())


# --- whole files ----------------------------------------------------------------------------------


def test_what_is_as_it_was_sealed_passes(file: Path, folder: Path, torch_folder: Path) -> None:
    for path, n_files, n_tensors in ((file, 1, 9), (folder, 5, 9), (torch_folder, 2, 2)):
        report = verify(path, jobs=2)
        assert (report.n_sealed_files, report.n_tensors) == (n_files, n_tensors)
        assert report.seal is not None
    assert ckptz("verify", file, folder, torch_folder).stdout.count("ok, as sealed") == 3


def test_checksums_are_those_of_frames_and_so_is_the_content_id(file: Path) -> None:
    [sealed] = json.loads(Path(f"{file}.{SEAL_NAME}").read_bytes())["files"]
    opened = open_input(file)
    wanted = {name: f"{tensor_checksum(source):016x}" for name, source in opened.tensors.items()}
    opened.close()
    assert {tensor["name"]: tensor["checksum"] for tensor in sealed["tensors"]} == wanted
    ckptz("compress", file)
    packed = ckptz("inspect", file.with_suffix(".ckptz"), "--json").json
    assert verify(file).content_id == packed["content_id"]


def test_a_file_without_a_seal_is_told_of_seals(tmp_path: Path) -> None:
    path = write_plain(tmp_path / "model.safetensors", a_state())
    for where in (path, hf_folder(tmp_path / "hf")):
        run = ckptz("verify", where, fails=True)
        assert run.exit_code == 2
        assert "ckptz seal" in run.error


def test_a_seal_goes_along_where_files_are_renamed_moved_and_restored(file: Path, folder: Path) -> None:
    other = file.with_name("other.safetensors")
    Path(f"{file}.{SEAL_NAME}").rename(f"{file.rename(other)}.{SEAL_NAME}")
    verify(other)
    moved = shutil.copytree(folder, folder.with_name("moved"))
    verify(moved)
    ckptz("compress", folder, "-o", folder.parent / "packed")
    ckptz("restore", *(folder.parent / "packed").glob("*.ckptz"), "-o", folder.parent / "back")
    assert verify(folder.parent / "back").n_sealed_files == 5


def test_a_file_of_a_sealed_folder_is_checked_alone(folder: Path) -> None:
    (folder / "config.json").write_text("[]")
    assert verify(folder / SHARD).n_sealed_files == 1
    assert differences(folder / "config.json") == ["config.json: its bytes differ; it has 2, 2 were sealed"]


def test_ckptz_files_in_a_sealed_folder_are_checked_too(folder: Path) -> None:
    write_plain(folder.parent / "m.safetensors", a_state())
    ckptz("compress", folder.parent / "m.safetensors", "-o", folder / "m.ckptz")
    assert len(ckptz("verify", folder, "--json").json["files"]) == 2
    flip(folder / "m.ckptz", -1)
    assert "m.ckptz" in ckptz("verify", folder, fails=True).error


def test_the_documented_seal_is_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_plain(tmp_path / "model.safetensors", {"w": ("F32", (2, 3), bytes(24))}, {"format": "pt"})
    seal(tmp_path)
    text = (Path(__file__).parent.parent / "docs" / "seals.md").read_text()
    shown = json.loads(text.split("```json\n")[1].split("```")[0])
    assert shown == json.loads((tmp_path / SEAL_NAME).read_bytes()) | {"writer": shown["writer"]}


# --- what is found --------------------------------------------------------------------------------


def test_every_flipped_bit_of_a_tensor_names_it_and_no_other(file: Path) -> None:
    at = len(file.read_bytes())
    for name, (_, _, data) in reversed(a_state().items()):
        at -= len(data)
        for place in {at, at + len(data) - 1} if data else ():
            flip(file, place)
            assert differences(file) == [f"{file.name}: tensor {name!r} differs"]
            flip(file, place)
    verify(file)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "tensor 'odd' is missing": lambda rows: rows.pop("odd"),
    "tensor 'more' is new": lambda rows: rows.update(more=rows["odd"]),
    "tensor 'odd' is F32 [2, 2], F32 [4] was sealed": lambda rows: rows.update(
        odd=("F32", (2, 2), rows["odd"][2])
    ),
    "tensor 'odd' is I32 [4], F32 [4] was sealed": lambda rows: rows.update(
        odd=("I32", (4,), rows["odd"][2])
    ),
}


@pytest.mark.parametrize("said", CHANGES)
def test_tensors_that_came_went_or_changed_kind_are_named(said: str, file: Path) -> None:
    rows = a_state()
    CHANGES[said](rows)
    write_plain(file, rows, {"format": "pt"})
    assert differences(file) == [f"{file.name}: {said}"]


def test_metadata_are_sealed_too_and_the_layout_is_not(file: Path) -> None:
    write_plain(file, dict(reversed(a_state().items())), {"format": "pt"})
    verify(file)
    write_plain(file, a_state(), {"format": "tf"})
    assert differences(file) == [f"{file.name}: its metadata differ"]


def test_all_that_differs_in_a_folder_is_told_at_once(folder: Path) -> None:
    whole = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(whole[:-1])
    (folder / "config.json").write_text("{ }")
    (folder / "sub" / "vocab.txt").unlink()
    (folder / "sub" / "more.txt").write_text("")
    (folder / ".hidden").write_text("")
    first, *others = differences(folder)
    assert first == "config.json: its bytes differ; it has 3, 2 were sealed"
    assert f"{SHARD}: cannot be read: " in others[0]
    assert f"it has {len(whole) - 1} bytes" in others[0]
    assert others[1:] == ["sub/more.txt: is new", "sub/vocab.txt: is missing"]
    run = ckptz("verify", folder, "--json", fails=True)
    assert run.exit_code == 3
    assert sorted(run.json["files"][0]["error"]["differences"]) == [first, *others]


def test_mixed_up_shards_are_found(folder: Path) -> None:
    one, other = sorted(folder.glob("*.safetensors"))
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    assert len(differences(folder)) == 2 * len(a_state())  # each is missing in one and new in the other


def test_a_message_names_some_of_many_and_json_all(folder: Path) -> None:
    for i in range(MAX_NAMED + 5):
        (folder / f"{i}.txt").write_text("")
    run = ckptz("verify", folder, "--json", fails=True)
    assert "; and 5 more;" in run.error
    assert len(run.json["error"]["differences"]) == MAX_NAMED + 5


def test_a_flipped_bit_in_a_folder_of_torch_names_file_and_tensor(torch_folder: Path) -> None:
    [shard] = torch_folder.glob("*.distcp")
    flip(shard, shard.read_bytes().index(torch.ones(100).numpy().tobytes()))
    told = differences(torch_folder)
    assert len(told) == 2
    assert "'b'" in told[0]
    n_bytes = shard.stat().st_size
    assert told[1] == f"{shard.name}: its bytes differ; it has {n_bytes}, {n_bytes} were sealed"


def test_a_folder_of_torch_without_a_shard_is_told_so(torch_folder: Path) -> None:
    [shard] = torch_folder.glob("*.distcp")
    shard.unlink()
    assert differences(torch_folder) == [f"{shard.name}: is missing"]


# --- sealing --------------------------------------------------------------------------------------


def test_sealing_twice_needs_force(file: Path) -> None:
    target = Path(f"{file}.{SEAL_NAME}")
    before = target.read_bytes()
    write_plain(file, a_state(seed=1))
    run = ckptz("seal", file, fails=True)
    assert run.exit_code == 2
    assert "by force" in run.error
    assert target.read_bytes() == before
    ckptz("seal", file, "--force")
    verify(file)


def test_what_is_damaged_already_is_not_sealed(tmp_path: Path) -> None:
    path = write_plain(tmp_path / "model.safetensors", a_state())
    path.write_bytes(path.read_bytes()[:-1])
    assert ckptz("seal", path, fails=True).exit_code == 3
    assert list(tmp_path.iterdir()) == [path]


def test_our_own_files_and_nothing_cannot_be_sealed(file: Path, tmp_path: Path) -> None:
    ckptz("compress", file)
    (tmp_path / "empty").mkdir()
    for path in (file.with_suffix(".ckptz"), tmp_path / "empty"):
        with pytest.raises(ConfigError, match="ckptz verify"):
            seal(path)
    assert ckptz("seal", tmp_path / "gone.safetensors", fails=True).exit_code == 5


def test_what_is_not_sealed_is_told(folder: Path) -> None:
    (folder / ".hidden").write_text("")
    run = ckptz("seal", folder, "--force", "--json")
    assert run.json["files"][0]["left_out"] == [".hidden"]
    assert ".hidden" in run.stderr
    assert temporaries(folder) == []


# --- seals that lie -------------------------------------------------------------------------------

LIES: dict[str, tuple[Callable[[Any], object], type[Exception]]] = {
    "format": (lambda raw: raw.update(format="other"), CorruptionError),
    "a later version": (lambda raw: raw.update(version=2), UnsupportedError),
    "no files": (lambda raw: raw.update(files=None), CorruptionError),
    "another field": (lambda raw: raw.update(more=1), CorruptionError),
    "a checksum that is none": (lambda raw: raw["files"][0].update(checksum="0" * 15), CorruptionError),
    "a negative size": (lambda raw: raw["files"][0].update(n_bytes=-1), CorruptionError),
    "a shape of too many": (
        lambda raw: raw["files"][0].update(
            tensors=[{"name": "", "dtype": "", "shape": [1] * 65, "checksum": "0" * 16}]
        ),
        CorruptionError,
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_malformed_seal_is_refused_by_name(lie: str, folder: Path) -> None:
    edit, error = LIES[lie]
    edited(folder / SEAL_NAME, edit)
    with pytest.raises(error, match=SEAL_NAME):
        verify(folder)


def test_damage_to_the_seal_is_not_taken_for_damage_to_the_files(folder: Path) -> None:
    def edit(raw: Any) -> None:
        raw["files"][0]["n_bytes"] += 1

    edited(folder / SEAL_NAME, edit, is_checked=False)
    with pytest.raises(CorruptionError, match="the seal itself was changed"):
        verify(folder)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"format": "ckptz-seal"}'])
def test_what_is_no_json_or_no_seal_is_refused(text: bytes, folder: Path) -> None:
    (folder / SEAL_NAME).write_bytes(text)
    assert ckptz("verify", folder, fails=True).exit_code in (3, 4)


def test_a_huge_seal_is_not_read(folder: Path) -> None:
    with (folder / SEAL_NAME).open("wb") as file:
        file.truncate(MAX_SEAL_BYTES + 1)
    with pytest.raises(CorruptionError, match="larger than"):
        verify(folder)


def test_names_in_a_seal_lead_nowhere(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "secret.txt"
    outside.write_text("x")

    def edit(raw: Any) -> None:
        raw["files"].append({"name": "../secret.txt", "n_bytes": 1, "checksum": f"{xxh64(b'x'):016x}"})

    edited(folder / SEAL_NAME, edit)
    assert differences(folder) == ["../secret.txt: is missing"]
