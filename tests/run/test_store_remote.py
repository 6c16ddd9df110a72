"""Stores behind fsspec URLs: files are written locally, uploaded under their final name, and resumed."""

import io
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ckptz import KeepPolicy
from ckptz.errors import ChecksumError, ConfigError, WriteError
from ckptz.run.folder import StepStore
from ckptz.run.prune import prune_folder
from ckptz.run.step_files import StepFile
from ckptz.store import lock, storage
from tests.support.checkpointer_support import GRID, KEEP_TWO, Run, loss_after, names_in
from tests.support.cli_support import flipped

fsspec = pytest.importorskip("fsspec")

OBJECTS: dict[str, bytes] = {}


class Stream(io.RawIOBase):
    """Object handle that is read or written sequentially."""

    def __init__(self, path: str, mode: str) -> None:
        self._path, self._mode = path, mode
        self._data = io.BytesIO(OBJECTS[path] if "r" in mode else b"")
        self.size = len(self._data.getvalue())

    def readable(self) -> bool:
        return "r" in self._mode

    def writable(self) -> bool:
        return "w" in self._mode

    def read(self, n: int = -1) -> bytes:
        return self._data.read(n)

    def write(self, data: Any) -> int:
        return self._data.write(data)

    def seekable(self) -> bool:
        return False

    def seek(self, *_: Any) -> NoReturn:
        raise io.UnsupportedOperation("seek")

    def close(self) -> None:
        if not self.closed and self.writable():
            OBJECTS[self._path] = self._data.getvalue()
        super().close()


class Streams(fsspec.AbstractFileSystem):
    """File system that can neither seek nor rename."""

    protocol = "streams"
    cachable = False

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        entries = [
            {"name": name, "size": len(data), "type": "file"}
            for name, data in OBJECTS.items()
            if name.rpartition("/")[0] == path
        ]
        if not entries:
            raise FileNotFoundError(path)
        return entries if detail else [entry["name"] for entry in entries]

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Stream:
        if "r" in mode and path not in OBJECTS:
            raise FileNotFoundError(path)
        return Stream(path, mode)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        del path, exist_ok

    def rm_file(self, path: str) -> None:
        if path not in OBJECTS:
            raise FileNotFoundError(path)
        del OBJECTS[path]

    def mv(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("rename")

    def cp_file(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("copy")


fsspec.register_implementation("streams", Streams, clobber=True)


@pytest.fixture(params=["memory", "local", "streams"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of a new folder of each kind, with short waits."""
    monkeypatch.setattr(lock, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    name = f"run-{uuid.uuid4().hex}"
    yield f"local://{tmp_path}/{name}" if request.param == "local" else f"{request.param}://{name}"
    left = [name for name in names_in(tmp_path / "tmp") if name.startswith("ckptz-")]
    assert not left, "a spool or a download is left behind"
    OBJECTS.clear()


def save_steps(url: str, first: int, last: int, **options: Any) -> list[float]:
    run, losses = Run(), []
    with run.checkpointer(url, background=False, keep=KEEP_TWO, full_every=4, **options) as checkpointer:
        assert checkpointer.restore_latest() == (first - 1 or None)
        for step in range(first, last + 1):
            losses.append(run.step())
            checkpointer.save(step)
    return losses


def changed(url: str, file: StepFile, change: Callable[[bytes], bytes]) -> None:
    fs, path = fsspec.core.url_to_fs(f"{url}/{file.name}")
    fs.pipe_file(path, change(fs.cat_file(path)))


def sizes(url: str) -> dict[StepFile, int]:
    return StepStore(url).listing().sizes


@pytest.mark.usefixtures("deltas_at_any_cost")
def test_runs_resume_from_there(url: str) -> None:
    expected = Run().losses(8)
    assert save_steps(url, 1, 3) == expected[:3]
    assert save_steps(url, 4, 7) == expected[3:7]  # as another machine does, without local files
    assert loss_after(url) == (7, expected[7])
    assert loss_after(url, 6) == (6, expected[6])
    assert {file.step for file in sizes(url)} == {5, 6, 7}, "full file, hidden or not, and what needs it"
    report = prune_folder(url, KeepPolicy(last=1))
    assert report.steps == (7,)
    assert loss_after(url) == (7, expected[7])


def test_deltas_need_no_download_of_what_was_just_uploaded(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []
    real = storage.UploadFolder.download

    def download(self: storage.UploadFolder, name: str, path: Path) -> None:
        fetched.append(name)
        real(self, name, path)

    monkeypatch.setattr(storage.UploadFolder, "download", download)
    save_steps(url, 1, 3)
    assert not fetched
    save_steps(url, 4, 4)
    assert sorted(set(fetched)) == sorted(fetched)


def test_an_upload_that_fails_leaves_the_steps_before(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = save_steps(url, 1, 2)
    run = Run(seed=2)
    real = storage.UploadFolder.upload

    def upload(self: storage.UploadFolder, path: Path, name: str) -> None:
        if name == "step-00000003.ckptz":
            raise OSError("the network is gone")
        real(self, path, name)

    with run.checkpointer(url, background=False, keep=KEEP_TWO) as checkpointer:
        checkpointer.restore_latest()
        losses.append(run.step())
        with monkeypatch.context() as patched:
            patched.setattr(storage.UploadFolder, "upload", upload)
            with pytest.raises(WriteError, match="the network is gone"):
                checkpointer.save(3)
        assert checkpointer.steps() == (1, 2)
        checkpointer.save(3)
        assert checkpointer.steps() == (2, 3)
    assert loss_after(url, 2) == (2, losses[2])


def test_an_upload_that_was_cut_off_is_no_step(url: str) -> None:
    expected = Run().losses(4)
    save_steps(url, 1, 3)
    for kind in ("weights", "state"):
        changed(url, StepFile(3, kind), lambda data: data[:-30])
    assert loss_after(url) == (2, expected[2])
    assert save_steps(url, 3, 3) == expected[2:3]
    assert loss_after(url) == (3, expected[3])


def test_a_second_writer_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "acquire", None)  # by name below, with short waits
    store = StepStore(url)
    first = lock.Lease(store._place, beat=0.05, stale=60)
    with pytest.raises(ConfigError, match=r"process .* is writing here already"):
        lock.Lease(store._place, beat=0.05, stale=60)
    first.release()
    assert lock.LEASE_NAME not in store._place.sizes()


def test_a_damaged_object_is_named(url: str) -> None:
    save_steps(url, 1, 1)
    changed(url, StepFile(1, "state"), lambda data: next(flipped(data, [4 * len(data)])))
    with Run().checkpointer(url) as ck, pytest.raises(ChecksumError, match=r"step-00000001\.state"):
        ck.restore(1)


# --- exact newest steps --------------------------------------------------------------------------------


def test_an_exact_head_is_uploaded_before_its_weights_and_comes_back(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, uploaded = Run().losses(5), []
    real = storage.UploadFolder.upload

    def upload(self: storage.UploadFolder, path: Path, name: str) -> None:
        uploaded.append(name)
        real(self, path, name)

    monkeypatch.setattr(storage.UploadFolder, "upload", upload)
    assert save_steps(url, 1, 2, config=GRID) == expected[:2]
    names = [re.sub("-[0-9a-f]{16}", "", name) for name in uploaded]
    assert [name for name in names if "0002" in name and not name.startswith(".")] == [
        f"step-00000002{kind}.ckptz" for kind in (".state", ".state.exact", ".exact", "")
    ]
    assert save_steps(url, 3, 4, config=GRID) == expected[2:4]  # another machine continues from exact values
    assert {file.step for file in sizes(url) if file.is_residual} == {4}
    assert loss_after(url) == (4, expected[4])


def test_truncated_residuals_cause_a_warning(url: str) -> None:
    save_steps(url, 1, 1, config=GRID)
    for kind in ("weights", "state"):
        [file] = (file for file in sizes(url) if file.is_residual and file.kind == kind)
        changed(url, file, lambda data: data[:-30])
    with pytest.warns(RuntimeWarning, match="restored with what it loses"):
        assert loss_after(url)[0] == 1


# --- stores that fail ---------------------------------------------------------------------------

of_one_kind = pytest.mark.parametrize("url", ["memory"], indirect=True)  # other objects are read as before


class Refused(Exception):
    """Error of a store's own library."""


def fail_reads(patch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    """Replace the reads of one object by an error."""
    for method in ("read_range", "open"):
        real = getattr(storage.UploadFolder, method)

        def read(self: Any, requested: str, *args: Any, real: Any = real) -> Any:
            if requested == name:
                raise error
            return real(self, requested, *args)

        patch.setattr(storage.UploadFolder, method, read)


@of_one_kind
@pytest.mark.parametrize("error", [TimeoutError("no answer"), Refused("503"), PermissionError(13, "denied")])
@pytest.mark.parametrize("kind", ["weights", "state"])
def test_an_object_that_cannot_be_read_keeps_every_older_step(
    url: str, kind: Any, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Run().losses(4)
    save_steps(url, 1, 3)
    before = sizes(url)
    with monkeypatch.context() as patched:
        fail_reads(patched, StepFile(3, kind).name, error)
        report = prune_folder(url, KeepPolicy(last=1))
    assert StepFile(3, kind).name in report.notes[0]
    assert sizes(url) == before
    assert loss_after(url, 2) == (2, expected[2])
    assert prune_folder(url, KeepPolicy(last=1)).steps == (3,)
    assert loss_after(url) == (3, expected[3])


@of_one_kind
@pytest.mark.parametrize("n_lost", [1, 500, 10**6])
def test_a_connection_that_is_cut_does_not_make_a_step_a_leftover(
    url: str, n_lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Run().losses(4)
    save_steps(url, 1, 3)
    before = sizes(url)
    real = storage.UploadFolder.read_range

    def read_range(self: storage.UploadFolder, name: str, begin: int, end: int) -> bytes:
        part = real(self, name, begin, end)
        return part[: max(0, len(part) - n_lost)]

    def get_file(self: Any, path: str, local: str, **_: Any) -> None:
        data = self.cat_file(path)
        Path(local).write_bytes(data[:-n_lost] if "step-" in path else data)

    with monkeypatch.context() as patched:
        patched.setattr(storage.UploadFolder, "read_range", read_range)
        patched.setattr(type(fsspec.core.url_to_fs(url)[0]), "get_file", get_file)
        store = StepStore(url)
        store.lock()
        store.close()
        assert prune_folder(url, KeepPolicy(last=1)).notes
    assert sizes(url) == before
    assert loss_after(url) == (3, expected[3])


def test_a_listing_without_sizes_does_not_make_a_step_a_leftover(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Run().losses(4)
    save_steps(url, 1, 3)
    system = type(fsspec.core.url_to_fs(url)[0])
    real_ls, real_size = system.ls, system.size

    def ls(self: Any, path: str, detail: bool = True, **kwargs: Any) -> Any:
        return [{**entry, "size": None} for entry in real_ls(self, path, detail=True, **kwargs)]

    def size(self: Any, path: str) -> Any:
        with monkeypatch.context() as undone:
            undone.setattr(system, "ls", real_ls)
            return real_size(self, path)

    with monkeypatch.context() as patched:
        patched.setattr(system, "ls", ls)
        patched.setattr(system, "size", size)
        before = sizes(url)
        assert prune_folder(url, KeepPolicy(last=2)).steps == (2, 3)
        patched.setattr(system, "size", lambda *_: None)
        with pytest.raises(OSError, match=r"sends no length|does not say how long it is"):
            prune_folder(url, KeepPolicy(last=1))
    assert sizes(url) == before
    assert loss_after(url) == (3, expected[3])


@pytest.mark.parametrize("method", ["ls", "rm_file"])
def test_a_store_that_refuses_loses_no_step(url: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Run().losses(4)
    save_steps(url, 1, 3)
    system = type(fsspec.core.url_to_fs(url)[0])

    def refuse(self: Any, path: str, **_: Any) -> NoReturn:
        raise TimeoutError(path)

    with monkeypatch.context() as patched:
        patched.setattr(system, method, refuse)
        with pytest.raises(TimeoutError):
            prune_folder(url, KeepPolicy(last=1))
    assert loss_after(url, 2) == (2, expected[2])
    assert loss_after(url) == (3, expected[3])
