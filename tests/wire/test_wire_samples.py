"""Sample buffers in a file: their disk blocks are allocated before they are used."""

import errno
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ckptz.errors import WireError, WriteError
from ckptz.format.dtypes import dtype_of
from ckptz.wire import LinkPolicy, Uniform
from ckptz.wire.endpoint import Link
from ckptz.wire.header import Direction
from ckptz.wire.state import MessageKey, SampleBuffers


def full(*_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("is_supported", [True, False])
def test_the_blocks_of_sample_buffers_are_allocated_at_once(
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
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WriteError, match="cannot allocate 160 bytes"):
        SampleBuffers(4, tmp_path / "rows", 10)
    assert not list(tmp_path.iterdir())


FORWARD, F32, SHAPE, IDS = Direction.FORWARD, dtype_of("F32"), (4, 1024), np.arange(4)
POLICY = LinkPolicy(forward=Uniform(4), feedback="aqsgd")


def send(link: Link, step: int) -> bytes:
    values = np.random.default_rng(step).normal(size=4096).astype(np.float32).view(np.uint32)
    return bytes(link.send(FORWARD, values, F32, SHAPE, MessageKey(step, sample_ids=IDS)).message)


def test_after_a_restore_to_a_full_disk_messages_are_refused_until_a_restore_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Link(0, 1, POLICY)
    send(first, 0)
    state, expected = first.state_dict(), send(first, 1)

    link = Link(0, 1, POLICY, samples=(tmp_path / "rows", 4))
    send(link, 0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(
            WriteError, match=r"rows\.0-1\.0\.tx: cannot allocate 16384 bytes.*free disk space"
        ):
            link.load_state_dict(state)
    with pytest.raises(WireError, match="load_state_dict"):
        send(link, 1)
    link.load_state_dict(state)
    assert send(link, 1) == expected


def test_a_file_system_without_space_is_an_error_for_new_and_restored_buffers(tmp_path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs root that may mount")
    try:
        first = Link(0, 1, POLICY)
        send(first, 0)
        state, expected = first.state_dict(), send(first, 1)
        (tmp_path / "other").write_bytes(bytes(48 << 10))
        link = Link(0, 1, POLICY, samples=(tmp_path / "rows", 8))
        for allocate in (lambda: send(link, 0), lambda: link.load_state_dict(state)):
            with pytest.raises(WriteError, match="cannot allocate 32768 bytes"):
                allocate()
            assert [path.name for path in tmp_path.iterdir()] == ["other"]
        (tmp_path / "other").unlink()
        link.load_state_dict(state)
        assert send(link, 1) == expected
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)  # -l: the file is still mapped
