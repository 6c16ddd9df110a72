"""Zips in which readers could find different pickles, and folders whose parts share bytes, are refused."""

from __future__ import annotations

import io
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptz.errors import CorruptionError
from ckptz.foreign.inputs import open_input
from tests.support.cli_support import ckptz

STATE = {"weight": torch.arange(8.0)}


def saved(state: Any) -> bytes:
    sink = io.BytesIO()
    torch.save(state, sink)
    return sink.getvalue()


def prepended() -> bytes:
    """Python's zipfile reads the second archive; whoever trusts the recorded offset reads the first."""
    return saved({"weight": torch.arange(9.0)}) + saved(STATE)


def with_gap() -> bytes:
    raw = saved(STATE)
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        start = archive.start_dir
    return raw[:start] + b"\0" * 64 + raw[start:]


def with_bytes_behind() -> bytes:
    return saved(STATE) + b"\0" * 10


def with_comment() -> bytes:
    raw = bytearray(saved(STATE))
    raw[-2:] = struct.pack("<H", 4)
    return bytes(raw) + b"abcd"


def with_other_offset() -> bytes:
    raw = bytearray(saved(STATE))
    (offset,) = struct.unpack_from("<I", raw, len(raw) - 6)
    struct.pack_into("<I", raw, len(raw) - 6, offset - 64)
    return bytes(raw)


@pytest.mark.parametrize("make", [prepended, with_gap, with_bytes_behind, with_comment, with_other_offset])
def test_a_zip_whose_directory_is_elsewhere_is_refused(make: Any, tmp_path: Path) -> None:
    (tmp_path / "odd.pt").write_bytes(make())
    with pytest.raises(CorruptionError):
        open_input(tmp_path / "odd.pt").close()
    run = ckptz("compress", tmp_path / "odd.pt", fails=True)
    assert run.exit_code == 3
    assert not (tmp_path / "odd.ckptz").exists()


def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(saved(STATE))
    opened = open_input(tmp_path / "a.pt")
    assert list(opened.tensors) == ["weight"]
    opened.close()


def test_objects_of_a_folder_that_share_bytes_are_refused(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"weight": torch.ones(4), "note": "x" * 100}, checkpoint_id=tmp_path / "run", no_dist=True)
    path = tmp_path / "run" / ".metadata"
    metadata = dcp.FileSystemReader(tmp_path / "run").read_metadata()
    place = next(info for index, info in metadata.storage_data.items() if index.fqn == "note")
    for i in range(50):
        metadata.state_dict_metadata[f"note{i}"] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(f"note{i}")] = place
        metadata.planner_data[f"note{i}"] = (f"note{i}",)
    import pickle

    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptionError, match=r"'note\d*' and 'note\d+' share bytes of __0_0.distcp"):
        open_input(tmp_path / "run").close()
