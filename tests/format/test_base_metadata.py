"""A delta against a plain safetensors file records the base's metadata, whose change makes the base unusable.

The content id of a base covers its tensors only, so the optional section `BASE_METADATA` has the metadata.
"""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file as save_plain

from ckptz.errors import MissingBaseError
from ckptz.format.byte_source import FileBytes, MemoryBytes
from ckptz.format.envelope import read_envelope
from ckptz.format.index import BASE_METADATA, OPTIONAL_PREFIX
from ckptz.numpy import load_file, save_file
from tests.support.cli_support import ckptz
from tests.support.fault_support import all_closed

BEFORE = {"weight": np.arange(600, dtype=np.float32)}
AFTER = {"weight": BEFORE["weight"] + (np.arange(600) % 50 == 0).astype(np.float32)}


def sections(path: Path) -> list[str]:
    """Return the names of the optional sections of a `.ckptz` file."""
    names = [region.name for region in read_envelope(MemoryBytes(path.read_bytes())).regions]
    return [name for name in names if name.startswith(OPTIONAL_PREFIX)]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Write the plain base with two metadata entries."""
    path = tmp_path / "step-1.safetensors"
    save_plain(BEFORE, path, {"format": "pt", "run": "a"})
    return path


def save_by_api(base: Path, target: Path) -> None:
    save_file(AFTER, target, base=base)


def save_by_command_line(base: Path, target: Path) -> None:
    save_plain(AFTER, target.with_suffix(".safetensors"), {"format": "pt"})
    ckptz("compress", target.with_suffix(".safetensors"), "--base", base)


@pytest.mark.parametrize("save_delta", [save_by_api, save_by_command_line])
def test_a_plain_base_with_changed_metadata_is_refused(base: Path, save_delta: Any) -> None:
    delta = base.with_name("step-2.ckptz")
    save_delta(base, delta)
    assert sections(delta) == [BASE_METADATA]
    np.testing.assert_array_equal(load_file(delta)["weight"], AFTER["weight"])
    intact = base.read_bytes()
    base.write_bytes(intact.replace(b'"run":"a"', b'"run":"b"'))
    with pytest.raises(MissingBaseError, match=r"step-1\.safetensors: its __metadata__ was changed"):
        load_file(delta)
    base.with_name("copy.safetensors").write_bytes(intact)
    np.testing.assert_array_equal(load_file(delta)["weight"], AFTER["weight"])


def test_an_unreadable_file_does_not_stop_the_search_for_a_base(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renamed base is searched among the plain files of its folder; reads of one of them fail with EIO."""
    delta, unreadable = base.with_name("step-2.ckptz"), base.with_name("a.safetensors")
    real_read = FileBytes.read
    save_file(AFTER, delta, base=base)
    save_plain(AFTER, unreadable)
    base.rename(base.with_name("z.safetensors"))

    def read(self: FileBytes, offset: int, n_bytes: int) -> Any:
        if self.path == unreadable and n_bytes == BEFORE["weight"].nbytes:
            raise OSError(errno.EIO, "input/output error", self.name)
        return real_read(self, offset, n_bytes)

    monkeypatch.setattr(FileBytes, "read", read)
    with all_closed():
        np.testing.assert_array_equal(load_file(delta)["weight"], AFTER["weight"])
    base.with_name("z.safetensors").unlink()
    with (
        all_closed(),
        pytest.raises(MissingBaseError, match=r"is not here \(.*input/output error.*a\.safetensors"),
    ):
        load_file(delta)


def test_only_deltas_against_plain_files_have_the_section(base: Path) -> None:
    """`unrelated` names a plain base but shares no tensor with it, so it is a full file."""
    full, delta, unrelated = (base.with_name(f"{name}.ckptz") for name in ("full", "delta", "unrelated"))
    save_file(BEFORE, full)
    save_file(AFTER, delta, base=full)
    save_file({"other": np.ones(3, np.int8)}, unrelated, base=base)
    assert [sections(path) for path in (full, delta, unrelated)] == [[], [], []]


def test_a_plain_base_may_be_replaced_by_a_compressed_one_with_other_metadata(base: Path) -> None:
    """A `.ckptz` file has a checksum of its own metadata, so the section does not apply to it."""
    delta = base.with_name("step-2.ckptz")
    save_file(AFTER, delta, base=base)
    save_file(BEFORE, base.with_name("step-1.ckptz"), {"run": "b"})
    base.unlink()
    np.testing.assert_array_equal(load_file(delta)["weight"], AFTER["weight"])
