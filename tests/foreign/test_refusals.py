"""Foreign files and folders that are refused: class of the error, and words that name file and cause."""

import argparse
import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from ckptz.errors import ConfigError, CorruptionError, FormatError, TruncatedError, UnsupportedError
from ckptz.foreign.inputs import open_input
from tests.support.foreign_support import FIRST, HOSTILE_NAMES, INDEX, SECOND, rewrite, sharded_folder

Refusal = tuple[Callable[[Path], object], type[BaseException], str]


def check(path: Path, make: Callable[[Path], object], error: type[BaseException], words: str) -> None:
    """Write a file or folder and require that it is refused; `make` may return another path to open."""
    returned = make(path)
    with pytest.raises(error, match=words):
        open_input(returned if isinstance(returned, Path) else path).close()


# --- single files ---------------------------------------------------------------------------------


def holds(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def twice() -> bytes:
    entry = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}'
    header = b"{" + entry % (0, 1) + b"," + entry % (1, 2) + b"}"
    return len(header).to_bytes(8, "little") + header + b"ab"


def torch_bytes(state: Any, **how: Any) -> bytes:
    sink = io.BytesIO()
    torch.save(state, sink, **how)
    return sink.getvalue()


STATE = {"w": torch.arange(9.0)}
ARCHIVE = torch_bytes(STATE)
OLD = torch_bytes(STATE, _use_new_zipfile_serialization=False)
BEYOND = b"K\x01K\x08\x85", b"K\x02K\x08\x85"  # offset and shape of a view, and others


def changed(change: Callable[[bytes], bytes], state: Any = STATE, **how: Any) -> Callable[[Path], object]:
    """Return a function that writes a torch file and changes its pickle."""

    def make(path: Path) -> None:
        path.write_bytes(torch_bytes(state))
        rewrite(path, change=change, **how)

    return make


def with_record(path: Path) -> None:
    """Write a torch file with two records of one name."""
    path.write_bytes(ARCHIVE)
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr(archive.infolist()[0].filename, b"other")


def script(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("constants.pkl", "data.pkl", "version"):
            archive.writestr(f"script/{name}", b"3\n")


def with_gap() -> bytes:
    with zipfile.ZipFile(io.BytesIO(ARCHIVE)) as archive:
        start = archive.start_dir
    return ARCHIVE[:start] + b"\0" * 64 + ARCHIVE[start:]


def with_other_offset() -> bytes:
    raw = bytearray(ARCHIVE)
    (offset,) = struct.unpack_from("<I", raw, len(raw) - 6)
    struct.pack_into("<I", raw, len(raw) - 6, offset - 64)
    return bytes(raw)


class RunsCommand:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


class HidesMethods:
    """Object that is pickled as an OrderedDict with one attribute."""

    def __init__(self, attribute: str) -> None:
        self.attribute = attribute

    def __reduce__(self) -> Any:
        return OrderedDict, (), {self.attribute: 1}, None, iter([("weight", torch.ones(3))])


def pickled(form: str, state: Any) -> bytes:
    """Return a state in one of the file formats of torch, or as a bare pickle."""
    how: dict[str, Any] = {
        "old": {"_use_new_zipfile_serialization": False},
        "protocol 4": {"pickle_protocol": 4},
    }
    return pickle.dumps(state) if form == "pickle" else torch_bytes(state, **how.get(form, {}))


IS_NONE = r"\.safetensors.*\.pt.*folder"  # accepted files
NO_CODE = (FormatError, UnsupportedError)
OTHERS = {"gguf": b"GGUF" + bytes(90), "txt": b"hello, world", "png": b"\x89PNG\r\n\x1a\n{", "empty": b""}
DAMAGED = {
    "empty.pt": b"", "text.pt": b"hello, this is no checkpoint", "zip.pt": b"PK\x03\x04" + bytes(50),
    "pickle.pt": b"\x80\x02\x8a\x0a" + bytes(9),
    **{f"short.{name}": b"\x01\x02" for name in ("safetensors", "ckptz", "pt", "bin")},
    **{f"pickle-{n}.pt": pickle.dumps({"a": 1}, n) for n in range(pickle.HIGHEST_PROTOCOL + 1)},
}  # fmt: skip
# Zip files in which readers may find different pickles.
ZIPS = {
    "prepended.pt": torch_bytes({"w": torch.ones(8)}) + ARCHIVE, "gap.pt": with_gap(),
    "behind.pt": ARCHIVE + bytes(10), "comment.pt": ARCHIVE[:-2] + struct.pack("<H", 4) + b"abcd",
    "offset.pt": with_other_offset(),
}  # fmt: skip
CALLS = {
    "tensor": b"ctorch\nFloatTensor\nK\x09\x85R",  # the same number of elements, of uninitialized memory
    "storage": b"ctorch.storage\nUntypedStorage\nK\x09\x85R",
    "bytearray": b"c__builtin__\nbytearray\n\x8a\x06\0\0\0\0\0\x01\x85R",  # of a terabyte
    "key": b"}" + b")q\x10" + b"".join(b"h%c\x86q%c" % (16 + i, 17 + i) for i in range(200)) + b"Ns",
}
CLASSES = {
    r"argparse\.Namespace": argparse.Namespace(lr=1), "(posix|nt).system": RunsCommand(),
    r"torch\.nn\.modules\.linear\.Linear": torch.nn.Linear(1, 1), "numpy.*scalar": np.float64(1),
    "pathlib.*Path": Path("x"),
}  # fmt: skip
HIDDEN = ("items", "keys", "update", "__reduce__", "__class__", "__dict__")
VIEW = {"w": torch.arange(9.0)[1:]}
# By file name: a function that writes the file, the class of the error, and words after the name.
FILES: dict[str, Refusal] = {
    **{f"other.{name}": (holds(content), ConfigError, IS_NONE) for name, content in OTHERS.items()},
    **{name: (holds(content), FormatError, "") for name, content in DAMAGED.items()},
    **{name: (holds(content), CorruptionError, "") for name, content in ZIPS.items()},
    "pipe": (os.mkfifo, ConfigError, "not a regular file"),
    "twice.safetensors": (holds(twice()), CorruptionError, "twice"),
    "script.pt": (script, UnsupportedError, "a TorchScript program"),
    "deflated.pt": (
        changed(bytes, compression=zipfile.ZIP_DEFLATED), UnsupportedError, "records are compressed"),
    "two-records.pt": (with_record, FormatError, "two records"),
    # torch itself returns uninitialized memory
    "long.pt": (changed(lambda raw: raw.replace(b"K\x09", b"K\x60")), FormatError, "'0' is truncated"),
    "beyond.pt": (changed(lambda raw: raw.replace(*BEYOND), VIEW), FormatError, "beyond its storage"),
    "beyond-old.pt": (holds(pickled("old", VIEW).replace(*BEYOND)), FormatError, "beyond its storage"),
    "no-storage.pt": (
        holds(OLD[: OLD.rindex(b"\x80\x02]")] + b"\x80\x02]."), FormatError, "are not those of its tensors"),
    # code
    "set.pt": (holds(torch_bytes({"seen": {1, 2}})), UnsupportedError, r"code to load \(__builtin__\.set\)"),
    **{
        f"calls-{name}.pt": (changed(lambda _, value=value: b"\x80\x02]" + value + b"a."), NO_CODE, "")
        for name, value in CALLS.items()
    },
    **{
        f"{form}-{class_name}.pt": (
            holds(pickled(form, {"weight": [1.5], "args": value})), UnsupportedError,
            rf"\({class_name}\).*save a plain state_dict")
        for form in ("zip", "old", "protocol 4", "pickle") for class_name, value in CLASSES.items()
    },
    **{
        f"hides-{attribute}-{form}-{n}.pt": (
            holds(pickled(form, state)), CorruptionError, f"OrderedDict whose attribute '{attribute}' hides")
        for attribute in HIDDEN for form in ("zip", "old")
        for n, state in enumerate((HidesMethods(attribute), {"model": HidesMethods(attribute)}))
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FILES, ids=ascii)
def test_a_file_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    make, error, words = FILES[name]
    file = "".join(c if c.isalnum() or c in ".-" else "_" for c in name)
    check(tmp_path / file, make, error, f"{file}.*{words}")


# --- folders of shards ----------------------------------------------------------------------------


def placed(**places: Any) -> Callable[[Path], object]:
    """Return a function that changes the files of tensors in the index."""

    def make(folder: Path) -> None:
        text = json.loads((folder / INDEX).read_text())
        text["weight_map"] |= places
        (folder / INDEX).write_text(json.dumps(text))

    return make


def indexed(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX).write_bytes(text.encode("latin-1"))


def saved(file: str, **tensors: Any) -> Callable[[Path], object]:
    return lambda folder: save_file(tensors, folder / file)


def of_torch(state: Any) -> Callable[[Path], object]:
    """Return a function that writes two shards with torch, the second one with `state` instead of `norm`."""

    def make(folder: Path) -> Path:
        (at := folder / "torch").mkdir()
        names = [f"pytorch_model-{i:05}-of-00002.bin" for i in (1, 2)]
        torch.save({"wte": torch.ones(2)}, at / names[0])
        torch.save(state, at / names[1])
        index = {"weight_map": {"wte": names[0], "norm": names[1]}}
        (at / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        return at

    return make


def alone(*files: str) -> Callable[[Path], object]:
    """Return a function that writes a folder of files, each with a tensor w."""

    def make(folder: Path) -> Path:
        (at := folder / "alone").mkdir()
        for file in files:
            save_file({"w": np.zeros(1)}, at / file)
        return at

    return make


def of_dcp(folder: Path) -> Path:
    """Write a folder of torch.distributed.checkpoint in which 51 objects share their bytes."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"weight": torch.ones(4), "note": "x" * 100}, checkpoint_id=folder / "run", no_dist=True)
    metadata = dcp.FileSystemReader(folder / "run").read_metadata()
    stored = next(info for index, info in metadata.storage_data.items() if index.fqn == "note")
    for name in (f"note{i}" for i in range(50)):
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(name)] = stored
        metadata.planner_data[name] = (name,)
    (folder / "run" / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder / "run"


NO_INDEX = (
    "",
    "[]",
    "{}",
    '{"weight_map": []}',
    '{"weight_map": {}}',
    '{"weight_map": {"a": "x", "a": "y"}}',
    "\xff",
)
IN_TWO = f"{SECOND}: tensor 'b' is in {FIRST} too"
# A change of a folder of two shards, the class of the error, and its words.
FOLDERS: dict[str, Refusal] = {
    "missing shard": (lambda at: (at / SECOND).unlink(), FileNotFoundError, f"{INDEX}.*{SECOND}"),
    "lacks a tensor": (placed(d=FIRST), CorruptionError, f"{FIRST}: tensor 'd' is not in this shard"),
    "other": (placed(c=FIRST, d=SECOND), CorruptionError, f"{FIRST}: tensor 'c' is in {SECOND}, not here"),
    "number": (placed(c=1), CorruptionError, f"{INDEX}: tensor 'c': 1 is not a plain file name"),
    **{f"shard {name!r}": (placed(c=name), CorruptionError, f"{INDEX}: ") for name in HOSTILE_NAMES},
    **{f"index {text!r}": (indexed(text), CorruptionError, INDEX) for text in NO_INDEX},
    "two shards": (saved(SECOND, c=np.zeros(1), b=np.zeros(1)), CorruptionError, IN_TWO),
    "cut shard": (lambda at: os.truncate(at / SECOND, 100), TruncatedError, SECOND),
    "two indexes": (saved("model.fp16.safetensors.index.json"), ConfigError, "several checkpoints"),
    "no tensors": (
        lambda at: [path.unlink() for path in (at / FIRST, at / SECOND, at / INDEX)],
        ConfigError, r"no tensors in this folder.*\.safetensors.*name the files"),
    "steps": (alone("step-1.safetensors", "step-2.safetensors"), ConfigError, "several checkpoints .*name"),
    "same tensors": (alone(FIRST, SECOND), CorruptionError, f"'w' is in {FIRST} too"),
    "colon": (alone("a:b.safetensors"), ConfigError, "rename"),
    "line end": (alone("x\n.safetensors"), ConfigError, "rename"),
    "torch, twice": (of_torch({"norm": torch.ones(5), "wte": torch.ones(1)}), CorruptionError, "'wte' is in"),
    "torch, lacks": (of_torch({"other": torch.ones(5)}), CorruptionError, "'norm' is not in this shard"),
    "torch, list": (of_torch([torch.ones(5)]), FormatError, "not a dict"),
    "dcp": (of_dcp, CorruptionError, r"'note\d*' and 'note\d+' share bytes of __0_0.distcp"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS, ids=ascii)
def test_a_folder_is_refused_with_the_file_at_fault(name: str, tmp_path: Path) -> None:
    check(sharded_folder(tmp_path / "hub"), *FOLDERS[name])
