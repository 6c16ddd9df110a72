"""Sample buffers in a file: their blocks are on the disk before they are used."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from ckptz.errors import WriteError
from ckptz.wire.state import SampleBuffers


@pytest.mark.parametrize("is_supported", [True, False])
def test_sample_buffers_have_their_blocks_when_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_supported: bool
) -> None:
    def unsupported(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    if not is_supported:
        monkeypatch.setattr(os, "posix_fallocate", unsupported)
    buffers = SampleBuffers(1 << 16, tmp_path / "rows", 10)
    status = (tmp_path / "rows").stat()
    assert status.st_size == 10 * 4 << 16
    assert status.st_blocks * 512 >= status.st_size
    ids, rows = np.array([9, 2]), np.arange(2 << 16, dtype=np.uint32)
    buffers.write(ids, rows)
    np.testing.assert_array_equal(buffers.read(ids), rows)


def test_a_full_disk_is_an_error_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WriteError, match="cannot allocate 160 bytes"):
        SampleBuffers(4, tmp_path / "rows", 10)
    assert not list(tmp_path.iterdir())
