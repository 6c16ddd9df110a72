"""A step of several ranks is one checkpoint for every verb; a missing file is an error."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.numpy import load_file as load_plain
from safetensors.numpy import save_file as save_plain

from ckptz import restore
from ckptz.foreign.dcp_index import (
    FolderIndex,
    Piece,
    ShardFile,
    StoredObject,
    WholeTensor,
    read_index,
    write_index,
)
from ckptz.numpy import save_file
from tests.support.cli_support import ckptz

FULL = {
    "model.up.weight": np.arange(48, dtype=np.float32).reshape(8, 6),
    "model.norm.weight": np.linspace(0, 1, 6, dtype=np.float32),
    "optimizer.state.up.exp_avg": np.arange(48, dtype=np.float16).reshape(8, 6),
}
# Offsets and shapes of each tensor's pieces by rank: rows, a single rank, and a grid.
PIECES: dict[str, list[tuple[int, tuple[int, ...], tuple[int, ...]]]] = {
    "model.up.weight": [(0, (0, 0), (3, 6)), (1, (3, 0), (5, 6))],
    "model.norm.weight": [(1, (0,), (6,))],
    "optimizer.state.up.exp_avg": [(0, (0, 0), (4, 2)), (1, (0, 2), (4, 4)), (0, (4, 0), (4, 6))],
}
# Values other than tensors; one of them looks like the node of a tensor in a tree.
OBJECTS: dict[str, Any] = {"epoch": 3, "parallel": {"dict": [["tensor", "tensor parallel"]]}}


def stored_object(name: str, node: Any) -> StoredObject:
    return StoredObject(0, {"root": {"dict": [[name, node]]}, "storages": []})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write one step of two ranks."""
    folder = tmp_path / "run" / "step-60"
    folder.mkdir(parents=True)
    shards: list[dict[str, Any]] = [{}, {}]
    tensors = {}
    for name, pieces in PIECES.items():
        chunks = []
        for i, (rank, offset, shape) in enumerate(pieces):
            slices = tuple(slice(b, b + n) for b, n in zip(offset, shape, strict=True))
            shards[rank][f"{name}.{i}"] = np.ascontiguousarray(FULL[name][slices])
            chunks.append(Piece(offset, shape, rank, f"{name}.{i}"))
        dtype = {"float32": "F32", "float16": "F16"}[FULL[name].dtype.name]
        tensors[name] = WholeTensor(dtype, FULL[name].shape, tuple(chunks))
    for rank, shard in enumerate(shards):
        save_file(shard, folder / f"shard-{rank:05d}-5e1f.ckptz")
    paths = {name: tuple(name.split(".", 1)) for name in FULL} | {name: (name,) for name in OBJECTS}
    files = tuple(ShardFile(f"shard-{rank:05d}-5e1f.ckptz", rank) for rank in range(2))
    objects = {name: stored_object(name, node) for name, node in OBJECTS.items()}
    write_index(folder, FolderIndex("ckptz.dcp", 2, 2, files, tensors, objects, paths))
    save_plain(FULL, tmp_path / "full.safetensors")
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["{run}@60", "{run}/step-60"])
def test_a_restore_puts_the_shards_of_all_ranks_together(run: Path, name: str, tmp_path: Path) -> None:
    result = ckptz("restore", name.format(run=run), "-o", tmp_path / "out.safetensors")
    assert "3 tensors" in result.stdout
    restored = load_plain(tmp_path / "out.safetensors")
    assert restored.keys() == FULL.keys()
    for key, value in FULL.items():
        np.testing.assert_array_equal(restored[key], value)
        assert restored[key].dtype == value.dtype


def test_torch_loads_a_restore_to_dcp(run: Path, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    ckptz("restore", f"{run}@60", "--to", "dcp", "-o", tmp_path / "dcp")
    state = {
        "model": {"up.weight": torch.zeros(8, 6), "norm.weight": torch.zeros(6)},
        "optimizer": {"state.up.exp_avg": torch.zeros(8, 6, dtype=torch.float16)},
        "epoch": 0,
        "parallel": {},
    }
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    np.testing.assert_array_equal(state["model"]["up.weight"].numpy(), FULL["model.up.weight"])
    moments = state["optimizer"]["state.up.exp_avg"].numpy()
    np.testing.assert_array_equal(moments, FULL["optimizer.state.up.exp_avg"])
    assert state["epoch"] == 3


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"tuple": [1, {"tensor": "held.1"}]}, "object 'held': contains tensors; load the step with torch"),
        ({"tensor": 1}, "object 'held': tree: "),
    ],
)
def test_an_object_that_cannot_be_put_together_is_named(run: Path, node: Any, message: str) -> None:
    index = read_index(run / "step-60")
    write_index(run / "step-60", replace(index, objects={"held": stored_object("held", node)}))
    failed = ckptz("restore", f"{run}@60", "-o", run / "out.safetensors", fails=True)
    assert f"{run / 'step-60'}/ckptz-index.json: {message}" in failed.error


@pytest.mark.parametrize("path", [(), ("parallel", "inner"), ("parallel",), ("a",) * 2000])
def test_a_path_that_cannot_be_is_an_error(run: Path, path: tuple[str, ...]) -> None:
    index = read_index(run / "step-60")
    assert index.paths is not None
    write_index(run / "step-60", replace(index, paths={**index.paths, "epoch": path}))
    failed = ckptz("restore", f"{run}@60", "-o", run / "out.safetensors", fails=True)
    assert f"{run / 'step-60'}/ckptz-index.json: the path of " in failed.error


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_a_restore_holds_a_few_tensors_at_a_time(tmp_path: Path, to: str) -> None:
    """The measured peak is 3.6 times the largest tensor: two tensors, an assembled one, and its pieces."""
    n_tensors, n_ranks, rows, columns = 16, 4, 1024, 2048
    folder, n_bytes = tmp_path / "run" / "step-60", rows * columns * 4
    folder.mkdir(parents=True)
    shard = np.zeros((rows // n_ranks, columns), np.float32)
    offsets = [(rank * len(shard), 0) for rank in range(n_ranks)]
    tensors = {}
    for name in map(str, range(n_tensors)):
        chunks = [Piece(offset, shard.shape, rank, name) for rank, offset in enumerate(offsets)]
        tensors[name] = WholeTensor("F32", (rows, columns), tuple(chunks))
    files = tuple(ShardFile(f"shard-{rank:05d}-5e1f.ckptz", rank) for rank in range(n_ranks))
    for file in files:
        save_file(dict.fromkeys(tensors, shard), folder / file.name)
    write_index(folder, FolderIndex("ckptz.dcp", 2, n_ranks, files, tensors, {}, None))
    restore(f"{tmp_path}/run@60", tmp_path / "compiled", to=to, jobs=1)  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        restore(f"{tmp_path}/run@60", tmp_path / "whole", to=to, jobs=1)  # type: ignore[arg-type]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5 * n_bytes < n_tensors * n_bytes


def test_verify_and_diff_see_all_ranks(run: Path, tmp_path: Path) -> None:
    result = ckptz("verify", f"{run}@60", "--against", tmp_path / "full.safetensors")
    assert "all 3 tensors match their checksums" in result.stdout
    assert "all 3 tensors are equal" in ckptz("diff", f"{run}@60", tmp_path / "full.safetensors").stdout
    save_plain(FULL | {"model.norm.weight": np.ones(6, np.float32)}, tmp_path / "other.safetensors")
    other = ckptz("verify", f"{run}@60", "--against", tmp_path / "other.safetensors", fails=True)
    assert "tensor 'model.norm.weight' differs" in other.error


def test_inspect_names_the_files_of_the_ranks(run: Path) -> None:
    failed = ckptz("inspect", f"{run}@60", fails=True)
    assert "several ranks wrote this step; name one of its files" in failed.error
    assert "shard-00001-5e1f.ckptz" in failed.error


@pytest.mark.parametrize("verb", ["restore", "verify", "diff"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank_is_an_error_and_no_part_of_a_model(
    run: Path, verb: str, rank: int, tmp_path: Path
) -> None:
    (run / "step-60" / f"shard-{rank:05d}-5e1f.ckptz").unlink()
    arguments = {
        "restore": ("-o", tmp_path / "out.safetensors"),
        "verify": (),
        "diff": (tmp_path / "full.safetensors",),
    }[verb]
    failed = ckptz(verb, f"{run}@60", *arguments, fails=True)
    assert f"shard-{rank:05d}-5e1f.ckptz: is missing" in failed.error
    assert not (tmp_path / "out.safetensors").exists()
