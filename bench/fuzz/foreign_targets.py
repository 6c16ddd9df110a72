"""Targets of `foreign.py`: for each reader, valid input files and a function that reads one completely."""

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

from bench.fuzz.targets import with_valid_checksums
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
    """Valid inputs, and a function that reads a valid or mutated input."""

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
    """Fuzz files of torch.save in the zip format and in the legacy format."""
    state = _state()
    return Target([_saved(state), _saved(state, _use_new_zipfile_serialization=False)], _load)


def _torch_pickles(folder: Path) -> Target:
    """Fuzz the pickle in a zip file of torch.save, whose CRC is written anew for each input."""
    with zipfile.ZipFile(io.BytesIO(_saved(_state()))) as archive:
        records = {member.filename: archive.read(member) for member in archive.infolist()}
    [name] = [name for name in records if name.endswith("data.pkl")]

    def read(data: bytes) -> None:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for member, content in records.items():
                archive.writestr(member, data if member == name else content)
        _load(file.getvalue())

    return Target([records[name]], read)


def _dcp(folder: Path) -> Target:
    """Fuzz the metadata file of a folder of torch.distributed.checkpoint."""
    state = {"w": torch.ones(2, 3), "nested": {"flags": [1], "half": torch.ones(2).half()}}
    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    path = folder / "dcp" / ".metadata"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        _read_all(open_input(path.parent).tensors)

    return Target([path.read_bytes()], read)


def _dcp_shard(folder: Path) -> Target:
    """Fuzz a shard of a folder of torch.distributed.checkpoint."""
    dcp.save({"w": torch.ones(3), "o": (1, "x")}, checkpoint_id=folder / "dcp", no_dist=True)
    [path] = (folder / "dcp").glob("*.distcp")

    def read(data: bytes) -> None:
        path.write_bytes(data)
        _read_all(open_input(path.parent).tensors)

    return Target([path.read_bytes()], read)


def _dcp_index(folder: Path) -> Target:
    """Fuzz the index of a folder of `CkptzStorageWriter`, in version 1, which has no checksum."""
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


def _write_hf_model(folder: Path) -> None:
    folder.mkdir()
    weight_map = {}
    for i in (1, 2):
        name = f"model-0000{i}-of-00002.safetensors"
        safetensors.torch.save_file({f"w{i}": torch.ones(i, 2)}, folder / name, {"format": "pt"})
        weight_map[f"w{i}"] = name
    index = {"metadata": {"total_size": 24}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text("{}")


def _hf(name: str) -> Callable[[Path], Target]:
    """Fuzz one file of a Hugging Face model folder with two shards."""

    def make(folder: Path) -> Target:
        _write_hf_model(folder / "hf")
        path = folder / "hf" / name

        def read(data: bytes) -> None:
            path.write_bytes(data)
            with contextlib.closing(open_input(path.parent)) as opened:
                _read_all(opened.tensors)

        return Target([path.read_bytes()], read)

    return make


# --- side information and options of an encoder --------------------------------------------------------


def _calibration(folder: Path) -> Target:
    """Fuzz a calibration file, as `ckptz.hooks.Calibration` saves it."""
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
    """Fuzz a sensitivity file, as `ckptz.hooks.SensitivityTracker` saves it."""
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


def _search_report(folder: Path) -> Target:
    """Fuzz the search reports that `--json` prints and `--config` reads."""
    path, seeds = folder / "found.json", []
    for config in (KMeans(), Grid()):
        report = {"files": [{"search": {"method": config.name, "config": asdict(config)}}]}
        seeds.append(json.dumps(report).encode())

    def read(data: bytes) -> None:
        path.write_bytes(data)
        load_searched(path)

    return Target(seeds, read)


def _roles(folder: Path) -> Target:
    """Fuzz a role table."""
    text = b'[[rule]]\nname = "a.*"\nrole = "weight"\n[[rule]]\nname = "b"\nlayer_type = "norm"\n'
    return Target([text], lambda data: _ignore(load_rules(data.decode("utf-8", "replace"))))


# --- folders of trainers and of weight sync ------------------------------------------------------------


def _lightning(folder: Path) -> Target:
    """Fuzz a Lightning checkpoint of `CkptzIO`, with corrected checksums."""
    path = folder / "last.ckpt"
    Chain(ChainOptions(jobs=1)).write(path, job_of(_state()))

    def read(data: bytes) -> None:
        path.write_bytes(with_valid_checksums(data))
        load_state(path, jobs=1)

    return Target([path.read_bytes()], read)


def _trainer(folder: Path) -> Target:
    """Fuzz files of the Trainer's optimizer state and of its random state, with corrected checksums."""
    path, seeds = folder / "state.ckptz", []
    optimizer = {"state": {"w": {"step": torch.ones(1)}}, "classes": ["AdamW"], "groups": [{"params": ["w"]}]}
    training = {**optimizer, "optimizer": optimizer["state"], "scheduler": {"last_epoch": 1}, "scaler": None}
    for state in (training, {"rng": random_state()}):
        Chain(ChainOptions(jobs=1)).write(path, job_of(state))
        seeds.append(path.read_bytes())

    def read(data: bytes) -> None:
        path.write_bytes(with_valid_checksums(data))
        state = load_state(path, jobs=1)
        if isinstance(state, dict) and "rng" in state:
            set_random_state(state["rng"])
        else:
            check_training(state, str(path))

    return Target(seeds, read)


def _follower(folder: Path) -> Target:
    """Fuzz a delta that a `Follower` applies, with corrected checksums."""
    run, weight = folder / "run", np.ones(40, np.float32)
    publisher = Publisher(run, jobs=1)
    publisher.publish({"w": torch.from_numpy(weight)}, step=1)
    weight[3] = 2
    publisher.publish({"w": torch.from_numpy(weight)}, step=2)
    path = run / "step-000002.from-000001.ckptz"

    def read(data: bytes) -> None:
        path.write_bytes(with_valid_checksums(data))
        Follower(run, jobs=1).apply_to({"w": torch.zeros(40)})

    return Target([path.read_bytes()], read)


def _publisher(folder: Path) -> Target:
    """Fuzz the last delta in the folder of a `Publisher` that publishes a further step after it."""
    target = _follower(folder)
    path = folder / "run" / "step-000002.from-000001.ckptz"

    def read(data: bytes) -> None:
        path.write_bytes(with_valid_checksums(data))
        try:
            Publisher(folder / "run", jobs=1).publish({"w": torch.zeros(40)}, step=3)
        finally:
            for published in path.parent.glob("step-000003*"):
                published.unlink()

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
    "found": _search_report,
    "roles": _roles,
    "lightning": _lightning,
    "trainer": _trainer,
    "follower": _follower,
    "publisher": _publisher,
}
