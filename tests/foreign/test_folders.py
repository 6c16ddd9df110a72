"""Folders of shards are compressed to one checkpoint, and every file is restored as it was."""

import contextlib
import dataclasses
import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

import ckptz
from ckptz.errors import (
    CkptzError,
    ConfigError,
    CorruptionError,
    UnsupportedError,
)
from ckptz.foreign.folders import check_sharding, copy_carried, is_file_name, write_folder, written_files
from ckptz.foreign.inputs import Input, open_input
from ckptz.format.index import Shard, Sharding
from ckptz.format.publish import publish
from ckptz.format.sources import TensorSource
from ckptz.parallel import Workers
from ckptz.state.flatten import read_chunks
from ckptz.write import writer
from ckptz.write.job import WriteJob
from tests.support.foreign_support import FIRST, HOSTILE_NAMES, INDEX, SECOND, index_text, sharded_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return sharded_folder(tmp_path / "hub")


def compress(source: Path, output: Path) -> None:
    """Write what `ckptz compress FOLDER -o OUTPUT` writes."""
    opened = open_input(source)
    output.mkdir()
    job = WriteJob(
        tensors=opened.tensors, metadata=opened.metadata, sharding=opened.sharding, tree=opened.tree
    )
    with Workers(1) as workers, publish(output / f"{opened.stem}.ckptz") as sink:
        writer.write(sink, job, workers)
    copy_carried(opened.carried, output)
    opened.close()


def restore(source: Path, output: Path) -> Input:
    opened = open_input(source)
    write_folder(output, opened)
    opened.close()
    return opened


def contents_of(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files except hidden ones, which are not stored."""
    files = (p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


def test_a_folder_with_a_plain_file_and_shards_is_restored(folder: Path, tmp_path: Path) -> None:
    save_file({"x": np.ones(3)}, folder / "extra.safetensors")
    ckptz.compress(folder, tmp_path / "packed")
    ckptz.restore(tmp_path / "packed", tmp_path / "back")
    assert contents_of(tmp_path / "back") == contents_of(folder)
    with pytest.raises(ConfigError, match=r"contains no \.ckptz file; there is nothing to restore"):
        ckptz.restore(folder)


def test_a_plain_base_beside_a_packed_file_is_not_taken_for_it(folder: Path, tmp_path: Path) -> None:
    [report] = ckptz.compress(folder, tmp_path / "packed")
    save_file({"a": np.ones(3)}, tmp_path / "packed" / "base-4f1c0a9b-model.safetensors")
    with contextlib.closing(open_input(tmp_path / "packed")) as opened:
        assert opened.name == report.output


def test_a_sharded_folder_is_restored_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    compress(folder, tmp_path / "packed")
    packed = {"model.ckptz", "config.json", "1_Pooling/config.json"}
    assert set(contents_of(tmp_path / "packed")) == packed
    assert not (tmp_path / "packed" / ".gitattributes").exists()
    restore(tmp_path / "packed" / "model.ckptz", tmp_path / "restored")
    assert contents_of(tmp_path / "restored") == contents_of(folder)


def test_the_output_folder_of_a_folder_may_be_called_anything(folder: Path, tmp_path: Path) -> None:
    [report] = ckptz.compress(folder, tmp_path / "packed.safetensors")
    assert report.output == str(tmp_path / "packed.safetensors" / "model.ckptz")


def test_a_packed_folder_is_its_only_file(folder: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    compress(folder, packed)
    (packed / "base-0123456789abcdef.ckptz").touch()
    report = ckptz.restore(packed, tmp_path / "restored")
    assert report.input == str(packed / "model.ckptz")
    assert contents_of(tmp_path / "restored") == contents_of(folder)
    assert ckptz.restore(packed).output == str(packed)
    assert contents_of(packed).items() > contents_of(folder).items()


@pytest.mark.parametrize(
    ("files", "stem"),
    [
        (["model.safetensors"], "model"),
        ([FIRST, SECOND], "model"),
        (["a.safetensors", "b.safetensors"], "model"),
    ],
)
def test_shards_need_no_index(files: list[str], stem: str, tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    for i, file in enumerate(files):
        save_file({f"t{i}": np.arange(3)}, tmp_path / "hub" / file, {"shard": str(i)})
    compress(tmp_path / "hub", tmp_path / "packed")
    opened = restore(tmp_path / "packed" / f"{stem}.ckptz", tmp_path / "restored")
    assert contents_of(tmp_path / "restored") == contents_of(tmp_path / "hub")
    assert opened.metadata == ({"shard": "0"} if len(files) == 1 else None)


def test_common_metadata_are_the_checkpoints(folder: Path) -> None:
    opened = open_input(folder)
    assert (opened.kind, opened.stem, opened.metadata) == ("folder", "model", {"format": "pt"})
    assert list(opened.tensors) == ["a", "empty", "b", "c"]  # in the order of the shards
    assert opened.sharding.index_text == (folder / INDEX).read_bytes().decode()
    assert opened.left_out == (".gitattributes",)
    opened.close()


def test_other_checkpoints_of_a_folder_are_carried(folder: Path) -> None:
    save_file({"x": np.zeros(1)}, folder / "adapter.safetensors")
    (folder / "training_args.bin").write_bytes(b"a pickle")
    opened = open_input(folder)
    assert {"adapter.safetensors", "training_args.bin"} <= {name for name, _ in opened.carried}
    assert "x" not in opened.tensors
    opened.close()


def test_links_out_of_the_folder_and_hidden_folders_stay_behind(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("key")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "f").write_text("f")
    (folder / "secret.txt").symlink_to(tmp_path / "secret")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "inside.json").symlink_to(folder / "config.json")
    (folder / "broken").symlink_to(folder / "missing")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("ref")
    (folder / "bad\nname").write_text("x")
    (folder / ".x.0123.ckptz-tmp").write_text("left by a kill")
    os.mkfifo(folder / "pipe")
    (folder / "model.ckptz").write_text("an earlier output")
    opened = open_input(folder)
    left_out = {
        *(".git", ".gitattributes", "linked", "secret.txt", "broken", "bad\nname", "pipe", "model.ckptz"),
    }
    assert set(opened.left_out) == left_out
    names = {name for name, _ in opened.carried}
    assert names == {"config.json", "inside.json", "1_Pooling/config.json"}
    opened.close()


def test_the_links_of_the_hub_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--x"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "0abc"
    snapshot.mkdir(parents=True)
    for name in (FIRST, SECOND, INDEX, "config.json"):
        os.rename(folder / name, cache / "blobs" / f"sha-{name}")
        (snapshot / name).symlink_to(Path("../../blobs") / f"sha-{name}")
    compress(snapshot, tmp_path / "packed")
    assert (tmp_path / "packed" / "config.json").read_text() == "{}"
    assert not (tmp_path / "packed" / "config.json").is_symlink()


def test_a_carried_file_that_is_gone_is_named(folder: Path, tmp_path: Path) -> None:
    compress(folder, tmp_path / "packed")
    (tmp_path / "packed" / "config.json").unlink()
    opened = restore(tmp_path / "packed" / "model.ckptz", tmp_path / "restored")
    assert opened.left_out == ("config.json",)
    assert set(contents_of(folder)) - set(contents_of(tmp_path / "restored")) == {"config.json"}


def test_a_carried_file_is_not_followed_out_of_its_folder(folder: Path, tmp_path: Path) -> None:
    compress(folder, tmp_path / "packed")
    (tmp_path / "secret").write_text("key")
    (tmp_path / "packed" / "config.json").unlink()
    (tmp_path / "packed" / "config.json").symlink_to(tmp_path / "secret")
    opened = open_input(tmp_path / "packed" / "model.ckptz")
    assert opened.left_out == ("config.json",)
    opened.close()


def test_restoring_over_the_source_leaves_carried_files(folder: Path, tmp_path: Path) -> None:
    compress(folder, tmp_path / "packed")
    before = contents_of(tmp_path / "packed")
    restore(tmp_path / "packed" / "model.ckptz", tmp_path / "packed")
    assert before.items() <= contents_of(tmp_path / "packed").items()


def test_a_shard_that_is_compressed_already_is_refused(folder: Path, tmp_path: Path) -> None:
    compress(folder, tmp_path / "packed")
    os.replace(tmp_path / "packed" / "model.ckptz", folder / SECOND)
    with pytest.raises(ConfigError, match=f"{SECOND}.*restore it first"):
        open_input(folder)


def record(**changed: Any) -> Sharding:
    fields: dict[str, Any] = {"shards": (Shard("s1.bin", ("a",)), Shard("s2.bin", ("b", "c"), {}))}
    return Sharding(**{**fields, **changed})


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=ascii)
def test_hostile_names_in_a_record_are_corrupt(name: str) -> None:
    assert not is_file_name(name)
    records = [
        record(shards=(Shard(name, ("a", "b", "c")),)),
        record(index_file=name, index_text="{}"),
        record(carried=(name if name != "a/b" else "a//b",)),
        record(carried=(f"folder/{name if name != 'a/b' else '../b'}",)),
    ]
    for sharding in records:
        with pytest.raises(CorruptionError, match="not a plain file name"):
            check_sharding(sharding, "abc")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"index_file": "i"}, "needs a file name and a text"),
        ({"index_text": "i"}, "needs a file name and a text"),
        ({"index_file": "s1.bin", "index_text": "i"}, "'s1.bin' occurs 2 times"),
        ({"index_file": "run.sh", "index_text": "i"}, "'run.sh' has no suffix of an index"),
        ({"index_file": INDEX, "index_text": "#!/bin/sh"}, f"'{INDEX}': index: not valid JSON"),
        ({"index_file": INDEX, "index_text": "{}"}, f"'{INDEX}': it has no weight_map"),
        ({"index_file": INDEX, "index_text": '{"weight_map":{"a":"s3.bin"}}'}, "names 's3.bin'"),
        ({"carried": ("s2.bin",)}, "'s2.bin' occurs 2 times"),
        ({"shards": (Shard("run.sh", ("a", "b", "c")),)}, "'run.sh' has no suffix of a shard"),
        ({"shards": (Shard(".a.bin", ("a", "b", "c")),)}, "'.a.bin' is not a plain file name"),
        ({"carried": (".bashrc",)}, "'.bashrc' is not a plain file name"),
        ({"carried": (".ssh/authorized_keys",)}, "is not a plain file name"),
        ({"carried": ("/".join("x" * 33),)}, "not a plain file name"),
        ({"shards": (Shard("s.bin", ("a", "b", "b", "c")),)}, "'b' is in 2 shards"),
        ({"shards": (Shard("s.bin", ("a", "b")),)}, "'c' is in 0 shards"),
        ({"shards": (Shard("s.bin", ("a", "b", "c", "d")),)}, "'d' is not in the file"),
    ],
)
def test_a_record_that_contradicts_itself_is_corrupt(changed: dict[str, Any], message: str) -> None:
    check_sharding(record(), "abc")
    with pytest.raises(CorruptionError, match=message):
        check_sharding(record(**changed), "abc")


def test_a_record_is_checked_when_its_file_is_opened(folder: Path, tmp_path: Path) -> None:
    opened = open_input(folder)
    bad = msgspec.structs.replace(opened.sharding, index_file="../escaped")
    with Workers(1) as workers, publish(tmp_path / "bad.ckptz") as sink:
        writer.write(sink, WriteJob(tensors=opened.tensors, sharding=bad), workers)
    opened.close()
    with pytest.raises(CorruptionError, match=r"bad\.ckptz: sharding: '\.\./escaped'"):
        open_input(tmp_path / "bad.ckptz")


def test_a_hostile_record_is_not_written(folder: Path, tmp_path: Path) -> None:
    opened = open_input(folder)
    bad = Sharding((Shard("../escaped", tuple(opened.tensors)),))
    with pytest.raises(CorruptionError, match="escaped"):
        write_folder(tmp_path / "out", dataclasses.replace(opened, sharding=bad))
    opened.close()
    assert not (tmp_path / "out").exists()


def test_what_a_restore_writes_is_known_before(folder: Path, tmp_path: Path) -> None:
    compress(folder, tmp_path / "packed")
    opened = restore(tmp_path / "packed" / "model.ckptz", tmp_path / "restored")
    assert sorted(written_files(opened.sharding)) == sorted(contents_of(tmp_path / "restored"))


def test_hidden_files_are_no_shards(folder: Path) -> None:
    (folder / "._model.safetensors").write_bytes(b"of macOS")
    (folder / INDEX).unlink()
    opened = open_input(folder)
    assert list(opened.tensors) == ["a", "empty", "b", "c"]
    assert "._model.safetensors" in opened.left_out
    opened.close()


def test_other_files_that_other_systems_cannot_hold_are_left_out(folder: Path) -> None:
    (folder / "data").mkdir()
    for name in ("README", "Readme", "a:b", "data/x", "Config.json", "DATA"):
        (folder / name).write_text("x")
    opened = open_input(folder)
    kept = {"1_Pooling/config.json", "Config.json", "DATA", "README", "Readme", "config.json", "data/x"}
    assert {name for name, _ in opened.carried} == kept
    assert set(opened.left_out) == {".gitattributes", "a:b"}
    opened.close()


def pack_as(sharding: Sharding, opened: Input, path: Path) -> None:
    """Write a file with a shard record, as another writer of version 1.0 may."""
    with Workers(1) as workers, publish(path) as sink:
        writer.write(sink, WriteJob(tensors=opened.tensors, sharding=sharding), workers)


def test_a_disk_that_takes_two_names_for_one_is_asked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_input(folder)
    names = list(opened.tensors)
    sharding = Sharding((Shard("A.safetensors", tuple(names[:1])), Shard("a.safetensors", tuple(names[1:]))))
    pack_as(sharding, opened, tmp_path / "two.ckptz")
    opened.close()
    ckptz.restore(tmp_path / "two.ckptz", tmp_path / "out")
    assert set(contents_of(tmp_path / "out")) == {"A.safetensors", "a.safetensors"}
    touch = Path.touch  # as on a case-insensitive file system
    monkeypatch.setattr(Path, "touch", lambda path, **how: touch(path.with_name(path.name.lower()), **how))
    with pytest.raises(UnsupportedError, match=r"'a\.safetensors' and a file before it are one name"):
        ckptz.restore(tmp_path / "two.ckptz", tmp_path / "out2")
    assert list((tmp_path / "out2").iterdir()) == []


@pytest.mark.parametrize("when", ["decode", "rename"])
def test_a_restore_that_fails_leaves_the_whole_old_folder(
    when: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_input(folder)
    output = tmp_path / "out"
    output.mkdir()
    for shard in opened.sharding.shards:
        (output / shard.file).write_text("old")
    (output / INDEX).write_text("old")

    def failing(tensors: Mapping[str, TensorSource], *buffers: Any) -> Iterator[NDArray[Any]]:
        if "c" in tensors:
            raise CorruptionError("the second shard is damaged")
        return read_chunks(tensors, *buffers)

    def replace(*_: object) -> None:
        raise OSError(errno.EIO, "no rename")

    if when == "rename":
        monkeypatch.setattr("os.replace", replace)
    chunks = failing if when == "decode" else read_chunks
    with pytest.raises((CorruptionError, OSError)):
        write_folder(output, opened, chunks)
    opened.close()
    assert set(contents_of(output).values()) == {b"old"}
    assert not list(output.glob(".*"))


def test_the_index_is_renamed_last(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed: list[str] = []
    replace = os.replace

    def noted(source: Path, target: Path) -> None:
        renamed.append(target.name)
        replace(source, target)

    opened = open_input(folder)
    monkeypatch.setattr("os.replace", noted)
    write_folder(tmp_path / "out", opened)
    opened.close()
    assert renamed[:2] == [FIRST, SECOND]
    assert renamed[-1] == INDEX


@pytest.fixture
def torch_folder(tmp_path: Path) -> Path:
    torch = pytest.importorskip("torch")
    root = tmp_path / "old-hub"
    root.mkdir()
    shared = torch.randn(4, 5)
    torch.save({"wte": shared, "head": shared.t()}, root / "pytorch_model-00001-of-00002.bin")
    torch.save({"norm": torch.ones(5)}, root / "pytorch_model-00002-of-00002.bin")
    weight_map = {"wte": 1, "head": 1, "norm": 2}
    files = {name: f"pytorch_model-0000{n}-of-00002.bin" for name, n in weight_map.items()}
    (root / "pytorch_model.bin.index.json").write_text(index_text(files))
    (root / "training_args.bin").write_bytes(b"needs code")
    (root / "config.json").write_text("{}")
    return root


def test_torch_shards_are_restored_as_torch_shards(torch_folder: Path, tmp_path: Path) -> None:
    import torch

    compress(torch_folder, tmp_path / "packed")
    opened = restore(tmp_path / "packed" / "pytorch_model.ckptz", tmp_path / "restored")
    assert list(opened.tensors) == ["wte", "norm"]  # head is a view of wte
    assert [shard.tensors for shard in opened.sharding.shards] == [("wte",), ("norm",)]
    assert set(contents_of(tmp_path / "restored")) == set(contents_of(torch_folder))
    for path in torch_folder.glob("pytorch_model-*.bin"):
        state, restored = (torch.load(p) for p in (path, tmp_path / "restored" / path.name))
        assert list(state) == list(restored)
        assert all(torch.equal(restored[name], tensor) for name, tensor in state.items())


# --- other states of a folder ---------------------------------------------------------------------------


@pytest.fixture
def run_folder(folder: Path) -> Path:
    """Add a trainer's files to the shards, some of which cannot be read without running code."""
    torch = pytest.importorskip("torch")
    torch.save(
        {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"params": [0]}]}, folder / "optimizer.pt"
    )
    torch.save({"last_epoch": 4, "base_lrs": (1e-3,)}, folder / "scheduler.pt")
    torch.save({"numpy": np.random.RandomState(1).get_state()}, folder / "rng_state.pth")
    torch.save({"a": torch.zeros(2)}, folder / "pytorch_model.bin")
    (folder / "vocab.bin").write_bytes(b"no torch file")
    return folder


def test_states_beside_the_model_are_part_of_it(run_folder: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    compress(run_folder, tmp_path / "packed")
    carried = {"config.json", "1_Pooling/config.json", "rng_state.pth", "pytorch_model.bin", "vocab.bin"}
    assert set(contents_of(tmp_path / "packed")) == {"model.ckptz", *carried}
    opened = restore(tmp_path / "packed" / "model.ckptz", tmp_path / "restored")
    assert {"a", "b", "c", "empty", "state.0.exp_avg"} == set(opened.tensors)
    restored, expected = contents_of(tmp_path / "restored"), contents_of(run_folder)
    assert set(restored) == set(expected)
    for name in set(expected) - {"optimizer.pt", "scheduler.pt"}:
        assert restored[name] == expected[name]
    for name in ("optimizer.pt", "scheduler.pt"):
        one, other = (torch.load(place / name) for place in (tmp_path / "restored", run_folder))
        assert repr(one) == repr(other)


def test_a_name_that_a_shard_has_too_is_no_error(run_folder: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"a": torch.full((2,), 7)}, run_folder / "ema.pt")
    compress(run_folder, tmp_path / "packed")
    opened = restore(tmp_path / "packed" / "model.ckptz", tmp_path / "restored")
    assert {"a", "a~2"} <= set(opened.tensors)
    assert torch.load(tmp_path / "restored" / "ema.pt")["a"].tolist() == [7, 7]


def test_a_large_state_that_stays_as_it_is_is_noted(run_folder: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"state": torch.zeros(1 << 19), "of": np.float64(1)}, run_folder / "optimizer.pt")
    opened = open_input(run_folder)
    assert len(opened.notes) == 1
    assert "optimizer.pt is copied uncompressed" in opened.notes[0]
    assert "numpy" in opened.notes[0]
    assert "optimizer.pt" in {name for name, _ in opened.carried}
    opened.close()


def test_a_cut_state_is_named(run_folder: Path) -> None:
    path = run_folder / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CkptzError, match=r"optimizer\.pt: .*try an intact copy"):
        open_input(run_folder)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_numbered_shards_without_an_index_are_complete_or_refused(tmp_path: Path, suffix: str) -> None:
    torch = pytest.importorskip("torch")
    folder = tmp_path / "model"
    folder.mkdir()
    for i in (1, 2, 3):
        path, values = folder / f"pytorch_model-0000{i}-of-00003.{suffix}", np.full(2, i, np.float32)
        if suffix == "safetensors":
            save_file({f"w{i}": values}, path)
        else:
            torch.save({f"w{i}": torch.from_numpy(values)}, path)
    ckptz.compress(folder, output=tmp_path / "packed")
    second = f"pytorch_model-00002-of-00003.{suffix}"
    (folder / second).rename(
        folder / f"pytorch_model-00004-of-00003.{suffix}"
    )  # the same number of files, but not all
    with pytest.raises(FileNotFoundError, match=second):
        ckptz.compress(folder, output=tmp_path / "half")
    assert not (tmp_path / "half").exists()
