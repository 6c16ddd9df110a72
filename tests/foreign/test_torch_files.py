"""Torch files in and out: code, damage and full disks are refused by name; memory stays bounded."""

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
from ckptz.format.publish import TEMPORARY_SUFFIX, publish  # noqa: E402
from ckptz.format.sources import chunk_bounds  # noqa: E402  # torch is optional
from ckptz.state import flatten as spool  # noqa: E402
from ckptz.state.flatten import Flat, flatten  # noqa: E402
from ckptz.torch import load_state, save_state  # noqa: E402
from tests.support.checkpointer_support import in_child  # noqa: E402
from tests.support.cli_support import ckptz  # noqa: E402


def values(flat: Flat, name: str) -> Any:
    source = flat.tensors[name]
    chunks = [source.patterns(*bounds) for bounds in chunk_bounds(source.dtype.n_patterns(source.shape))]
    return np.concatenate(chunks)


def test_a_refusal_names_the_file(tmp_path: Path) -> None:
    torch.save({"seen": {1, 2}}, tmp_path / "a.pt")
    with pytest.raises(UnsupportedError, match=r"a\.pt: it needs code to load \(__builtin__\.set\)"):
        torch_files.read(tmp_path / "a.pt")


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickle_that_needs_code_is_refused_and_not_run(is_zip: bool, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    torch.save({"args": argparse.Namespace(lr=1)}, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(UnsupportedError, match=r"run\.pt: .*\(argparse\.Namespace\).*state_dict"):
        torch_files.read(path)


class RunsCommand:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (argparse.Namespace(lr=1), "argparse.Namespace"),
        (RunsCommand(), "(posix|nt).system"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (np.float64(1), "numpy.*scalar"),
        (Path("x"), "pathlib.*Path"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("form", ["zip", "old", "protocol 4", "pickle"])
def test_a_class_is_named_whatever_the_form_of_the_file(
    form: str, value: Any, wanted: str, tmp_path: Path
) -> None:
    path, state = tmp_path / "run.pt", {"weight": [1.5, "x"], "args": value}
    if form == "pickle":
        path.write_bytes(pickle.dumps(state))
    else:
        protocol = 4 if form == "protocol 4" else 2
        torch.save(state, path, pickle_protocol=protocol, _use_new_zipfile_serialization=form != "old")
    with pytest.raises(UnsupportedError, match=rf"run\.pt: .*\({wanted}\).*save a plain state_dict"):
        torch_files.read(path)


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


class _HidesMethods:
    """Pickled as an OrderedDict whose state is one attribute."""

    def __init__(self, attribute: str) -> None:
        self.attribute = attribute

    def __reduce__(self) -> Any:
        return OrderedDict, (), {self.attribute: 1}, None, iter([("weight", torch.ones(3))])


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "old"])
@pytest.mark.parametrize("attribute", ["items", "keys", "update", "__reduce__", "__class__", "__dict__"])
def test_an_ordered_dict_that_hides_its_methods_is_refused(
    attribute: str, is_zip: bool, tmp_path: Path
) -> None:
    for name, state in (("root", _HidesMethods(attribute)), ("nested", {"model": _HidesMethods(attribute)})):
        torch.save(state, tmp_path / f"{name}.pt", _use_new_zipfile_serialization=is_zip)
        run = ckptz("compress", tmp_path / f"{name}.pt", fails=True)
        assert run.exit_code == 3
        assert f"{name}.pt: an OrderedDict whose attribute '{attribute}' hides its method" in run.error


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
    whole = path.read_bytes()
    for n in range(len(whole) - 1):
        path.write_bytes(whole[:n])
        with pytest.raises((FormatError, UnsupportedError), match=r"run\.pt: "):
            torch_files.read(path)


def test_a_torchscript_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "script.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("constants.pkl", "data.pkl", "version"):
            archive.writestr(f"script/{name}", b"3\n")
    with pytest.raises(UnsupportedError, match=r"script\.pt: a TorchScript program"):
        torch_files.read(path)


def test_the_old_form_is_read(tmp_path: Path) -> None:
    state = {"w": torch.randn(3, 4), "n": 3}
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    flat = torch_files.read(tmp_path / "old.pt")
    assert values(flat, "w").tobytes() == state["w"].numpy().tobytes()


def test_a_flat_checkpoint_becomes_a_dict_of_tensors(tmp_path: Path) -> None:
    tensors = flatten({"b": torch.arange(3), "a": torch.randn(2, 2)}).tensors
    torch_files.write(tmp_path / "out.pt", tensors, None)
    restored = torch.load(tmp_path / "out.pt", weights_only=True)
    assert list(restored) == ["b", "a"]
    assert restored["b"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "content",
    [b"", b"hello, this is no checkpoint", b"PK\x03\x04" + bytes(50), b"\x80\x02\x8a\x0a" + bytes(9)],
    ids=["empty", "text", "zip", "pickle"],
)
def test_damage_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.pt"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"bad\.pt: "):
        torch_files.read(path)


def test_other_pickles_are_refused(tmp_path: Path) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "p.pt").write_bytes(pickle.dumps({"a": 1}, protocol))
        with pytest.raises(FormatError, match=r"p\.pt: "):
            torch_files.read(tmp_path / "p.pt")


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    torch.save({"w": torch.arange(9.0), "lr": 0.5}, tmp_path / "small.pt")
    return tmp_path / "small.pt"


@pytest.mark.parametrize("step", [37, pytest.param(1, marks=pytest.mark.slow)])
def test_a_cut_file_is_damaged(small_file: Path, step: int) -> None:
    whole = small_file.read_bytes()
    for n in range(0, len(whole), step):
        small_file.write_bytes(whole[:n])
        with pytest.raises(FormatError, match=r"small\.pt"):
            torch_files.read(small_file)


def test_a_flipped_bit_in_the_pickle_is_damage(small_file: Path) -> None:
    whole = bytearray(small_file.read_bytes())
    at = whole.index(b"\x80\x02}")
    for i in range(at, at + 150):
        whole[i] ^= 4
        small_file.write_bytes(whole)
        with pytest.raises(FormatError):
            torch_files.read(small_file)
        whole[i] ^= 4


def rewrite(path: Path, compression: int = zipfile.ZIP_STORED, change: Any = None) -> None:
    """Write the records of a torch file anew, without checksums, the pickle as it is changed."""
    with zipfile.ZipFile(path) as archive:
        records = {record.filename: archive.read(record) for record in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records.items():
            is_changed = change is not None and name.endswith("data.pkl")
            archive.writestr(name, change(content) if is_changed else content)


def test_compressed_records_are_not_taken_for_values(small_file: Path) -> None:
    rewrite(small_file, zipfile.ZIP_DEFLATED)
    with pytest.raises(UnsupportedError, match=r"small\.pt: its records are compressed"):
        torch_files.read(small_file)


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
    for tree, said in bad:
        with pytest.raises(CorruptionError, match=said):
            torch_files.write(tmp_path / "out.pt", tensors, tree)
    with pytest.raises(UnsupportedError, match="float77"):
        torch_files.write(tmp_path / "out.pt", tensors, view(dtype="float77"))
    with pytest.raises(UnsupportedError, match="no dtype 'nn'"):
        torch_files.write(tmp_path / "out.pt", tensors, view(dtype="nn"))
    assert os.listdir(tmp_path) == []


def replaced(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))


def test_a_storage_that_says_more_than_there_is_shows_no_other_memory(tmp_path: Path) -> None:
    """torch itself gives out what lies behind."""
    path = tmp_path / "long.pt"
    torch.save({"w": torch.arange(9.0)}, path)
    rewrite(path, change=lambda raw: raw.replace(b"K\x09", b"K\x60"))
    with pytest.raises(FormatError, match=r"long\.pt: storage '0' is truncated"):
        torch_files.read(path)


OFFSET_AND_SHAPE = b"K\x01K\x08\x85"


def test_a_tensor_beyond_its_storage_is_refused(tmp_path: Path) -> None:
    for is_zip in (True, False):
        path = tmp_path / "beyond.pt"
        torch.save({"w": torch.arange(9.0)[1:]}, path, _use_new_zipfile_serialization=is_zip)
        if is_zip:
            rewrite(path, change=lambda raw: raw.replace(OFFSET_AND_SHAPE, b"K\x02K\x08\x85"))
        else:
            replaced(path, OFFSET_AND_SHAPE, b"K\x02K\x08\x85")
        with pytest.raises(FormatError, match="beyond its storage"):
            torch_files.read(path)


def test_a_storage_of_the_old_form_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """torch itself gives out memory that nobody wrote."""
    path = tmp_path / "old.pt"
    torch.save({"w": torch.arange(9.0)}, path, _use_new_zipfile_serialization=False)
    at = path.read_bytes().rindex(b"\x80\x02]")
    path.write_bytes(path.read_bytes()[:at] + b"\x80\x02].")
    with pytest.raises(FormatError, match="storages are not those of its tensors"):
        torch_files.read(path)


@pytest.mark.parametrize(
    "value",
    [
        b"ctorch\nFloatTensor\nK\x09\x85R",  # as many numbers, of memory that nobody wrote
        b"ctorch.storage\nUntypedStorage\nK\x09\x85R",
        b"c__builtin__\nbytearray\n\x8a\x06\0\0\0\0\0\x01\x85R",  # of a terabyte
        b"}" + b")q\x10" + b"".join(b"h%c\x86q%c" % (16 + i, 17 + i) for i in range(200)) + b"Ns",
    ],
    ids=["tensor", "storage", "bytearray", "nested key"],
)
def test_calls_and_keys_that_torch_would_make_are_not_made(value: bytes, tmp_path: Path) -> None:
    path = tmp_path / "made.pt"
    torch.save({"w": torch.zeros(2), "x": None}, path)
    rewrite(path, change=lambda raw: b"\x80\x02]" + value + b"a.")
    with pytest.raises((FormatError, UnsupportedError), match=r"made\.pt: "):
        torch_files.read(path)


def test_two_records_of_one_name_are_refused(small_file: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(small_file, "a") as archive:
        archive.writestr(archive.infolist()[0].filename, b"other")
    with pytest.raises(FormatError, match=r"small\.pt: .*two records"):
        torch_files.read(small_file)


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

    def failing(_: Any) -> Any:
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
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < n, "less than half of what the two tensors take"
