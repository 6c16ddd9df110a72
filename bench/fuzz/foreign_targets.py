"""What `foreign.py` fuzzes: for each reader some right files, and how one of them is read whole."""

from __future__ import annotations

import contextlib
import io
import json
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from bench.fuzz.targets import _with_right_digests
from ckptz import Grid, KMeans
from ckptz.foreign.dcp_index import INDEX_FILE, read_index
from ckptz.foreign.inputs import open_input
from ckptz.foreign.torch_files import load_part
from ckptz.format.sources import TensorSource, chunk_bounds
from ckptz.guidance.files import CalibrationFile, SensitivityFile
from ckptz.hooks import Calibration, SensitivityTracker
from ckptz.integrations.dcp import CkptzStorageReader, CkptzStorageWriter
from ckptz.integrations.linked import Chain, ChainOptions, job_of
from ckptz.search.budget import load_searched
from ckptz.state.flatten import flatten
from ckptz.state.roles import load_rules
from ckptz.sync import Follower, Publisher
from ckptz.torch import load_state
from ckptz.training.state import check_training, random_state, set_random_state


@dataclass(frozen=True)
class Target:
    """Right inputs, and a reader that is given one of them or what became of it."""

    seeds: list[bytes]
    read: Callable[[bytes], None]


def _ignore(value: object) -> None:
    del value


def _read_all(tensors: Mapping[str, TensorSource]) -> None:
    for source in tensors.values():
        for begin, end in chunk_bounds(source.dtype.n_patterns(source.shape)):
            assert len(source.patterns(begin, end)) == end - begin


def _state() -> dict[str, Any]:
    shared = torch.arange(6.0)
    return {
        "model": OrderedDict(w=torch.nn.Parameter(torch.ones(2))),
        "step": {0: 3},
        "views": [shared[1:], shared.view(2, 3).t(), torch.ones(2, dtype=torch.bfloat16)],
        "flags": (True, None, 2.5, b"x", "text"),
    }


def _saved(state: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file, **options)
    return file.getvalue()


# --- torch ---------------------------------------------------------------------------------------------


def _load(data: bytes) -> None:
    _read_all(flatten(load_part(data)).tensors)


def _torch_files(folder: Path) -> Target:
    """Files of torch.save in both forms, as they are."""
    state = _state()
    return Target([_saved(state), _saved(state, _use_new_zipfile_serialization=False)], _load)


def _torch_pickles(folder: Path) -> Target:
    """The pickle within such a file, put into it without a checksum."""
    with zipfile.ZipFile(io.BytesIO(_saved(_state()))) as archive:
        records = {one.filename: archive.read(one) for one in archive.infolist()}
    [name] = [name for name in records if name.endswith("data.pkl")]

    def read(data: bytes) -> None:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for other, content in records.items():
                archive.writestr(other, data if other == name else content)
        _load(file.getvalue())

    return Target([records[name]], read)


def _dcp(folder: Path) -> Target:
    """The metadata of a folder of torch.distributed.checkpoint."""
    state = {"w": torch.ones(2, 3), "nested": {"flags": [1], "half": torch.ones(2).half()}}
    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    path = folder / "dcp" / ".metadata"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        _read_all(open_input(path.parent).tensors)

    return Target([path.read_bytes()], read)


def _dcp_shard(folder: Path) -> Target:
    """A shard of such a folder."""
    dcp.save({"w": torch.ones(3), "o": (1, "x")}, checkpoint_id=folder / "dcp", no_dist=True)
    [path] = (folder / "dcp").glob("*.distcp")

    def read(data: bytes) -> None:
        path.write_bytes(data)
        _read_all(open_input(path.parent).tensors)

    return Target([path.read_bytes()], read)


def _dcp_index(folder: Path) -> Target:
    """The index of a folder that our storage writer wrote, as of the first version, which has no checksum."""
    writer = CkptzStorageWriter(folder / "ours", options=ChainOptions(jobs=1))
    dcp.save({"w": torch.ones(2, 3), "o": (1, torch.ones(2))}, storage_writer=writer, no_dist=True)
    path = folder / "ours" / INDEX_FILE
    first = {**json.loads(path.read_bytes()), "version": 1}
    del first["checksum"]

    def read(data: bytes) -> None:
        path.write_bytes(data)
        reader = CkptzStorageReader(path.parent, jobs=1)
        reader.read_metadata()
        index = read_index(path.parent)
        for name in index.objects:
            reader.read_object(index, name)

    return Target([json.dumps(first).encode()], read)


# --- Hugging Face folders ------------------------------------------------------------------------------


def _folder_of(folder: Path) -> Path:
    home = folder / "hf"
    home.mkdir()
    places = {}
    for i in (1, 2):
        name = f"model-0000{i}-of-00002.safetensors"
        safetensors.torch.save_file({f"w{i}": torch.ones(i, 2)}, home / name, {"format": "pt"})
        places[f"w{i}"] = name
    index = {"metadata": {"total_size": 24}, "weight_map": places}
    (home / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (home / "config.json").write_text("{}")
    return home


def _hf(name: str) -> Callable[[Path], Target]:
    def make(folder: Path) -> Target:
        path = _folder_of(folder) / name

        def read(data: bytes) -> None:
            path.write_bytes(data)
            with contextlib.closing(open_input(path.parent)) as opened:
                _read_all(opened.tensors)

        return Target([path.read_bytes()], read)

    return make


# --- what guides an encoder ----------------------------------------------------------------------------


def _calibration(folder: Path) -> Target:
    """What `ckptz.hooks.Calibration` saves."""
    torch.manual_seed(0)
    model, path = (
        torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 2)),
        folder / "c.safetensors",
    )
    with Calibration(model) as calibration:
        model(torch.tensor([0, 1, 4]))
    calibration.save(path)

    def read(data: bytes) -> None:
        path.write_bytes(data)
        with CalibrationFile(path) as file:
            file.match({"1.weight": (2, 3)})
            for recorded in file.recorded.values():
                for covariance in recorded.covariances.values():
                    covariance.read()

    return Target([path.read_bytes()], read)


def _sensitivity(folder: Path) -> Target:
    """What `ckptz.hooks.SensitivityTracker` saves."""
    torch.manual_seed(0)
    model, path = torch.nn.Linear(3, 2), folder / "s.safetensors"
    tracker, optimizer = SensitivityTracker(model), torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    tracker.save(path)

    def read(data: bytes) -> None:
        path.write_bytes(data)
        with SensitivityFile(path) as file:
            file.match({"weight": (2, 3)})
            for average in file.recorded.values():
                average.read()

    return Target([path.read_bytes()], read)


def _found(folder: Path) -> Target:
    """Fuzz the reader of `--config`, from reports of searches as `--json` prints them."""
    path, seeds = folder / "found.json", []
    for config in (KMeans(), Grid()):
        report = {"files": [{"search": {"method": config.name, "config": asdict(config)}}]}
        seeds.append(json.dumps(report).encode())

    def read(data: bytes) -> None:
        path.write_bytes(data)
        load_searched(path)

    return Target(seeds, read)


def _roles(folder: Path) -> Target:
    """A table of roles."""
    text = b'[[rule]]\nname = "a.*"\nrole = "weight"\n[[rule]]\nname = "b"\nlayer_type = "norm"\n'
    return Target([text], lambda data: _ignore(load_rules(data.decode("utf-8", "replace"))))


# --- folders of trainers and of weight sync ------------------------------------------------------------


def _lightning(folder: Path) -> Target:
    """A file of Lightning's, as `CkptzIO` writes it, with right checksums."""
    path = folder / "last.ckpt"
    Chain(ChainOptions(jobs=1)).write(path, job_of(_state()))

    def read(data: bytes) -> None:
        path.write_bytes(_with_right_digests(data))
        load_state(path, jobs=1)

    return Target([path.read_bytes()], read)


def _trainer(folder: Path) -> Target:
    """The index of the Trainer's state and of its random state, with right checksums."""
    path, seeds = folder / "state.ckptz", []
    optimizer = {"state": {"w": {"step": torch.ones(1)}}, "classes": ["AdamW"], "groups": [{"params": ["w"]}]}
    training = {**optimizer, "optimizer": optimizer["state"], "scheduler": {"last_epoch": 1}, "scaler": None}
    for state in (training, {"rng": random_state()}):
        Chain(ChainOptions(jobs=1)).write(path, job_of(state))
        seeds.append(path.read_bytes())

    def read(data: bytes) -> None:
        path.write_bytes(_with_right_digests(data))
        state = load_state(path, jobs=1)
        if isinstance(state, dict) and "rng" in state:
            set_random_state(state["rng"])
        else:
            check_training(state, str(path))

    return Target(seeds, read)


def _follower(folder: Path) -> Target:
    """A delta that a follower applies, with right checksums."""
    home, weight = folder / "run", np.ones(40, np.float32)
    publisher = Publisher(home, jobs=1)
    publisher.publish({"w": torch.from_numpy(weight)}, step=1)
    weight[3] = 2
    publisher.publish({"w": torch.from_numpy(weight)}, step=2)
    path = home / "step-000002.from-000001.ckptz"

    def read(data: bytes) -> None:
        path.write_bytes(_with_right_digests(data))
        Follower(home, jobs=1).apply_to({"w": torch.zeros(40)})

    return Target([path.read_bytes()], read)


def _publisher(folder: Path) -> Target:
    """The same file, as a publisher that goes on from it finds it."""
    target = _follower(folder)
    path = folder / "run" / "step-000002.from-000001.ckptz"

    def read(data: bytes) -> None:
        path.write_bytes(_with_right_digests(data))
        try:
            Publisher(folder / "run", jobs=1).publish({"w": torch.zeros(40)}, step=3)
        finally:
            for found in path.parent.glob("step-000003*"):
                found.unlink()

    return Target(target.seeds, read)


TARGETS: Final[Mapping[str, Callable[[Path], Target]]] = {
    "torch": _torch_files,
    "torch-pickle": _torch_pickles,
    "dcp": _dcp,
    "dcp-shard": _dcp_shard,
    "dcp-index": _dcp_index,
    "hf-index": _hf("model.safetensors.index.json"),
    "hf-shard": _hf("model-00001-of-00002.safetensors"),
    "calibration": _calibration,
    "sensitivity": _sensitivity,
    "found": _found,
    "roles": _roles,
    "lightning": _lightning,
    "trainer": _trainer,
    "follower": _follower,
    "publisher": _publisher,
}
