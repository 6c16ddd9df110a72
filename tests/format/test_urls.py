"""Verbs on URLs (fsspec's memory and HTTP file systems, the Hub) and on standard input and output."""

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
    """Write a chain of three steps, with the safetensors files from which it was compressed."""
    run = tmp_path_factory.mktemp("run")
    files = [write_plain(run / f"step-{i}.safetensors", a_state(drift=0.001 * i, n=500)) for i in STEPS]
    ckptz("compress", *files, "--chain", "-o", run, "--jobs", 1)
    return run


@pytest.fixture
def url(folder: Path) -> str:
    """Copy these files to fsspec's memory file system, and return the URL of their folder."""
    name = uuid.uuid4().hex
    for path in folder.iterdir():
        fsspec.filesystem("memory").put_file(str(path), f"/{name}/{path.name}")
    return f"memory://{name}"


@pytest.fixture
def served(folder: Path) -> Iterator[str]:
    """Serve these files over HTTP without range requests, and return the URL of their folder."""
    handler = functools.partial(_QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_every_verb_that_reads_accepts_urls(url: str, folder: Path, tmp_path: Path) -> None:
    commands: list[tuple[object, ...]] = [
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
    for command in commands:
        ckptz(*command)
    expected = content_of(folder / "step-10.safetensors")
    for name in ("restored.safetensors", "step.safetensors", "rebased.ckptz", "compressed.ckptz"):
        assert content_of(tmp_path / name) == expected, name
    assert {command[0] for command in commands} | {"prune", "warm-up"} == set(main.commands)


def test_reports_name_the_url(url: str) -> None:
    report = inspect(f"{url}/step-10.ckptz")
    assert (report.file, report.step) == (f"{url}/step-10.ckptz", 10)
    assert [member.path for member in report.chain] == [f"{url}/step-{i}.ckptz" for i in (9, 8)]
    assert [entry.file for entry in log(url).entries] == [f"step-{i}.ckptz" for i in STEPS]
    assert f"{url}/gone.ckptz: no such file" in ckptz("inspect", f"{url}/gone.ckptz", fails=True).error


def test_outputs_of_urls_go_to_the_working_folder_or_to_the_given_url(
    url: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "spool"))
    (tmp_path / "spool").mkdir()
    ckptz("restore", f"{url}/step-10.ckptz")
    ckptz("compress", f"{url}/step-9.safetensors")
    assert sorted(os.listdir()) == ["spool", "step-10.safetensors", "step-9.ckptz"]
    for command in (
        ("restore", f"{url}/step-10.ckptz", "-o", f"{url}/new.safetensors"),
        ("restore", f"{url}/step-10.ckptz", "-o", f"{url}/new/"),
        ("compress", f"{url}/step-10.safetensors", "-o", f"{url}/new.ckptz"),
        ("rebase", f"{url}/step-10.ckptz", "-o", f"{url}/alone.ckptz"),
        ("report", f"{url}/step-8.ckptz", "-o", f"{url}/page.html"),
    ):
        ckptz(*command)
        output = command[-1] + "step-10.safetensors" if command[-1].endswith("/") else command[-1]
        run = ckptz(*command, fails=command[0] != "report")
        assert command[0] == "report" or f"{output}: exists already" in run.error
    for name in ("new.safetensors", "new/step-10.safetensors", "new.ckptz", "alone.ckptz"):
        ckptz("diff", f"{url}/{name}", folder / "step-10.safetensors", "--exit-code")
    assert content_of(tmp_path / "step-10.safetensors") == content_of(folder / "step-10.safetensors")
    ckptz("rebase", f"{url}/step-10.ckptz")
    assert inspect(f"{url}/step-10.ckptz").depth == 0
    assert not os.listdir("spool")


def test_folders_are_written_to_urls(tmp_path: Path) -> None:
    shards, url = hf_folder(tmp_path / "hf"), f"memory://{uuid.uuid4().hex}"
    ckptz("compress", shards, "-o", f"{url}/packed/")
    assert "exists already" in ckptz("compress", shards, "-o", f"{url}/packed/", fails=True).error
    ckptz("restore", f"{url}/packed/model.ckptz", "-o", f"{url}/back")
    for file in filter(Path.is_file, shards.rglob("*")):
        name = file.relative_to(shards)
        if name.name != "vocab.txt":  # in a subfolder, which is not copied from a URL
            assert fsspec.filesystem("memory").cat_file(f"{url}/back/{name}") == file.read_bytes(), name


def test_a_failed_upload_names_the_url_and_leaves_no_temporary_file(
    url: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def put_file(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "put_file", put_file)
    run = ckptz("compress", folder / "step-8.safetensors", "-o", f"{url}/new.ckptz", fails=True)
    assert (run.exit_code, f"{url}/new.ckptz: Permission denied" in run.error) == (7, True)
    assert not os.listdir(tmp_path)


def test_save_file_writes_to_urls(url: str) -> None:
    tensors = {"layer.weight": np.ones((10, 50), np.float32)}
    save_file(tensors, f"{url}/new.ckptz")
    assert np.array_equal(load_file(f"{url}/new.ckptz")["layer.weight"], tensors["layer.weight"])


def test_files_of_a_server_without_ranges_are_read(served: str, folder: Path, tmp_path: Path) -> None:
    assert [entry.step for entry in log(served).entries] == list(STEPS)
    restore(f"{served}/step-10.ckptz", tmp_path / "back.safetensors")
    assert content_of(tmp_path / "back.safetensors") == content_of(folder / "step-10.safetensors")
    assert f"{served}/gone.ckptz" in ckptz("inspect", f"{served}/gone.ckptz", fails=True).error


def test_a_url_of_an_unsupported_protocol_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^nothing://run/x\.ckptz: Unsupported filesystem"):
        inspect("nothing://run/x.ckptz")


def test_a_connection_that_fails_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/x.ckptz"
        assert f"{url}: " in ckptz("inspect", url, fails=True).error


# --- standard input and output ------------------------------------------------------------------


def piped(data: bytes, *arguments: object) -> tuple[int, bytes, str]:
    """Run a command with `data` on standard input; return exit code, standard output and standard error."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], input=data)
    return result.exit_code, result.stdout_bytes, result.stderr


def test_verbs_read_standard_input_and_write_standard_output(folder: Path, tmp_path: Path) -> None:
    plain = (folder / "step-9.safetensors").read_bytes()
    code, packed, messages = piped(plain, "compress", "-", "-o", "-")
    assert code == 0
    assert "standard output: " in messages
    assert piped(packed, "restore", "-", "-o", "-")[:2] == (0, plain)
    assert piped(packed, "restore", "-", "-o", "-", "-q") == (0, plain, "")
    code, description, _ = piped(packed, "inspect", "-")
    assert code == 0
    assert description.split()[:3] == [b"file", b"standard", b"input"]
    assert b"standard input: ok" in piped(packed, "verify", "-")[1]
    code, full, _ = piped(b"", "rebase", folder / "step-10.ckptz", "-o", "-")
    (tmp_path / "full.ckptz").write_bytes(full)
    assert content_of(tmp_path / "full.ckptz") == content_of(folder / "step-10.safetensors")


def test_unusable_standard_input_is_named_in_errors() -> None:
    """The temporary file that holds its bytes is not."""
    for command, message in (
        (("diff", "-", "-"), "standard input can be used only once"),
        (("inspect", "-"), "standard input"),
    ):
        code, output, errors = piped(b"not a checkpoint", *command)
        assert code in (2, 3)
        assert message in errors + output.decode()
        assert "/ckptz-" not in errors + output.decode()


def test_standard_input_leaves_no_temporary_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    piped((folder / "step-9.safetensors").read_bytes(), "compress", "-", "-o", "-")
    piped(b"damaged", "verify", "-")
    assert list(tmp_path.iterdir()) == []


# --- the Hub --------------------------------------------------------------------------------------


def test_a_file_of_the_hub_is_restored_by_its_url(folder: Path, tmp_path: Path) -> None:
    """huggingface_hub registers `hf://` with fsspec; here it reads a local folder."""
    requested: list[str] = []

    class LocalHub(HfFileSystem):
        cachable = False

        def info(self, path: str, **_: Any) -> dict[str, Any]:
            requested.append(path)
            local = folder / Path(path).name
            if path.count("/") < 2:
                return {"name": path, "size": 0, "type": "directory"}
            if not local.exists():
                raise FileNotFoundError(path)
            return {"name": path, "size": local.stat().st_size, "type": "file"}

        def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
            names = [f"{path}/{file.name}" for file in folder.iterdir()]
            return [self.info(name) for name in names] if detail else names

        def _open(self, path: str, *_: Any, **__: Any) -> Any:
            return (folder / Path(path).name).open("rb")

    fsspec.register_implementation("hf", LocalHub, clobber=True)
    try:
        ckptz("restore", "hf://org/name/step-10.ckptz", "-o", tmp_path / "back.safetensors")
    finally:
        fsspec.register_implementation("hf", HfFileSystem, clobber=True)
    assert content_of(tmp_path / "back.safetensors") == content_of(folder / "step-10.safetensors")
    assert "org/name/step-10.ckptz" in requested


def test_a_delta_against_a_file_of_a_url_replaces_an_older_delta(url: str, tmp_path: Path) -> None:
    tensors = {"layer.weight": np.ones((10, 50), np.float32)}
    for _ in range(2):
        save_file(tensors, tmp_path / "delta.ckptz", base=f"{url}/step-10.ckptz")
    restored = load_file(tmp_path / "delta.ckptz", search_path=[url])
    assert np.array_equal(restored["layer.weight"], tensors["layer.weight"])
