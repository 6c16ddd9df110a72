"""Torch files: code, damage and full disks are errors that name the file; memory is bounded."""

import argparse
import os
import pickle
import resource
import signal
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ckptz.errors import CorruptionError, FormatError, UnsupportedError  # noqa: E402
from ckptz.foreign import torch_files  # noqa: E402
from ckptz.format.publish import publish  # noqa: E402
from ckptz.format.sources import chunk_bounds  # noqa: E402  # torch is optional
from ckptz.format.suffixes import TEMPORARY_SUFFIX  # noqa: E402
from ckptz.state import flatten as spool  # noqa: E402
from ckptz.state.flatten import Flat, flatten  # noqa: E402
from ckptz.torch import load_state, save_state  # noqa: E402
from tests.support.checkpointer_support import in_child  # noqa: E402
from tests.support.foreign_support import rewrite  # noqa: E402


def values(flat: Flat, name: str) -> Any:
    source = flat.tensors[name]
    chunks = [source.patterns(*bounds) for bounds in chunk_bounds(source.dtype.n_patterns(source.shape))]
    return np.concatenate(chunks)


@pytest.mark.parametrize(
    ("state", "protocol"),
    [
        ({"a": 1, "w": torch.ones(2)}, 4),
        ({"a": 2**5000}, 2),
        ({"a": b""}, 2),
        ({"a": torch.zeros(2, dtype=torch.float8_e5m2, requires_grad=True)}, 2),
    ],
    ids=["protocol 4", "large number", "no bytes", "gradient"],
)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_what_torch_saves_and_only_loads_with_code_is_refused(
    state: Any, protocol: int, tmp_path: Path
) -> None:
    path = tmp_path / "new.pt"
    torch.save(state, path, pickle_protocol=protocol)
    with pytest.raises((pickle.UnpicklingError, RuntimeError)):
        torch.load(path, weights_only=True)
    with pytest.raises((FormatError, UnsupportedError), match=r"new\.pt: "):
        torch_files.read(path)


def test_an_ordered_dict_in_memory_that_hides_its_methods_is_kept_or_named(tmp_path: Path) -> None:
    state = OrderedDict(weight=torch.ones(3))
    vars(state)["items"] = None
    save_state(state, tmp_path / "a.ckptz")
    assert torch.equal(load_state(tmp_path / "a.ckptz")["weight"], torch.ones(3))
    with pytest.raises(UnsupportedError, match="attribute 'items' cannot be kept"):
        flatten(state)


def test_records_that_are_not_aligned_are_read_into_memory(small_file: Path) -> None:
    rewrite(small_file, zipfile.ZIP_STORED)
    assert values(torch_files.read(small_file), "w").view(np.float32).tolist() == list(range(9))


@pytest.mark.parametrize("form", ["old", "pickle"])
def test_a_cut_pickle_that_needs_code_is_damage_or_names_it(form: str, tmp_path: Path) -> None:
    path, state = tmp_path / "run.pt", {"args": argparse.Namespace(lr=1), "tail": "x" * 99}
    if form == "pickle":
        path.write_bytes(pickle.dumps(state))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    for n in range(len(content) - 1):
        path.write_bytes(content[:n])
        with pytest.raises((FormatError, UnsupportedError), match=r"run\.pt: "):
            torch_files.read(path)


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    torch.save({"w": torch.arange(9.0), "lr": 0.5}, tmp_path / "small.pt")
    return tmp_path / "small.pt"


@pytest.mark.parametrize("step", [37, pytest.param(1, marks=pytest.mark.slow)])
def test_a_cut_file_is_damaged(small_file: Path, step: int) -> None:
    content = small_file.read_bytes()
    for n in range(0, len(content), step):
        small_file.write_bytes(content[:n])
        with pytest.raises(FormatError, match=r"small\.pt"):
            torch_files.read(small_file)


def test_a_flipped_bit_in_the_pickle_is_damage(small_file: Path) -> None:
    content = bytearray(small_file.read_bytes())
    at = content.index(b"\x80\x02}")
    for i in range(at, at + 150):
        content[i] ^= 4
        small_file.write_bytes(content)
        with pytest.raises(FormatError):
            torch_files.read(small_file)
        content[i] ^= 4


def test_a_tree_that_does_not_fit_its_tensors_is_corrupt(tmp_path: Path) -> None:
    tensors = flatten({"w": torch.zeros(2, 3)}).tensors

    def view(**changed: Any) -> dict[str, Any]:
        fields = {"view": 0, "dtype": "float32", "shape": [6], "strides": [1], "offset": 0}
        return {"root": fields | changed, "storages": [["w"]]}

    bad = [
        ({"root": {"tensor": "w", "strides": [1, 1]}, "storages": []}, "do not fit its shape"),
        ({"root": {"tensor": "w", "strides": [1]}, "storages": []}, "do not fit its shape"),
        ({"root": {"tensor": "w", "strides": [6, 1]}, "storages": []}, "do not fit its shape"),
        (
            {"root": [{"tensor": "w"}, {"tensor": "w", "strides": [1, 2]}], "storages": []},
            "different strides",
        ),
        ({"root": {"tensor": "x"}, "storages": []}, "'x' is not in the file"),
        ({"root": None, "storages": []}, "does not refer to tensor 'w'"),
        (view(offset=1), "beyond its storage"),
        (view(shape=[7]), "beyond its storage"),
        (view(shape=[(1 << 63) - 1]), "beyond its storage"),
        (view(shape=[(1 << 62), (1 << 62)], strides=[0, 0]), "in storage 0"),
        (view(dtype="int8", requires_grad=True), "only Tensors of floating point"),
    ]
    for tree, message in bad:
        with pytest.raises(CorruptionError, match=message):
            torch_files.write(tmp_path / "out.pt", tensors, tree)
    with pytest.raises(UnsupportedError, match="float77"):
        torch_files.write(tmp_path / "out.pt", tensors, view(dtype="float77"))
    with pytest.raises(UnsupportedError, match="no dtype 'nn'"):
        torch_files.write(tmp_path / "out.pt", tensors, view(dtype="nn"))
    assert os.listdir(tmp_path) == []


def write_to_a_full_disk(folder: Path, stage: str) -> None:
    flat = flatten({"w": torch.zeros(1 << 20)})
    state = spool.unflatten(flat.tensors, flat.tree, folder) if stage == "save" else None
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    number = None
    try:
        if stage == "save":
            with publish(folder / "out.pt") as file:
                torch_files.dump_state(file, state, folder / "out.pt")
        else:
            torch_files.write(folder / "out.pt", flat.tensors, flat.tree)
    except OSError as error:
        number = error.errno
    assert number, "the disk takes all, or nobody knows why it does not"
    assert not os.listdir(folder)


@pytest.mark.parametrize("stage", ["spool", "save"])
def test_a_full_disk_is_an_os_error_that_leaves_nothing(stage: str, tmp_path: Path) -> None:
    assert in_child(lambda: write_to_a_full_disk(tmp_path, stage)) == 0


def test_a_failing_source_leaves_the_old_file(tmp_path: Path) -> None:
    flat = flatten({"w": torch.zeros(3)})
    (tmp_path / "out.pt").write_text("old")

    def failing(*_: Any) -> Any:
        raise CorruptionError("no such bits")
        yield

    with pytest.raises(CorruptionError):
        torch_files.write(tmp_path / "out.pt", flat.tensors, flat.tree, failing)
    assert (tmp_path / "out.pt").read_text() == "old"
    assert not list(tmp_path.glob(f"*{TEMPORARY_SUFFIX}"))


MEMORY = """
import sys, threading, time
from pathlib import Path
import torch
from ckptz.foreign import torch_files  # noqa: E402

def anonymous():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10

folder = Path(sys.argv[1])
start, peak, is_done = anonymous(), [0], threading.Event()
def watch():
    while not is_done.wait(0.002):
        peak[0] = max(peak[0], anonymous())
thread = threading.Thread(target=watch)
thread.start()
flat = torch_files.read(folder / "in.pt")
torch_files.write(folder / "out.pt", flat.tensors, flat.tree)
is_done.set()
thread.join()
print(peak[0] - start)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts Linux' anonymous memory")
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    n = 48 << 20
    torch.save({"w": torch.ones(n // 4), "t": torch.ones(2048, n // 4096).bfloat16().t()}, tmp_path / "in.pt")
    process = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(process.stdout) < n, "less than half of what the two tensors take"
