"""Verbs that read files behind URLs and from streams: fsspec's memory and http file systems, and pipes."""

import functools
import http.server
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from click.testing import CliRunner
from huggingface_hub import HfFileSystem

from ckptz import inspect, log, restore
from ckptz.errors import ConfigError
from ckptz.numpy import load_file, save_file
from ckptz_cli.main import main
from tests.support.cli_support import a_state, ckptz, content_of, hf_folder, write_plain

STEPS = (8, 9, 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain of three steps with the plain files that it was made from."""
    made = tmp_path_factory.mktemp("run")
    files = [write_plain(made / f"step-{i}.safetensors", a_state(drift=0.001 * i, n=500)) for i in STEPS]
    ckptz("compress", *files, "--chain", "-o", made, "--jobs", 1)
    return made


@pytest.fixture
def url(folder: Path) -> str:
    """The same in fsspec's memory."""
    name = uuid.uuid4().hex
    for path in folder.iterdir():
        fsspec.filesystem("memory").put_file(str(path), f"/{name}/{path.name}")
    return f"memory://{name}"


@pytest.fixture
def served(folder: Path) -> Iterator[str]:
    """The same behind a server that gives whole files only."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_every_verb_that_reads_takes_urls(url: str, folder: Path, tmp_path: Path) -> None:
    lines: list[tuple[object, ...]] = [
        *(("log", url), ("inspect", url), ("inspect", f"{url}/step-9.ckptz"), ("verify", url)),
        ("verify", f"{url}/step-9.ckptz", "--against", f"{url}/step-9.safetensors"),
        ("diff", f"{url}/step-8.safetensors", f"{url}/step-10.ckptz"),
        ("diff", f"{url}@9", f"{url}/step-9.safetensors", "--exit-code"),
        ("report", url, "-o", tmp_path / "page.html"),
        ("restore", f"{url}/step-10.ckptz", "-o", tmp_path / "restored.safetensors"),
        ("restore", f"{url}@10", "-o", tmp_path / "step.safetensors"),
        ("rebase", f"{url}/step-10.ckptz", "-o", tmp_path / "rebased.ckptz"),
        ("compress", f"{url}/step-10.safetensors", "-o", tmp_path / "compressed.ckptz"),
    ]
    for line in lines:
        ckptz(*line)
    wanted = content_of(folder / "step-10.safetensors")
    for name in ("restored.safetensors", "step.safetensors", "rebased.ckptz", "compressed.ckptz"):
        assert content_of(tmp_path / name) == wanted, name
    assert {line[0] for line in lines} | {"prune", "warm-up"} == set(main.commands)


def test_reports_name_the_url(url: str) -> None:
    report = inspect(f"{url}/step-10.ckptz")
    assert (report.file, report.step) == (f"{url}/step-10.ckptz", 10)
    assert [member.path for member in report.chain] == [f"{url}/step-{i}.ckptz" for i in (9, 8)]
    assert [entry.file for entry in log(url).entries] == [f"step-{i}.ckptz" for i in STEPS]
    assert f"{url}/gone.ckptz: no such file" in ckptz("inspect", f"{url}/gone.ckptz", fails=True).error


def test_results_go_to_the_working_folder_or_where_they_are_told_to(
    url: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "spool"))
    (tmp_path / "spool").mkdir()
    ckptz("restore", f"{url}/step-10.ckptz")
    ckptz("compress", f"{url}/step-9.safetensors")
    assert sorted(os.listdir()) == ["spool", "step-10.safetensors", "step-9.ckptz"]
    wanted = content_of(folder / "step-10.safetensors")
    for line in (
        ("restore", f"{url}/step-10.ckptz", "-o", f"{url}/new.safetensors"),
        ("restore", f"{url}/step-10.ckptz", "-o", f"{url}/new/"),
        ("compress", f"{url}/step-10.safetensors", "-o", f"{url}/new.ckptz"),
        ("rebase", f"{url}/step-10.ckptz", "-o", f"{url}/alone.ckptz"),
        ("report", f"{url}/step-8.ckptz", "-o", f"{url}/page.html"),
    ):
        ckptz(*line)
        name = line[-1] + "step-10.safetensors" if line[-1].endswith("/") else line[-1]
        run = ckptz(*line, fails=line[0] != "report")
        assert line[0] == "report" or f"{name}: exists already" in run.error
    for name in ("new.safetensors", "new/step-10.safetensors", "new.ckptz", "alone.ckptz"):
        ckptz("diff", f"{url}/{name}", folder / "step-10.safetensors", "--exit-code")
    assert content_of(tmp_path / "step-10.safetensors") == wanted
    ckptz("rebase", f"{url}/step-10.ckptz")
    assert inspect(f"{url}/step-10.ckptz").depth == 0
    assert not os.listdir("spool")


def test_folders_go_to_urls(tmp_path: Path) -> None:
    shards, url = hf_folder(tmp_path / "hf"), f"memory://{uuid.uuid4().hex}"
    ckptz("compress", shards, "-o", f"{url}/packed/")
    assert "exists already" in ckptz("compress", shards, "-o", f"{url}/packed/", fails=True).error
    ckptz("restore", f"{url}/packed/model.ckptz", "-o", f"{url}/back")
    for file in (one for one in shards.rglob("*") if one.is_file()):
        name = file.relative_to(shards)
        if name.name != "vocab.txt":  # of another folder: not listed behind a URL
            assert fsspec.filesystem("memory").cat_file(f"{url}/back/{name}") == file.read_bytes(), name


def test_a_store_that_refuses_is_named_and_nothing_is_left(
    url: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "put_file", refuse)
    run = ckptz("compress", folder / "step-8.safetensors", "-o", f"{url}/new.ckptz", fails=True)
    assert (run.exit_code, f"{url}/new.ckptz: Permission denied" in run.error) == (7, True)
    assert not os.listdir(tmp_path)


def test_python_writes_to_urls(url: str) -> None:
    tensors = {"layer.weight": np.ones((10, 50), np.float32)}
    save_file(tensors, f"{url}/new.ckptz")
    assert np.array_equal(load_file(f"{url}/new.ckptz")["layer.weight"], tensors["layer.weight"])


def test_a_server_without_ranges_is_read_whole(served: str, folder: Path, tmp_path: Path) -> None:
    assert [entry.step for entry in log(served).entries] == list(STEPS)
    restore(f"{served}/step-10.ckptz", tmp_path / "back.safetensors")
    assert content_of(tmp_path / "back.safetensors") == content_of(folder / "step-10.safetensors")
    assert f"{served}/gone.ckptz" in ckptz("inspect", f"{served}/gone.ckptz", fails=True).error


def test_a_url_that_nothing_reads_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^nothing://run/x\.ckptz: Unsupported filesystem"):
        inspect("nothing://run/x.ckptz")


def test_a_connection_that_fails_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/x.ckptz"
        assert f"{url}: " in ckptz("inspect", url, fails=True).error


# --- streams --------------------------------------------------------------------------------------


def piped(data: bytes, *line: object) -> tuple[int, bytes, str]:
    """A command line with bytes on its standard input: exit code, standard output, standard error."""
    done = CliRunner().invoke(main, [str(word) for word in line], input=data)
    return done.exit_code, done.stdout_bytes, done.stderr


def test_a_file_goes_through(folder: Path, tmp_path: Path) -> None:
    plain = (folder / "step-9.safetensors").read_bytes()
    code, packed, said = piped(plain, "compress", "-", "-o", "-")
    assert code == 0
    assert "standard output: " in said
    assert piped(packed, "restore", "-", "-o", "-")[:2] == (0, plain)
    assert piped(packed, "restore", "-", "-o", "-", "-q") == (0, plain, "")
    code, shown, _ = piped(packed, "inspect", "-")
    assert code == 0
    assert shown.split()[:3] == [b"file", b"standard", b"input"]
    assert b"standard input: ok" in piped(packed, "verify", "-")[1]
    code, alone, _ = piped(b"", "rebase", folder / "step-10.ckptz", "-o", "-")
    (tmp_path / "alone.ckptz").write_bytes(alone)
    assert content_of(tmp_path / "alone.ckptz") == content_of(folder / "step-10.safetensors")


def test_streams_that_cannot_be(folder: Path) -> None:
    for line, what in (
        (("diff", "-", "-"), "standard input can be used only once"),
        (("inspect", "-"), "standard input"),
    ):
        code, out, said = piped(b"not a checkpoint", *line)
        assert code in (2, 3)
        assert what in said + out.decode()
        assert "/ckptz-" not in said + out.decode()


def test_nothing_is_left_of_streams(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    piped((folder / "step-9.safetensors").read_bytes(), "compress", "-", "-o", "-")
    piped(b"damaged", "verify", "-")
    assert list(tmp_path.iterdir()) == []


# --- the Hub --------------------------------------------------------------------------------------


def test_a_file_of_the_hub_is_one_behind_a_url(folder: Path, tmp_path: Path) -> None:
    """`hf://` is what huggingface_hub brings to fsspec; a folder stands in for the Hub here."""
    asked: list[str] = []

    class StandIn(HfFileSystem):
        cachable = False

        def info(self, path: str, **_: Any) -> dict[str, Any]:
            asked.append(path)
            local = folder / Path(path).name
            if path.count("/") < 2:
                return {"name": path, "size": 0, "type": "directory"}
            if not local.exists():
                raise FileNotFoundError(path)
            return {"name": path, "size": local.stat().st_size, "type": "file"}

        def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
            names = [f"{path}/{one.name}" for one in folder.iterdir()]
            return [self.info(name) for name in names] if detail else names

        def _open(self, path: str, *_: Any, **__: Any) -> Any:
            return (folder / Path(path).name).open("rb")

    fsspec.register_implementation("hf", StandIn, clobber=True)
    try:
        ckptz("restore", "hf://org/name/step-10.ckptz", "-o", tmp_path / "back.safetensors")
    finally:
        fsspec.register_implementation("hf", HfFileSystem, clobber=True)
    assert content_of(tmp_path / "back.safetensors") == content_of(folder / "step-10.safetensors")
    assert "org/name/step-10.ckptz" in asked


def test_a_delta_against_a_file_behind_a_url_may_replace_another(url: str, tmp_path: Path) -> None:
    tensors = {"layer.weight": np.ones((10, 50), np.float32)}
    for _ in range(2):
        save_file(tensors, tmp_path / "delta.ckptz", base=f"{url}/step-10.ckptz")
    found = load_file(tmp_path / "delta.ckptz", search_path=[url])
    assert np.array_equal(found["layer.weight"], tensors["layer.weight"])
