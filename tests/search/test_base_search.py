"""The search for the base of a delta: which files are candidates, and which of them are opened and read."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptz import compress
from ckptz.errors import ConfigError, CorruptionError, MissingBaseError
from ckptz.format.byte_source import FileBytes
from ckptz.format.index import content_id_of
from ckptz.store import resolve
from tests.support.cli_support import Chain, a_state, ckptz, content_of, forge, write_plain


@pytest.mark.parametrize(
    "name", ["x" * 256, "é" * 128, "a\0b", "a\nb", "a\x7f", "a/b", "a/", ".", "..", "../x", "/x", ""]
)
def test_an_invalid_name_of_a_base_is_corrupt(name: str, chain: Chain) -> None:
    bad = forge(chain.delta, chain.folder / "bad.ckptz", lambda i: {**i, "base": {**i["base"], "file": name}})
    with pytest.raises(CorruptionError, match=r"bad\.ckptz: base file name .* is not a plain file name"):
        content_of(bad)


@contextlib.contextmanager
def timeout() -> Iterator[None]:
    """Raise TimeoutError after 120 seconds, so that a read that waits for a pipe fails instead of hanging."""

    def raise_timeout(*_: object) -> None:
        raise TimeoutError("a read waits for the other end of a pipe")

    previous = signal.signal(signal.SIGALRM, raise_timeout)
    signal.alarm(120)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize("name", ["a.ckptz", "a.safetensors", "step-1.ckptz"])
def test_a_pipe_in_the_folder_is_no_candidate(name: str, chain: Chain) -> None:
    chain.first.unlink()
    chain.full.rename(chain.folder / "renamed.ckptz")
    os.mkfifo(chain.folder / name)
    with timeout():
        ckptz("verify", chain.delta)


def test_a_pipe_or_device_cannot_be_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="is not a regular file"):
            FileBytes(path)
    with pytest.raises(IsADirectoryError):
        FileBytes(tmp_path)


def test_only_a_plain_file_with_the_right_tensors_is_hashed(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    [report] = compress([chain.second], chain.folder / "d.ckptz", base=chain.first)
    chain.first.rename(chain.folder / "z.safetensors")
    for file in (chain.full, chain.delta, chain.second):
        file.unlink()
    rows = a_state()
    other_dtype = {**rows, "layer.weight": ("I32", *rows["layer.weight"][1:])}
    other_shape = {**rows, "layer.half": ("BF16", (2, 1500), rows["layer.half"][2])}
    fewer = {name: row for name, row in rows.items() if name != "layer.weight"}
    for name, state in (("a", other_dtype), ("b", other_shape), ("c", fewer)):
        write_plain(chain.folder / f"{name}.safetensors", state)
    hashed_states = []

    def recording_content_id(tensors: object) -> str:
        hashed_states.append(tensors)
        return content_id_of(tensors)

    monkeypatch.setattr(resolve, "content_id_of", recording_content_id)
    resolve.open_checkpoint(report.output).close()
    assert len(hashed_states) == 1


def test_a_base_is_found_although_the_shape_of_a_tensor_changed(chain: Chain) -> None:
    rows = a_state(drift=0.01)
    rows["zeros"] = ("I32", (10, 300), rows["zeros"][2])
    grown = write_plain(chain.folder / "grown.safetensors", rows)
    [report] = compress([grown], base=chain.first)
    chain.full.unlink()
    assert report.n_deltas
    assert content_of(Path(report.output)) == content_of(grown)


def test_a_base_whose_name_cannot_be_recorded_is_refused(chain: Chain) -> None:
    for name in (os.fsdecode(b"base-\xff.safetensors"), "base\n.safetensors"):
        base = chain.first.rename(chain.folder / name)
        run = ckptz("compress", chain.second, "--base", base, "-o", chain.folder / "x.ckptz", fails=True)
        assert run.exit_code == 2
        assert "cannot record this file name" in run.error
        base.rename(chain.first)
    odd = os.fsdecode(b"odd-\xff.ckptz")
    [report] = compress([chain.first], chain.folder / odd)
    with pytest.raises(ConfigError, match="cannot record"):
        compress([chain.second], chain.folder / "x.ckptz", base=Path(report.output))


def test_a_pipe_with_the_name_of_a_missing_base_is_ignored(chain: Chain) -> None:
    chain.full.unlink()
    chain.first.unlink()
    os.mkfifo(chain.full)
    with pytest.raises(MissingBaseError):
        content_of(chain.delta)
