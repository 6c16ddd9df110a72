"""`torch.distributed.checkpoint` in one process: our folders, torch's own, and damage to both."""

import io
import json
import pickle  # storage of torch's own folders
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

import ckptz as package
from ckptz.codec.grid import Grid
from ckptz.codec.kmeans import KMeans
from ckptz.errors import (
    ChecksumError,
    ConfigError,
    CorruptionError,
    FormatError,
    UnsupportedError,
)
from ckptz.foreign.dcp import problem_of_parts, read_metadata
from ckptz.foreign.dcp_index import INDEX_FILE, read_index
from ckptz.foreign.inputs import open_input
from ckptz.foreign.pickled import Unpickler
from ckptz.format import reader as container_reader
from ckptz.integrations.dcp import ChainOptions, CkptzStorageReader, CkptzStorageWriter, latest
from ckptz.store.resolve import open_checkpoint
from ckptz.torch import load_state
from tests.support.cli_support import ckptz

OPTIONS = ChainOptions(jobs=1)


def a_state(drift: float = 0.0) -> dict[str, Any]:
    """Return a state of a model, its optimizer, and values of other types."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.LayerNorm(50))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 + drift)
    model(torch.ones(2, 30)).square().sum().backward()
    optimizer.step()
    extra = {"step": 7, "name": "run", "numbers": [1, 2.5, None], "half": torch.ones(3, dtype=torch.bfloat16)}
    nested = {"tuple": (torch.arange(3), "x"), "scalar": torch.tensor(4)}
    return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), **extra, "nested": nested}


def emptied(value: Any) -> Any:
    """Return the same structure with zeroed tensors and None for other values."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: emptied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [emptied(item) for item in value]
    return None


def same(value: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return value.dtype == expected.dtype and torch.equal(value, expected)
    if isinstance(expected, dict):
        return value.keys() == expected.keys() and all(same(value[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        has_form = type(value) is type(expected) and len(value) == len(expected)
        return has_form and all(map(same, value, expected))
    return bool(value == expected)


def save(state: dict[str, Any], folder: Path, **arguments: Any) -> None:
    writer = CkptzStorageWriter(folder, **({"options": OPTIONS} | arguments))
    dcp.save(state, storage_writer=writer, no_dist=True)


def load(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    dcp.load(state, storage_reader=CkptzStorageReader(folder, jobs=1), no_dist=True)
    return state


# --- our folders ---------------------------------------------------------------------------------------


def test_a_state_is_restored_and_nothing_is_pickled(tmp_path: Path) -> None:
    save(a_state(), tmp_path / "one")
    assert same(load(emptied(a_state()), tmp_path / "one"), a_state())
    assert {path.suffix for path in (tmp_path / "one").iterdir()} == {".ckptz", ".json"}


def test_a_tensor_of_another_dtype_is_named_when_it_is_loaded(tmp_path: Path) -> None:
    save({"w": torch.ones(3), "v": torch.ones(2)}, tmp_path)
    with pytest.warns(RuntimeWarning, match=r"not exactly: w: torch.float32 saved, torch.bfloat16 now$"):
        load({"w": torch.zeros(3, dtype=torch.bfloat16), "v": torch.zeros(2)}, tmp_path)


def test_a_chain_of_folders_each_complete(tmp_path: Path) -> None:
    names = [f"step-{i}" for i in range(4)]
    for i, name in enumerate(names):
        base = tmp_path / names[i - 1] if i else None
        save(a_state(i / 1000), tmp_path / name, base=base, options=ChainOptions(full_every=3, jobs=1))
    depths = [open_checkpoint(next((tmp_path / name).glob("shard-*"))).depth for name in names]
    assert depths == [0, 1, 2, 0]
    for name in names[:2]:
        shutil.rmtree(tmp_path / name)
    assert same(load(emptied(a_state()), tmp_path / "step-2"), a_state(2 / 1000))


def test_another_layout_is_a_full_file(tmp_path: Path) -> None:
    save(a_state(), tmp_path / "one")
    state = a_state()
    state["model"]["0.weight"] = state["model"]["0.weight"][:20].clone()
    save(state, tmp_path / "two", base=tmp_path / "one")
    assert not list((tmp_path / "two").glob("base-*"))
    save(state, tmp_path / "three", base=tmp_path / "none")
    assert same(load(emptied(state), tmp_path / "three"), state)


def test_reading_a_part_decodes_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"big": torch.arange(5 << 20, dtype=torch.int32).view(-1, 1024)}, tmp_path / "one")
    decoded = []
    decode = container_reader.FrameSource.decode_chunk

    def counted(self: Any, index: int, out: Any) -> Any:
        decoded.append(index)
        return decode(self, index, out)

    monkeypatch.setattr(container_reader.FrameSource, "decode_chunk", counted)
    reader = CkptzStorageReader(tmp_path / "one", jobs=1)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    tensor = torch.zeros(3, 1024, dtype=torch.int32)
    index = next(iter(metadata.storage_data[1]))
    sizes = [torch.Size(numbers) for numbers in ((0, 0), (2048, 0), (3, 1024))]

    class Planner:
        def resolve_tensor(self, _: Any) -> torch.Tensor:
            return tensor

        def commit_tensor(self, _: Any, __: Any) -> None: ...

    item = ReadItem(LoadItemType.TENSOR, index, sizes[0], index, sizes[1], sizes[2])
    reader.read_data(LoadPlan([item]), Planner())
    assert torch.equal(tensor.view(-1), torch.arange(2 << 20, (2 << 20) + 3072, dtype=torch.int32))
    assert len(decoded) <= 1


# By name of the corrected weights; optimizers whose parameters share a name are indistinguishable.
LAYOUTS: dict[str, Any] = {
    "training.model.0.weight": lambda model, by, _: {"training": {"model": model, "optimizer": by}},
    "0.weight": lambda model, _, flat: {**model, "optimizer": flat},
    "a.0.weight": lambda model, by, _: {"a": model, "ema": dict(model), "optim": by},
    "": lambda model, by, flat: {"one": {"model": model, "by": by}, "other": {"model": model, "by": flat}},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_grid_knows_weights_and_moments_wherever_a_state_has_them(tmp_path: Path, name: str) -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(128, 128))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0)
    writer = CkptzStorageWriter(options=ChainOptions(config=Grid(step=2**-6), jobs=1, exact=0))
    moved: list[dict[str, Any]] = []
    for step in (15, 30):
        for _ in range(15):
            for parameter in model.parameters():
                parameter.grad = torch.randint(2, parameter.shape) * 0.02 - 0.01
            optimizer.step()
        by, flat = (
            get_optimizer_state_dict(
                model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=is_flat)
            )
            for is_flat in (False, True)
        )
        state, folder = LAYOUTS[name](get_model_state_dict(model), by, flat), tmp_path / f"step-{step}"
        dcp.save(state, checkpoint_id=folder, storage_writer=writer, no_dist=True)
        [file] = folder.glob("*.ckptz")
        lossy = {t.name: t.lossy for t in package.inspect(file).tensors if t.lossy is not None}
        moved.append({key: one.settings["moved"] for key, one in lossy.items() if "moved" in one.settings})
        assert bool(name) == bool([one for one in lossy.values() if one.method == "first-moment"])
    assert moved[0] == ({name: 0.9} if name else {})  # the default share, as no weight updates were observed
    assert moved[1].keys() == moved[0].keys()
    assert all(share > 0.8 for share in moved[1].values())


def test_kmeans_without_ranks(tmp_path: Path) -> None:
    state = {"weight": torch.randn(80, 90), "bias": torch.randn(80)}
    save(state, tmp_path / "one", options=ChainOptions(config=KMeans(levels=8), jobs=1))
    package.torch.save_file(state, tmp_path / "whole.ckptz", config=KMeans(levels=8))
    loaded = load({name: torch.zeros_like(t) for name, t in state.items()}, tmp_path / "one")
    assert same(loaded, dict(package.torch.load_file(tmp_path / "whole.ckptz")))
    assert not torch.equal(loaded["weight"], state["weight"])


def test_a_planner_of_another_kind_hands_out_bytes(tmp_path: Path) -> None:
    class Bytes(DefaultSavePlanner):
        lookup_object = None

        def resolve_data(self, item: Any) -> Any:
            if item.tensor_data is not None:
                return self.state_dict[item.index.fqn].detach()
            data = io.BytesIO()
            torch.save(self.state_dict[item.index.fqn], data)
            data.seek(0)
            return data

    state = {"weight": torch.ones(3), "step": 4}
    dcp.save(state, storage_writer=CkptzStorageWriter(tmp_path / "one"), planner=Bytes(), no_dist=True)
    assert same(load({"weight": torch.zeros(3), "step": 0}, tmp_path / "one"), state)


# --- bad input -----------------------------------------------------------------------------------------


def test_what_cannot_be_kept_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"'hook'.*cannot be stored without pickle"):
        save({"hook": print}, tmp_path / "one")
    assert not (tmp_path / "one" / INDEX_FILE).exists()


def test_arguments_that_do_not_go_together(tmp_path: Path) -> None:
    by_sensitivity = ChainOptions(config=KMeans(prune_by="sensitivity"))
    with pytest.raises(ConfigError, match="magnitude"):
        CkptzStorageWriter(tmp_path, options=by_sensitivity)
    with pytest.raises(ConfigError, match="leave base out"):
        CkptzStorageWriter(tmp_path, options=ChainOptions(base=tmp_path))
    with pytest.raises(ConfigError, match="leave base out"):
        CkptzStorageWriter(keep_last=2, base=tmp_path)
    with pytest.raises(ConfigError, match="keep_last must be at least 1"):
        CkptzStorageWriter(keep_last=0)
    with pytest.raises(ConfigError, match="no folder"):
        _ = CkptzStorageWriter().folder
    with pytest.raises(ConfigError, match="no folder"):
        CkptzStorageReader().read_metadata()
    with pytest.raises(UnsupportedError, match="use_collectives"):
        CkptzStorageWriter(tmp_path).set_up_storage_writer(True, use_collectives=False)
    assert not CkptzStorageWriter.validate_checkpoint_id("s3://bucket/run")
    assert not CkptzStorageReader.validate_checkpoint_id(tmp_path)


def a_piece(offset: list[int], shape: list[int], tensor: str = "w") -> dict[str, Any]:
    return {"offset": offset, "shape": shape, "file": 0, "tensor": tensor}


def first_version(folder: Path) -> dict[str, Any]:
    """Return a folder's index in version 1 of its format, which has no checksum."""
    index = json.loads((folder / INDEX_FILE).read_text()) | {"version": 1}
    del index["checksum"]
    return index


def test_a_value_that_was_changed_in_the_index_is_noticed(tmp_path: Path) -> None:
    save({"w": torch.ones(3), "step": 123456}, tmp_path)
    file = tmp_path / INDEX_FILE
    written = file.read_bytes()
    file.write_bytes(written.replace(b"123456", b"123457"))
    assert file.read_bytes() != written
    with pytest.raises(ChecksumError, match=f"{INDEX_FILE}: was changed"):
        read_index(tmp_path)


def test_an_index_of_the_first_version_is_read(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path)
    (tmp_path / INDEX_FILE).write_text(json.dumps(first_version(tmp_path)))
    state = {"w": torch.zeros(3)}
    load(state, tmp_path)
    assert state["w"].equal(torch.ones(3))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 9}, "upgrade"),
        ({"format": "other"}, "format"),
        ({"unknown": 1}, "unknown"),
        ({"files": [{"name": "../x.ckptz", "rank": 0}]}, "plain file name"),
        ({"files": []}, "does not list"),
        ({"tensors": {"w": {"dtype": "F32", "shape": [2], "chunks": [a_piece([1], [2])]}}}, "outside"),
        ({"tensors": {"w": {"dtype": "F32", "shape": [2], "chunks": [a_piece([0, 0], [2])]}}}, "dimensions"),
        (
            {"tensors": {"w": {"dtype": "F32", "shape": [3], "chunks": [a_piece([0], [2])]}}},
            "cover it exactly",
        ),
        ({"tensors": {"w": {"dtype": "F32", "shape": [2], "chunks": [a_piece([0], [1])] * 2}}}, "overlap"),
        (
            {"tensors": {"w": {"dtype": "x", "shape": [3], "chunks": [a_piece([0], [3])]}}},
            "ckptz-index.json: tensor 'w': dtype 'x'",
        ),
        (
            {"tensors": {"w": {"dtype": "F32", "shape": [3], "chunks": [a_piece([0], [3], "x")]}}},
            "has no tensor 'x', which ckptz-index.json names; copy",
        ),
    ],
)
def test_a_forged_index_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    save({"w": torch.ones(3), "step": 1}, tmp_path)
    (tmp_path / INDEX_FILE).write_text(json.dumps(first_version(tmp_path) | change))
    with pytest.raises(CheckpointException, match=words):
        load({"w": torch.zeros(3)}, tmp_path)


def test_damage_and_loss_are_noticed(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path)
    index = first_version(tmp_path)
    index["tensors"]["w"] |= {"shape": [2], "chunks": [a_piece([0], [2])]}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointException, match=r"has shape \[3\]"):
        load({"w": torch.zeros(2)}, tmp_path)
    next(tmp_path.glob("shard-*")).unlink()
    with pytest.raises(CheckpointException, match="is missing"):
        load({"w": torch.zeros(2)}, tmp_path)
    (tmp_path / INDEX_FILE).unlink()
    with pytest.raises(CheckpointException, match="No such file"):
        load({"w": torch.zeros(3)}, tmp_path)


# --- the steps of a run -------------------------------------------------------------------------------


def save_steps(run: Path, steps: Iterable[int], keep_last: int = 2, name: str = "step-{}") -> None:
    """Save steps with a single writer, as a training run does."""
    writer = CkptzStorageWriter(options=ChainOptions(full_every=3, jobs=1), keep_last=keep_last)
    for step in steps:
        folder = run / name.format(step)
        dcp.save(a_state(step / 1000), checkpoint_id=folder, storage_writer=writer, no_dist=True)


def test_one_writer_saves_a_run_of_deltas_and_keeps_the_newest_steps(tmp_path: Path) -> None:
    assert latest(tmp_path / "run") is None
    save_steps(tmp_path / "run", range(8, 12), keep_last=3)
    steps = {path.name: path for path in (tmp_path / "run").iterdir()}
    assert steps.keys() == {"step-9", "step-10", "step-11"}
    assert latest(tmp_path / "run") == steps["step-11"]
    assert any(list(path.glob("base-*")) for path in steps.values())
    for name, path in steps.items():
        state = a_state(int(name.removeprefix("step-")) / 1000)
        assert same(load(emptied(state), path), state)


def test_a_writer_of_another_process_continues_with_deltas(tmp_path: Path) -> None:
    for step in (1, 2):
        save_steps(tmp_path, [step])
    assert list((tmp_path / "step-2").glob("base-*"))


def test_a_step_that_was_cut_off_is_none_and_is_saved_anew(tmp_path: Path) -> None:
    save_steps(tmp_path, [1, 2])
    (tmp_path / "step-2" / INDEX_FILE).unlink()
    assert latest(tmp_path) == tmp_path / "step-1"
    old = {path.name for path in (tmp_path / "step-2").glob("shard-*")}
    save_steps(tmp_path, [2])
    assert latest(tmp_path) == tmp_path / "step-2"
    assert not old & {path.name for path in (tmp_path / "step-2").iterdir()}


@pytest.mark.parametrize(
    ("step", "name", "words"),
    [
        (2, "step-{}", "step 2 is not after 2, the newest that is there"),
        (1, "checkpoint-{}", "step 1 is not after 2"),
        (3, "epoch {}", "called after steps, as run/step-100"),
    ],
)
def test_a_step_that_is_not_new_or_has_no_number_is_refused(
    tmp_path: Path, step: int, name: str, words: str
) -> None:
    save_steps(tmp_path, [1, 2])
    with pytest.raises(CheckpointException, match=words):
        save_steps(tmp_path, [step], name=name)
    assert latest(tmp_path) == tmp_path / "step-2"
    assert same(load(emptied(a_state()), tmp_path / "step-2"), a_state(2 / 1000))


def test_files_that_no_save_wrote_are_not_taken_for_those_of_one_that_was_cut_off(tmp_path: Path) -> None:
    foreign_files = [tmp_path / "step-1" / "model.ckptz", tmp_path / "step-4" / "model.ckptz"]
    for file in foreign_files:
        file.parent.mkdir()
        package.torch.save_file({"w": torch.ones(3)}, file)
    save_steps(tmp_path, [2, 3], keep_last=1)
    with pytest.raises(CheckpointException, match="holds files of something else"):
        save_steps(tmp_path, [4])
    assert all(file.exists() for file in foreign_files)


# --- torch's own folders -------------------------------------------------------------------------------


def torch_folder(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def plain_state() -> dict[str, Any]:
    state = a_state()
    state["nested"].pop("tuple")  # torch does not flatten it and pickles it
    return state


def as_torch_names(value: Any) -> Any:
    """Return a state as a folder of torch stores it, with all keys converted to str."""
    if isinstance(value, dict):
        return {str(key): as_torch_names(item) for key, item in value.items()}
    return [as_torch_names(item) for item in value] if isinstance(value, list) else value


def test_a_folder_of_torch_is_compressed_and_restored(tmp_path: Path) -> None:
    source = torch_folder(tmp_path / "source", plain_state())
    ckptz("compress", source, "-o", tmp_path / "packed.ckptz", "--jobs", 1)
    assert same(load_state(tmp_path / "packed.ckptz"), as_torch_names(plain_state()))
    ckptz("restore", tmp_path / "packed.ckptz", "--to", "dcp", "-o", tmp_path / "back")
    back = emptied(plain_state())
    dcp.load(back, checkpoint_id=tmp_path / "back", no_dist=True)
    assert same(back, plain_state())
    ckptz("restore", tmp_path / "packed.ckptz", "--to", "pt", "-o", tmp_path / "back.pt")
    assert same(torch.load(tmp_path / "back.pt", weights_only=True), as_torch_names(plain_state()))


def test_a_delta_of_two_folders_of_torch(tmp_path: Path) -> None:
    first = torch_folder(tmp_path / "first", plain_state())
    later = plain_state()
    later["model"]["0.weight"] += 1e-3
    second = torch_folder(tmp_path / "second", later)
    ckptz("compress", first, second, "--chain", "-o", tmp_path / "run", "--jobs", 1)
    full, link, delta = sorted((tmp_path / "run").rglob("*.ckptz"))
    assert (full.name, delta.name) == ("first.ckptz", "second.ckptz")
    assert link.parent == delta.parent
    assert link.samefile(full)


def test_a_file_that_is_restored_to_where_something_is(tmp_path: Path) -> None:
    package.torch.save_file({"w": torch.ones(3)}, tmp_path / "w.ckptz")
    ckptz("restore", tmp_path / "w.ckptz", "--to", "dcp")
    state = {"w": torch.zeros(3)}
    dcp.load(state, checkpoint_id=tmp_path / "w.dcp", no_dist=True)
    assert torch.equal(state["w"], torch.ones(3))
    run = ckptz("restore", tmp_path / "w.ckptz", "--to", "dcp", fails=True)
    assert run.exit_code == 2
    assert "not an empty folder" in run.stderr


@pytest.mark.parametrize("is_there", [True, False])
def test_a_private_file_becomes_a_folder_of_private_files(is_there: bool, tmp_path: Path) -> None:
    package.torch.save_file({"w": torch.ones(3)}, tmp_path / "w.ckptz")
    (tmp_path / "w.ckptz").chmod(0o600)
    if is_there:
        (tmp_path / "out").mkdir()
    ckptz("restore", tmp_path / "w.ckptz", "--to", "dcp", "-o", tmp_path / "out")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o600}


class Evil:
    """Object that opens a file for writing when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_no_code_runs_from_a_folder_of_torch(tmp_path: Path) -> None:
    folder = torch_folder(tmp_path / "source", {"w": torch.ones(3)})
    (folder / ".metadata").write_bytes(pickle.dumps({"x": Evil(tmp_path / "ran")}))
    run = ckptz("compress", folder, "-o", tmp_path / "out.ckptz", fails=True)
    assert run.exit_code == 4
    assert ".metadata: it needs code to load (io.open)" in run.stderr
    odd = torch_folder(tmp_path / "odd", {"w": torch.ones(3), "x": Evil(tmp_path / "kept")})
    (tmp_path / "kept").unlink(missing_ok=True)
    run = ckptz("compress", odd, "-o", tmp_path / "out.ckptz", fails=True)
    assert run.exit_code == 4
    assert "without running code" in run.stderr
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "kept").exists()


def test_a_missing_shard_of_torch_is_named(tmp_path: Path) -> None:
    folder = torch_folder(tmp_path / "source", {"w": torch.ones(3)})
    next(folder.glob("*.distcp")).unlink()
    with pytest.raises(FormatError, match=r"distcp: is missing"):
        open_input(folder).tensors["w"].patterns(0, 3)


def cut_folder(folder: Path, shape: list[int], parts: list[tuple[list[int], list[int]]]) -> Path:
    """Write a folder of torch with one tensor of ones, stored as chunks.

    Args:
        folder: to write to.
        shape: of the tensor, as the metadata declare it.
        parts: offset and shape of each chunk.
    """
    state = {f"w{i}": torch.ones(sizes) for i, (_, sizes) in enumerate(parts)}
    torch_folder(folder, state)
    raw: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    infos = {index.fqn: info for index, info in raw.storage_data.items()}
    chunks = [ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)) for offset, sizes in parts]
    storage_data = {
        MetadataIndex("w", torch.Size(offset)): infos[f"w{i}"] for i, (offset, _) in enumerate(parts)
    }
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), chunks)
    forged = Metadata({"w": tensor}, {"w": ("w",)}, storage_data)
    (folder / ".metadata").write_bytes(pickle.dumps(forged))
    return folder


def test_parts_that_make_a_tensor_whole_are_put_together(tmp_path: Path) -> None:
    parts = [([0, 0], [2, 1]), ([0, 1], [1, 2]), ([1, 1], [1, 2]), ([4, 0], [0, 3]), ([2, 0], [2, 3])]
    folder = cut_folder(tmp_path / "cut", [4, 3], parts)
    patterns = open_input(folder).tensors["w"].patterns(0, 12)
    assert patterns.view(np.float32).tolist() == [1.0] * 12


@pytest.mark.parametrize(
    ("shape", "parts", "words"),
    [
        ([4], [([0], [2]), ([1], [2])], "overlap"),  # which leaves a hole of the same size
        ([2, 2], [([0, 0], [1, 2]), ([0, 1], [2, 1])], "overlap"),
        ([4], [([0], [2])], "cover it exactly"),
        ([4], [([2], [4])], "outside"),
        ([4], [], "cover it exactly"),
        ([1 << 40], [([0], [1])], "cover it exactly"),
        ([1 << 40, 1 << 40], [([0, 0], [1, 1])], "elements"),
        ([2], [([0, 0], [1, 2])], "dimensions"),
    ],
)
def test_parts_that_overlap_or_leave_holes_are_refused(
    shape: list[int], parts: list[Any], words: str, tmp_path: Path
) -> None:
    folder = cut_folder(tmp_path / "cut", shape, parts)
    with pytest.raises(CorruptionError, match=f"cut: tensor 'w': .*{words}"):
        open_input(folder)


def test_many_parts_are_checked_in_no_time() -> None:
    n = 1 << 9
    grid = [((i, j), (1, 1)) for i in range(n) for j in range(n)]
    assert problem_of_parts((n, n), grid) == ""
    grid[7] = grid[8]
    assert "overlap" in problem_of_parts((n, n), grid)
    n = 9000  # each column is cut at another row
    stairs = [part for a in range(n) for part in (((0, a), (a, 1)), ((a, a), (n - a, 1)))]
    assert "different ways" in problem_of_parts((n, n), stairs)


def test_a_name_that_takes_for_ever_to_hash_is_refused(tmp_path: Path) -> None:
    module = b"ctorch.distributed.checkpoint."
    raw = doubled(module + b"metadata\nMetadataIndex\n)\x81}", b"")
    info = b"sb" + module + b"filesystem\n_StorageInfo\n)\x81}bs"
    index = raw[:2] + b"}" + raw[2:].replace(b")\x81}", b")\x81}\x8c\x03fqn", 1) + info
    state = b"}(\x8c\x0cstorage_data" + index[2:] + b"\x8c\x13state_dict_metadata}ub."
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + module + b"metadata\nMetadata\n)\x81" + state)
    with pytest.raises(CorruptionError, match="a name is not text"):
        open_input(tmp_path)


@pytest.mark.parametrize("stored", [torch.ones(5), torch.ones(4).double(), torch.ones(2, 2), [1.0] * 4])
def test_a_part_of_another_shape_or_type_is_refused(stored: Any, tmp_path: Path) -> None:
    folder = torch_folder(tmp_path / "source", {"w": torch.ones(4), "other": stored})
    raw: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    entries = {index.fqn: (index, info) for index, info in raw.storage_data.items()}
    raw.storage_data[entries["w"][0]] = entries["other"][1]
    (folder / ".metadata").write_bytes(pickle.dumps(raw))
    with pytest.raises(FormatError, match="'w'"):
        open_input(folder).tensors["w"].patterns(0, 4)


def doubled(before: bytes, after: bytes) -> bytes:
    """Return a pickle of a tuple of 200 levels, each its child twice: 2^200 steps to hash or print."""
    return b"\x80\x04" + before + b")\x94" + b"".join(b"h%c\x86\x94" % i for i in range(200)) + after


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"no pickle", pickle.dumps(Evil(Path("x")))[:-1], pickle.dumps({(1, 2) * 40: 3})),
        *(pickle.dumps({((1 << 61) - 1) * (i << 40): 0 for i in range(2000)}), pickle.dumps({1, 2})),
        *(doubled(b"}", b"Ns."), doubled(b"", b"\x8c\x01x\x93."), b"\x80\x04]h\x07.", b"\x80\x04\x85."),
        b"\x80\x04}}s.",
    ],
    ids=range(11),
)
def test_other_pickles_are_refused(data: bytes) -> None:
    with pytest.raises((CorruptionError, UnsupportedError)):
        Unpickler(io.BytesIO(data), {}).read_all()


def test_every_prefix_and_flip_of_the_metadata_is_data_or_an_error(tmp_path: Path) -> None:
    path = torch_folder(tmp_path / "source", {"w": torch.ones(3), "step": 2}) / ".metadata"
    raw = path.read_bytes()
    for end in range(0, len(raw), 7):
        path.write_bytes(raw[:end])
        with pytest.raises(CorruptionError):
            read_metadata(path)
    for at in range(0, len(raw), 5):
        flipped = bytearray(raw)
        flipped[at] ^= 0x11
        path.write_bytes(flipped)
        try:
            read_metadata(path)
        except (CorruptionError, UnsupportedError):
            continue
