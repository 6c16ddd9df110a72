"""A delta of a plain safetensors file knows the metadata that its base had."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file as save_plain

from ckptz.errors import MissingBaseError
from ckptz.format.byte_source import FileBytes
from ckptz.format.envelope import read_envelope
from ckptz.format.index import BASE_METADATA, OPTIONAL_PREFIX
from ckptz.numpy import load_file, save_file
from tests.support.cli_support import ckptz
from tests.support.fault_support import all_closed

BEFORE = {"weight": np.arange(600, dtype=np.float32)}
AFTER = {"weight": BEFORE["weight"] + (np.arange(600) % 50 == 0).astype(np.float32)}


def sections(path: Path) -> list[str]:
    """Names of the optional sections of a file."""
    source = FileBytes(path)
    names = [region.name for region in read_envelope(source).regions]
    source.close()
    return [name for name in names if name.startswith(OPTIONAL_PREFIX)]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "step-1.safetensors"
    save_plain(BEFORE, path, {"format": "pt", "run": "a"})
    return path


def by_api(base: Path, target: Path) -> None:
    save_file(AFTER, target, base=base)


def by_command(base: Path, target: Path) -> None:
    save_plain(AFTER, target.with_suffix(".safetensors"), {"format": "pt"})
    ckptz("compress", target.with_suffix(".safetensors"), "--base", base)


@pytest.mark.parametrize("make", [by_api, by_command])
def test_damage_of_the_metadata_of_a_plain_base_is_seen(base: Path, make: Any) -> None:
    delta = base.with_name("step-2.ckptz")
    make(base, delta)
    assert sections(delta) == [BASE_METADATA]
    np.testing.assert_array_equal(load_file(delta)["weight"], AFTER["weight"])
    right = base.read_bytes()
    base.write_bytes(right.replace(b'"run":"a"', b'"run":"b"'))
    with pytest.raises(MissingBaseError, match=r"step-1\.safetensors: its __metadata__ was changed"):
        load_file(delta)
    base.with_name("copy.safetensors").write_bytes(right)
    np.testing.assert_array_equal(load_file(delta)["weight"], AFTER["weight"])


def test_a_file_that_cannot_be_read_keeps_no_delta_from_its_base(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base was renamed, so the other plain files of the folder are read, too."""
    delta, unreadable, read = base.with_name("step-2.ckptz"), base.with_name("a.safetensors"), FileBytes.read
    save_file(AFTER, delta, base=base)
    save_plain(AFTER, unreadable)
    base.rename(base.with_name("z.safetensors"))

    def failing(self: FileBytes, offset: int, n_bytes: int) -> Any:
        if self.path == unreadable and n_bytes == BEFORE["weight"].nbytes:
            raise OSError(errno.EIO, "input/output error", self.name)
        return read(self, offset, n_bytes)

    monkeypatch.setattr(FileBytes, "read", failing)
    with all_closed():
        np.testing.assert_array_equal(load_file(delta)["weight"], AFTER["weight"])
    base.with_name("z.safetensors").unlink()
    with (
        all_closed(),
        pytest.raises(MissingBaseError, match=r"is not here \(.*input/output error.*a\.safetensors"),
    ):
        load_file(delta)


def test_other_files_have_no_such_section(base: Path) -> None:
    full, delta, same = (base.with_name(f"{name}.ckptz") for name in ("full", "delta", "same"))
    save_file(BEFORE, full)
    save_file(AFTER, delta, base=full)
    save_file({"other": np.ones(3, np.int8)}, same, base=base)
    assert [sections(path) for path in (full, delta, same)] == [[], [], []]


def test_a_base_that_was_compressed_since_guards_its_own_metadata(base: Path) -> None:
    delta = base.with_name("step-2.ckptz")
    save_file(AFTER, delta, base=base)
    save_file(BEFORE, base.with_name("step-1.ckptz"), {"run": "b"})
    base.unlink()
    np.testing.assert_array_equal(load_file(delta)["weight"], AFTER["weight"])
