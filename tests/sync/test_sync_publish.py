"""Publisher: files in the folder, restarts, refusals, and atomic writes."""

import contextlib
import doctest
import importlib
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file as load_plain

import ckptz.torch
from ckptz import restore, verify
from ckptz.errors import ConfigError
from ckptz.store.resolve import open_checkpoint
from ckptz.sync import Follower, Publisher
from tests.support.sync_support import a_state, cloned, moved, names_in, published, refused, same

# --- the folder -----------------------------------------------------------------------------------


def test_deltas_every_time_and_full_files_now_and_then(tmp_path: Path) -> None:
    published(tmp_path, 7, full_every=3, keep_full=None)
    assert names_in(tmp_path) == [
        *("step-000000.ckptz", "step-000001.from-000000.ckptz", "step-000002.from-000001.ckptz"),
        *("step-000003.ckptz", "step-000003.from-000002.ckptz", "step-000004.from-000003.ckptz"),
        *("step-000005.from-000004.ckptz", "step-000006.ckptz", "step-000006.from-000005.ckptz"),
    ]


def test_what_is_older_than_the_full_files_kept_is_removed(tmp_path: Path) -> None:
    states = published(tmp_path, 12, full_every=3, keep_full=2)
    assert names_in(tmp_path)[0] == "step-000006.ckptz"
    assert len(names_in(tmp_path)) == 7
    for path in tmp_path.iterdir():
        step = int(path.name[5:11])
        restore(path, tmp_path / "plain.safetensors")
        assert same(load_plain(tmp_path / "plain.safetensors"), states[step])
        (tmp_path / "plain.safetensors").unlink()
        verify(path)


def test_files_are_ordinary_checkpoints(tmp_path: Path) -> None:
    state = a_state()
    publisher = Publisher(tmp_path)
    publisher.publish(state, 4, metadata={"format": "pt"})
    report = publisher.publish(state, metadata={"format": "pt"})
    assert report.step == 5
    with ckptz.safe_open(tmp_path / report.files[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert same(file.get_tensors(), state)
    assert report.n_bytes == (tmp_path / report.files[0]).stat().st_size


def test_tensors_may_come_and_go_and_change_their_shape(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path)
    first = {"a": torch.ones(50), "b": torch.ones(3)}
    second = {"a": torch.ones(60), "c": torch.zeros(4)}
    publisher.publish(first)
    report = publisher.publish(second)
    assert report.files == ("step-000001.ckptz",)
    assert "names, dtypes or shapes changed" in report.note
    live = {"a": torch.zeros(60), "c": torch.ones(4)}
    Follower(tmp_path).apply_to(live)
    assert same(live, second)
    publisher.publish(second)
    Follower(tmp_path).apply_to(live)


def test_the_smallest_deltas_follow_as_well(tmp_path: Path) -> None:
    sizes = {}
    for smallest in (True, False):
        folder = tmp_path / str(smallest)
        master = torch.randn(1 << 17, generator=torch.Generator().manual_seed(0)) * 0.05
        state = {"w": master.bfloat16()}
        publisher, live = Publisher(folder, smallest=smallest), {"w": torch.zeros(1 << 17).bfloat16()}
        publisher.publish(state)
        state["w"] = (master + 1e-6).bfloat16()
        sizes[smallest] = publisher.publish(state).n_bytes
        Follower(folder).apply_to(live)
        assert same(live, state)
    assert sizes[True] < 0.9 * sizes[False]


# --- restarts of the publisher --------------------------------------------------------------------


def test_a_restarted_publisher_continues_with_deltas(tmp_path: Path) -> None:
    states = published(tmp_path, 4, full_every=5)
    later = Publisher(tmp_path, full_every=5)
    assert later.step is None
    state = moved(states[-1], 50)
    assert later.publish(state).files == ("step-000004.from-000003.ckptz",)
    state = moved(state, 51)
    assert later.publish(state).files == ("step-000005.ckptz", "step-000005.from-000004.ckptz")
    live = cloned(states[2])
    follower = Follower(tmp_path)
    assert follower.apply_to(live).previous is None  # step 2 is before the newest full file
    assert same(live, state)


def test_two_publishers_notice_each_other(tmp_path: Path) -> None:
    one, other, state = Publisher(tmp_path), Publisher(tmp_path), a_state()
    one.publish(state)
    other.publish(state)
    with refused(ConfigError, "has step 1, but the last of this publisher is 0; another"):
        one.publish(state)


def test_where_the_newest_file_is_damaged_a_full_file_follows(tmp_path: Path) -> None:
    states = published(tmp_path, 2, full_every=50)
    newest = tmp_path / "step-000001.from-000000.ckptz"
    with contextlib.closing(open_checkpoint(newest)) as opened:
        tensor: Any = opened.tensors["float32"]
        at = tensor._container._data_offset + tensor.entry.offset + tensor.entry.n_bytes - 9
    damaged = bytearray(newest.read_bytes())
    damaged[at] ^= 1  # which only decoding detects
    newest.write_bytes(damaged)
    assert_a_full_file_follows(tmp_path, 2, states[1])


def test_where_the_chain_is_broken_a_full_file_follows(tmp_path: Path) -> None:
    states = published(tmp_path, 4, full_every=50)
    (tmp_path / "step-000002.from-000001.ckptz").unlink()
    assert_a_full_file_follows(tmp_path, 4, states[3])


def assert_a_full_file_follows(folder: Path, step: int, state: Any) -> None:
    report = Publisher(folder, full_every=50).publish(state)
    assert report.files == (f"step-{step:06d}.ckptz",)
    assert f"step {step - 1} cannot be used as a base" in report.note
    live = cloned(a_state(9))
    Follower(folder).apply_to(live)
    assert same(live, state)


# --- atomic ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def disk_of(n_bytes: int) -> Iterator[None]:
    """Limit the size of files, so that writes fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_publishes_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    publisher, state = Publisher(tmp_path, full_every=2), a_state()
    publisher.publish(state)
    before = names_in(tmp_path)
    for step in (1, 2):  # a delta, then a full file with a delta of which only the delta would fit
        state = moved(state, step, 0.05)
        with disk_of(1500 if step == 1 else 20_000), pytest.raises(OSError, match="File too large"):
            publisher.publish(state, step)
        assert names_in(tmp_path) == before
        assert publisher.publish(state, step).step == step
        before = names_in(tmp_path)
    live = cloned(a_state(9))
    Follower(tmp_path).apply_to(live)
    assert same(live, state)


def test_a_name_is_seen_when_its_file_is_complete(tmp_path: Path) -> None:
    """A reader that polls continuously can open every file that it lists."""
    stop, problems, n_seen = threading.Event(), [], 0

    def watch() -> None:
        nonlocal n_seen
        follower, live = Follower(tmp_path), cloned(a_state(9))
        while not stop.is_set():
            try:
                if follower.poll() is not None:
                    follower.apply_to(live)
                    n_seen += 1
            except Exception as error:
                problems.append(error)

    watcher = threading.Thread(target=watch)
    watcher.start()
    published(tmp_path, 25, full_every=4)
    stop.set()
    watcher.join()
    assert not problems
    assert n_seen > 1


# --- elsewhere ------------------------------------------------------------------------------------


@pytest.fixture
def url() -> Iterator[str]:
    fsspec = pytest.importorskip("fsspec")
    yield "memory://ckptz-test/run"
    fsspec.filesystem("memory").store.clear()


def test_a_url_serves_as_well_as_a_folder(url: str) -> None:
    fsspec = importlib.import_module("fsspec")
    states = published(url, 8, full_every=3)
    names = sorted(path.rsplit("/", 1)[1] for path in fsspec.filesystem("memory").ls(url, detail=False))
    assert names[0] == "step-000003.ckptz"
    live, follower = cloned(a_state(9)), Follower(url)
    follower.apply_to(live, step=4)
    follower.apply_to(live)
    assert same(live, states[-1])
    second = Publisher(url, full_every=3)
    assert second.publish(states[0]).files == ("step-000008.from-000007.ckptz",)
    Follower(url).apply_to(live)
    assert same(live, states[0])
    with refused(ConfigError, "memory://ckptz-test/run: step 3 is not after the newest published step 8"):
        second.publish(states[0], 3)


def test_an_upload_that_fails_publishes_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = importlib.import_module("fsspec")
    publisher, state = Publisher(url, full_every=1), a_state()
    publisher.publish(state)
    memory = fsspec.filesystem("memory")
    before = memory.ls(url, detail=False)
    put, tried = type(memory).put_file, []

    def failing(self: Any, path: str, target: str, **options: Any) -> None:
        if target.endswith("step-000001.ckptz"):
            tried.append(target)
            raise OSError(28, "No space left on device")
        put(self, path, target, **options)

    with monkeypatch.context() as patched:
        patched.setattr(type(memory), "put_file", failing)
        with pytest.raises(OSError, match="No space left"):
            publisher.publish(state, 1)
    assert len(tried) == 1
    assert memory.ls(url, detail=False) == before
    publisher.publish(state, 1)


def test_a_file_url_is_a_folder(tmp_path: Path) -> None:
    states = published(f"file://{tmp_path}/run", 2)
    live = cloned(a_state(9))
    Follower(tmp_path / "run").apply_to(live)
    assert same(live, states[-1])


def test_a_url_without_fsspec_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[[str], Any] = importlib.import_module

    def missing(name: str) -> Any:
        if name.startswith("fsspec"):
            raise ModuleNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with refused(ConfigError, "needs a package that is not installed; install it"):
        Publisher("s3://bucket/run")


@pytest.mark.parametrize("module", ["ckptz.api.apply", "ckptz.sync.publisher", "ckptz.sync.follower"])
def test_the_examples_in_the_docstrings_are_true(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    results = doctest.testmod(importlib.import_module(module))
    assert results.attempted > 0
    assert results.failed == 0
