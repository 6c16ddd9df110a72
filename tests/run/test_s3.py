"""A local S3 server: command lines, a Checkpointer and failing connections."""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptz.errors import ConfigError
from ckptz.format import uploads
from ckptz.format.byte_source import path_of
from ckptz.format.uploads import upload
from ckptz.run.folder import StepStore
from tests.support.checkpointer_support import Run, loss_after
from tests.support.cli_support import a_state, ckptz, content_of, hf_folder, write_plain

pytestmark = pytest.mark.apps
moto = pytest.importorskip("moto.server")
s3fs = pytest.importorskip("s3fs")
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Start a server with the bucket `runs` and yield its address."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in KEYS.items():
            patch.setenv(name, value)
        running = moto.ThreadedMotoServer(port=0, verbose=False)
        running.start()
        host, port = running.get_host_and_port()
        address = f"http://{host}:{port}"
        s3fs.S3FileSystem(endpoint_url=address).mkdir("runs")
        yield address
        running.stop()


@pytest.fixture
def store(server: str) -> Iterator[Any]:
    """Yield the server's file system and make it that of s3:// URLs."""
    from fsspec.config import conf

    conf["s3"] = {"endpoint_url": server}
    s3fs.S3FileSystem.clear_instance_cache()  # instances keep functions that an earlier test replaced
    yield s3fs.S3FileSystem()
    del conf["s3"]


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> str:
    """Return the URL of a new folder in the bucket."""
    return f"s3://runs/{request.node.name}"


def test_a_chain_is_written_to_a_bucket_and_restored(
    server: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--storage-options", f"endpoint_url={server}")
    plain = [write_plain(tmp_path / f"step-{i}.safetensors", a_state(drift=0.001 * i)) for i in range(3)]
    ckptz("compress", *plain, "--chain", "-o", f"{folder}/", *options)
    assert [entry["step"] for entry in ckptz("log", folder, *options, "--json").json["entries"]] == [0, 1, 2]
    assert ": ok" in ckptz("verify", folder, *options).stdout
    ckptz("restore", f"{folder}@2", "-o", "back.safetensors", *options)
    assert content_of(tmp_path / "back.safetensors") == content_of(plain[2])
    ckptz("restore", f"{folder}/step-1.ckptz", "-o", f"{folder}/back.safetensors", *options)
    diff = ("diff", f"{folder}/back.safetensors", plain[1], "--exit-code")
    assert "equal bit for bit" in ckptz(*diff, *options).stdout
    run = ckptz("compress", plain[0], "-o", f"{folder}/step-1.ckptz", *options, fails=True)
    assert "exists already" in run.error
    ckptz("compress", plain[0], "-o", f"{folder}/step-1.ckptz", "-f", *options)
    ckptz("rebase", f"{folder}/step-1.ckptz", "-o", f"{folder}/alone.ckptz", *options)
    assert sorted(os.listdir()) == ["back.safetensors", *(file.name for file in plain)]


@pytest.mark.usefixtures("store")
def test_a_lossy_chain_and_a_folder_are_written_to_a_bucket(folder: str, tmp_path: Path) -> None:
    steps = [write_plain(tmp_path / f"s-{i}.safetensors", a_state(drift=0.1 * i, n=9000)) for i in range(3)]
    for output in (f"{folder}/", tmp_path / "run"):
        ckptz("compress", *steps, "--chain", "--method", "kmeans", "-o", output)
    for i in range(3):
        ckptz("restore", f"{folder}/s-{i}.ckptz", "-o", tmp_path / "there.safetensors", "-f")
        ckptz("restore", tmp_path / f"run/s-{i}.ckptz", "-o", tmp_path / "here.safetensors", "-f")
        assert content_of(tmp_path / "there.safetensors") == content_of(tmp_path / "here.safetensors")
    shards = hf_folder(tmp_path / "hf")
    ckptz("compress", shards, "-o", f"{folder}/packed/")
    ckptz("restore", f"{folder}/packed/model.ckptz", "-o", f"{folder}/back")
    ckptz("restore", f"{folder}/packed/model.ckptz", "-o", tmp_path / "back")
    for file in (one for one in shards.rglob("*") if one.is_file()):
        name = file.relative_to(shards)
        assert s3fs.S3FileSystem().cat_file(f"{folder}/back/{name}") == file.read_bytes()


@pytest.mark.usefixtures("store")
def test_a_killed_chain_resumes_in_a_bucket(folder: str, tmp_path: Path) -> None:
    plain = [write_plain(tmp_path / f"step-{i}.safetensors", a_state(drift=0.001 * i)) for i in range(3)]
    ckptz("compress", *plain[:2], "--chain", "-o", f"{folder}/")
    run = ckptz("compress", *plain, "--chain", "--resume", "-o", f"{folder}/")
    assert "2 of 3 outputs existed" in run.stderr
    ckptz("verify", f"{folder}/step-2.ckptz", "--against", plain[2])


@pytest.mark.usefixtures("store")
def test_a_training_run_resumes_from_a_bucket(folder: str) -> None:
    expected, losses = Run().losses(3), []
    run = Run()
    with run.checkpointer(folder, background=False) as checkpointer:
        for step in (1, 2):
            losses.append(run.step())
            checkpointer.save(step)
    assert losses == expected[:2]
    assert loss_after(folder) == (2, expected[2])
    assert {file.step for file in StepStore(folder).listing().sizes} == {1, 2}


class Lost(OSError):
    """Connection error that is raised instead of returning the response."""


@pytest.mark.usefixtures("store")
def test_a_training_run_whose_responses_are_lost_resumes_from_a_bucket(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, real = list[str](), s3fs.S3FileSystem._put_file

    async def put_file(self: Any, local: str, path: str, *arguments: Any, **options: Any) -> None:
        await real(self, local, path, *arguments, **options)
        sent.append(path)
        raise Lost("connection reset by peer")

    monkeypatch.setattr(s3fs.S3FileSystem, "_put_file", put_file)
    s3fs.S3FileSystem.clear_instance_cache()  # which reference the original function
    expected, run = Run().losses(3), Run()
    with run.checkpointer(folder) as checkpointer:
        for step in (1, 2):
            run.step()
            checkpointer.save(step)
    names = {Path(path).name for path in s3fs.S3FileSystem().find(folder)}
    files = sorted(name for name in names if name.startswith("step-"))
    assert sorted(Path(path).name for path in sent if "/step-" in path) == files  # nothing was sent twice
    assert len(files) == 4
    assert loss_after(folder) == (2, expected[2])


@pytest.mark.parametrize("n_lost", [1, 5])
def test_a_lost_response_after_an_upload_is_no_error(
    n_lost: int, store: Any, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, sent = write_plain(tmp_path / "a.safetensors", a_state()), []
    real = store.put_file

    def put_file(local: str, path: str) -> None:
        real(local, path)
        sent.append(path)
        if len(sent) <= n_lost:
            raise Lost("connection reset by peer")

    monkeypatch.setattr(store, "put_file", put_file)
    ckptz("compress", plain, "-o", f"{folder}/a.ckptz")
    assert len(sent) == 1
    assert [Path(name).name for name in store.ls(folder)] == ["a.ckptz"]
    ckptz("verify", f"{folder}/a.ckptz", "--against", plain)


def test_an_upload_is_tried_again_and_never_taken_for_an_older_file(
    store: Any, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (write_plain(tmp_path / f"{i}", {"w": ("U8", (4,), bytes([i] * 4))}) for i in (1, 2))
    path = f"{folder.removeprefix('s3://')}/a"
    upload(old, store, path, "a")
    attempts, real = [], store.put_file

    def put_file(local: str, path: str) -> None:
        attempts.append(path)
        if len(attempts) < uploads.ATTEMPTS:
            raise Lost("connection reset by peer")
        real(local, path)

    monkeypatch.setattr(store, "put_file", put_file)
    upload(new, store, path, "a")
    assert (len(attempts), store.cat_file(path)) == (uploads.ATTEMPTS, new.read_bytes())
    attempts.clear()
    monkeypatch.setattr(uploads, "ATTEMPTS", 2)
    monkeypatch.setattr(store, "put_file", lambda *_: (_ for _ in ()).throw(Lost("reset")))
    with pytest.raises(OSError, match=r"cannot be written: reset"):
        upload(old, store, path, "a")
    assert store.cat_file(path) == new.read_bytes()


@pytest.mark.usefixtures("store")
def test_a_missing_bucket_is_not_created(tmp_path: Path) -> None:
    plain = write_plain(tmp_path / "a.safetensors", a_state(n=100))
    run = ckptz("compress", plain, "-o", "s3://misspelt/a.ckptz", fails=True)
    assert run.exit_code in (5, 7)
    assert "s3://misspelt/a.ckptz" in run.error
    assert not s3fs.S3FileSystem().exists("misspelt")


@pytest.mark.parametrize("verb", ["inspect", "compress"])
def test_a_refused_connection_is_not_a_missing_file(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        plain = write_plain(tmp_path / "a.safetensors", a_state(n=100))
        words = ("s3://runs/a.ckptz",) if verb == "inspect" else (plain, "-o", "s3://runs/a.ckptz")
        endpoint = f"endpoint_url=http://127.0.0.1:{free.getsockname()[1]}"
        run = ckptz(verb, *words, "--storage-options", endpoint, fails=True)
    assert (run.exit_code, "no such file" in run.error) == (7, False)
    assert "s3://runs/a.ckptz: cannot be read: Could not connect" in run.error


def test_options_without_a_url_are_refused(tmp_path: Path) -> None:
    plain = write_plain(tmp_path / "a.safetensors", a_state(n=100))
    run = ckptz("compress", plain, "--storage-options", "anon=true", fails=True)
    assert "no file is a URL" in run.error


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=r"s3://runs/a: .*pip install s3fs$"):
        path_of("s3://runs/a")
    with pytest.raises(ConfigError, match=r"s3://runs: .*pip install s3fs$"):
        StepStore("s3://runs")
