"""All code that deletes files of users, under system failures: no step that was reported as saved is lost.

The rule is that of `ckptz.run.keep`: nothing that an unreadable file might need is deleted. `DELETES` in
test_architecture.py lists every module that deletes files, what it deletes and on which condition. Tests of
step stores are in test_retention_faults.py and test_store_remote.py, those of kills in test_kills.py.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import ckptz
from ckptz import KeepPolicy
from ckptz.errors import CkptzError, WriteError
from ckptz.foreign.dcp_index import INDEX_FILE
from ckptz.format.byte_source import FileBytes
from ckptz.format.written import Written
from ckptz.integrations.dcp import CkptzStorageReader, CkptzStorageWriter
from ckptz.integrations.dcp_run import delete_old
from ckptz.integrations.linked import Chain, ChainOptions, job_of
from ckptz.run import linked_files, links
from ckptz.run.deletion import drop_unneeded
from ckptz.run.versions import versions_in
from ckptz.store.resolve import open_checkpoint
from ckptz.sync import Follower, Publisher
from ckptz.torch import load_state, save_file
from ckptz.verbs.restore import restore
from tests.support.fault_support import ERRORS, Error, copied, each_error, fail_everywhere, unreadable
from tests.support.sync_support import State, cloned, same

OPTIONS = ChainOptions(full_every=3, jobs=1)
EVERY = pytest.mark.parametrize("stride", [0, pytest.param(1, marks=pytest.mark.slow)])

# --- bases of Lightning, the Trainer and accelerate -------------------------------------------------


def a_state(i: int) -> dict[str, Any]:
    return {"weight": torch.arange(5000, dtype=torch.float32) + i / 8, "step": i}


def write(chain: Chain, folder: Path, i: int) -> None:
    chain.write(folder / f"{i}.ckpt", job_of(a_state(i)))


def check_chain(folder: Path, kept: set[int]) -> None:
    for i in kept:
        state = load_state(folder / f"{i}.ckpt", jobs=1)
        assert state["step"] == i
        assert state["weight"].equal(a_state(i)["weight"])


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write full files 0 and 3, deltas 1 and 2 of 0 and 4 of 3, with other files of frameworks."""
    folder, chain = tmp_path_factory.mktemp("linked") / "run", Chain(OPTIONS)
    for i in range(5):
        write(chain, folder, i)
    torch.save({"weight": torch.ones(3)}, folder / "from-before.ckpt")
    (folder / "config.json").write_text("{}")
    (folder / "hparams.yaml").write_text("a: 1")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    return folder


def n_bases(folder: Path) -> int:
    return len(list(folder.glob("base-*")))


def remove_three(folder: Path) -> None:
    chain = Chain(OPTIONS)
    for i in range(3):
        chain.remove(folder / f"{i}.ckpt")


def at_once(call: Callable[..., Any], path: Path) -> Callable[..., Any]:
    """Return a function that deletes a file, as another program may, and then makes the call."""

    def after(*args: Any, **kwargs: Any) -> Any:
        path.unlink(missing_ok=True)
        return call(*args, **kwargs)

    return after


@pytest.mark.parametrize("where", ["open_checkpoint", "link_chain", "read_envelope", "os.link", "samefile"])
def test_a_base_that_goes_while_it_is_looked_at_makes_a_full_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    chain = Chain(OPTIONS)
    write(chain, tmp_path, 0)
    base = tmp_path / "0.ckpt"
    if where == "samefile":  # the base's base is in that folder under a name without `base-`
        save_file(a_state(0) | {"step": torch.zeros(1)}, tmp_path / "zero.ckptz")
        base = tmp_path / "one.ckptz"
        save_file(a_state(1) | {"step": torch.ones(1)}, base, base=tmp_path / "zero.ckptz")
        chain.go_on_from(base)
        monkeypatch.setattr(Path, "samefile", at_once(Path.samefile, tmp_path / "zero.ckptz"))
    elif where == "os.link":
        monkeypatch.setattr(os, "link", at_once(os.link, base))
    else:
        module = links if where == "read_envelope" else linked_files
        monkeypatch.setattr(module, where, at_once(getattr(module, where), base))
    write(chain, tmp_path, 2)
    monkeypatch.undo()
    check_chain(tmp_path, {2})
    with contextlib.closing(open_checkpoint(tmp_path / "2.ckpt")) as written:
        assert written.depth == 0
    if where != "open_checkpoint":  # then the file simply does not exist
        assert "stored as a full file, because" in chain.notes[0]


@each_error
def test_a_base_that_cannot_be_read_while_a_file_is_written_makes_a_full_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Error
) -> None:
    chain, real_link, real_read = Chain(OPTIONS), linked_files.link_chain, FileBytes.read
    write(chain, tmp_path, 0)

    def link_and_fail(*args: Any) -> Any:
        def read(file: FileBytes, offset: int, n_bytes: int) -> Any:
            if file.path == tmp_path / "0.ckpt":
                raise error()
            return real_read(file, offset, n_bytes)

        names = real_link(*args)
        monkeypatch.setattr(FileBytes, "read", read)
        return names

    monkeypatch.setattr(linked_files, "link_chain", link_and_fail)
    write(chain, tmp_path, 1)
    monkeypatch.undo()
    assert "stored as a full file, because the base cannot be read" in chain.notes[0]
    check_chain(tmp_path, {0, 1})
    with contextlib.closing(open_checkpoint(tmp_path / "1.ckpt")) as written:
        assert written.depth == 0


def test_a_load_waits_for_the_file_that_is_written(tmp_path: Path) -> None:
    chain = Chain(OPTIONS)
    write(chain, tmp_path, 0)
    loading = threading.Thread(target=chain.go_on_from, args=(tmp_path / "0.ckpt",))

    def check_it_waits(*_: object) -> Written:
        loading.start()
        loading.join(0.1)
        assert loading.is_alive()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chain.write_against_base(tmp_path / "1.ckpt", check_it_waits)
    loading.join(60)
    assert not loading.is_alive()


def test_bases_go_beside_files_of_others(linked: Path) -> None:
    with copied(linked) as folder:
        remove_three(folder)
        assert n_bases(folder) == 1
        check_chain(folder, {3, 4})


@each_error
@pytest.mark.parametrize("name", ["2.ckpt", "from-before.ckpt", "base"])
def test_a_file_that_cannot_be_read_keeps_its_bases(linked: Path, name: str, error: Error) -> None:
    with copied(linked) as folder:
        path = min(folder.glob("base-*")) if name == "base" else folder / name
        chain = Chain(OPTIONS)
        with unreadable(path, error):
            for i in range(2):
                chain.remove(folder / f"{i}.ckpt")
        assert f"{path.name} cannot be read" in chain.notes[0]
        check_chain(folder, {2, 3, 4})


@pytest.mark.parametrize("damage", [b"", b"\0" * 200, b'\x10\0\0\0\0\0\0\0{"half": ', b"PK"])
def test_a_damaged_checkpoint_keeps_its_bases(linked: Path, damage: bytes) -> None:
    with copied(linked) as folder:
        (folder / "2.ckpt").unlink()
        (folder / "2.ckpt").write_bytes(damage)
        chain = Chain(OPTIONS)
        for i in range(2):
            chain.remove(folder / f"{i}.ckpt")
        (folder / "2.ckpt").unlink()
        (folder / "2.ckpt").hardlink_to(linked / "2.ckpt")  # restored from a backup
        check_chain(folder, {2, 3, 4})


@pytest.mark.parametrize("target", ["/not/mounted/2.ckpt", "gone.ckpt"])
def test_a_link_to_what_is_not_mounted_keeps_bases_and_one_to_nothing_does_not(
    linked: Path, target: str
) -> None:
    with copied(linked) as folder:
        (folder / "last.ckpt").symlink_to(target)
        remove_three(folder)
        assert n_bases(folder) == (n_bases(linked) if target.startswith("/") else 1)


@pytest.mark.parametrize("is_old", [False, True])
def test_a_file_that_another_writes_keeps_bases_unless_its_writer_was_killed_long_ago(
    linked: Path, is_old: bool
) -> None:
    with copied(linked) as folder:
        begun = folder / ".0123.ckptz-tmp"
        begun.write_bytes(bytes(100))
        if is_old:
            os.utime(begun, (0, 0))
        remove_three(folder)
        assert n_bases(folder) == (1 if is_old else n_bases(linked))


def test_a_missing_base_keeps_the_others(linked: Path) -> None:
    with copied(linked) as folder:
        (folder / "3.ckpt").unlink()
        for base in folder.glob("base-*"):
            if base.samefile(linked / "3.ckpt"):
                base.unlink()
        assert "4.ckpt cannot be read" in drop_unneeded(folder)[0]
        assert n_bases(folder) == n_bases(linked) - 1


# --- deletions by another thread, as with AsyncCheckpointIO -----------------------------------------


def elsewhere(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_the_newest_file_stays_until_the_next_is_whole(tmp_path: Path) -> None:
    chain = Chain(OPTIONS)
    elsewhere(lambda: write(chain, tmp_path, 0))
    chain.remove(tmp_path / "0.ckpt")  # its successor may not have been started
    check_chain(tmp_path, {0})
    elsewhere(lambda: write(chain, tmp_path, 1))
    assert not (tmp_path / "0.ckpt").exists()
    check_chain(tmp_path, {1})
    chain.remove(tmp_path / "0.ckpt")  # as Lightning does with deleted checkpoints
    elsewhere(lambda: write(chain, tmp_path, 2))
    chain.remove(tmp_path / "1.ckpt")
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"2.ckpt"}


def test_a_save_that_fails_leaves_the_file_that_it_was_to_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain(OPTIONS)
    elsewhere(lambda: write(chain, tmp_path, 0))

    def full(_: int) -> None:
        raise ERRORS["ENOSPC"]()

    def fails() -> None:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(WriteError):
            write(chain, tmp_path, 1)
        monkeypatch.undo()

    chain.remove(tmp_path / "0.ckpt")
    elsewhere(fails)
    check_chain(tmp_path, {0})
    elsewhere(lambda: write(chain, tmp_path, 0))  # saved again under the same name, it must stay
    check_chain(tmp_path, {0})


# --- folders of torch.distributed.checkpoint --------------------------------------------------------


def save_dcp(i: int, folder: Path, **how: Any) -> None:
    writer = CkptzStorageWriter(folder, options=OPTIONS, **how)
    dcp.save({"weight": a_state(i)["weight"]}, storage_writer=writer, no_dist=True)


def weight_in(folder: Path) -> torch.Tensor:
    state = {"weight": torch.zeros(5000)}
    dcp.load(state, storage_reader=CkptzStorageReader(folder, jobs=1), no_dist=True)
    return state["weight"]


@EVERY
def test_a_folder_that_is_replaced_while_one_call_fails_is_the_old_or_the_new_one(
    tmp_path: Path, stride: int
) -> None:
    prepared = tmp_path / "one"
    save_dcp(0, prepared)
    save_dcp(1, prepared, base=prepared)

    def work(folder: Path) -> None:
        try:
            save_dcp(2, folder, base=folder)
        except BaseException as error:  # torch's is no Exception
            raise RuntimeError(error) from error

    def check(folder: Path, error: Exception | None) -> None:
        weight = weight_in(folder)
        assert weight.equal(a_state(2)["weight"]) or (error and weight.equal(a_state(1)["weight"]))
        save_dcp(3, folder, base=folder)
        assert weight_in(folder).equal(a_state(3)["weight"])
        assert len(list(folder.glob("shard-*"))) == 1

    assert fail_everywhere(prepared, work, check, stride=stride or 16) > 30


def test_what_was_there_before_is_deleted_only_if_the_call_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"weight": torch.ones(9)}, tmp_path / "packed.ckptz")
    folder = tmp_path / "out"
    folder.mkdir()

    def fails(*_: Any, **__: Any) -> None:
        (folder / "of a user").touch()  # written in the meantime
        raise OSError(5, "input/output error")

    monkeypatch.setattr("torch.distributed.checkpoint.state_dict_saver.save", fails)
    real = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: self != folder and real(self))  # as after an error
    with pytest.raises(OSError, match="input/output"):
        restore(tmp_path / "packed.ckptz", folder, to="dcp")
    assert (folder / "of a user").is_file()


# --- the steps of a run of torch.distributed.checkpoint -------------------------------------------------


def save_step(folder: Path, step: int, keep_last: int = 1) -> None:
    save_dcp(step, folder / f"step-{step}", keep_last=keep_last)


def check_step(folder: Path, step: int) -> None:
    assert weight_in(folder / f"step-{step}").equal(a_state(step)["weight"])


def steps_in(folder: Path) -> set[str]:
    return {path.parent.name for path in folder.glob(f"*/{INDEX_FILE}")}


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write steps 1 to 4."""
    folder = tmp_path_factory.mktemp("steps") / "run"
    for step in range(1, 5):
        save_step(folder, step, keep_last=9)
    return folder


@each_error
def test_a_newest_index_that_cannot_be_read_keeps_every_older_step(steps: Path, error: Error) -> None:
    with copied(steps) as folder:
        with unreadable(folder / "step-4" / INDEX_FILE, error):
            [note] = delete_old(folder, 1, 1)
        assert "step-4 cannot be read" in note
        assert steps_in(folder) == {f"step-{i}" for i in range(1, 5)}
        assert delete_old(folder, 1, 1) == ()
        assert steps_in(folder) == {"step-4"}
        check_step(folder, 4)


def test_folders_of_something_else_stay_though_they_are_called_after_steps(steps: Path) -> None:
    with copied(steps) as folder:
        foreign = [folder / name for name in ("step-0", "step-6", "step-7", "best-1")]
        foreign[2].write_text("no folder")
        for path in (*foreign[:2], foreign[3]):
            path.mkdir()
            (path / ".metadata").touch()
        with pytest.raises(CheckpointException, match="files of something else"):
            save_step(folder, 6)
        save_step(folder, 8)
        assert steps_in(folder) == {"step-8"}
        assert foreign[2].exists()
        assert all((path / ".metadata").exists() for path in (*foreign[:2], foreign[3]))


def test_a_step_that_was_never_finished_does_not_count_among_those_that_stay(steps: Path) -> None:
    with copied(steps) as folder:
        (folder / "step-5").mkdir()
        (folder / "step-5" / "shard-00000-0.ckptz").write_bytes(b"half")
        assert delete_old(folder, 1, 1) == ()
        assert steps_in(folder) == {"step-4"}
        check_step(folder, 4)


def test_a_step_without_a_shard_keeps_every_older_step(steps: Path) -> None:
    with copied(steps) as folder:
        next((folder / "step-4").glob("shard-*")).unlink()
        [note] = delete_old(folder, 1, 1)
        assert "step-4 cannot be read" in note
        check_step(folder, 3)


@each_error
def test_a_step_whose_index_cannot_be_seen_is_not_taken_for_a_save_that_was_cut_off(
    steps: Path, error: Error, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.stat

    def stat(path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path).endswith(INDEX_FILE):
            raise error()
        return real(path, *args, **kwargs)

    with copied(steps) as folder:
        monkeypatch.setattr(os, "stat", stat)
        with pytest.raises(CheckpointException, match=str(error().strerror)):
            save_step(folder, 4)
        monkeypatch.undo()
        check_step(folder, 4)


# --- Publisher --------------------------------------------------------------------------------------


def published_state(step: int) -> State:
    return {"weight": torch.arange(300.0) + step}


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Publish steps 0 to 5, of which 0, 2 and 4 are full files."""
    folder = tmp_path_factory.mktemp("stream") / "run"
    publisher = Publisher(folder, full_every=2, keep_full=None, jobs=1)
    for step in range(6):
        publisher.publish(published_state(step), step)
    return folder


def follow(folder: Path, step: int | None = None) -> int:
    live = cloned(published_state(99))
    applied = Follower(folder, jobs=1).apply_to(live, step).step
    assert same(live, published_state(applied))
    return applied


@each_error
@pytest.mark.parametrize("full", [4, 6])
def test_an_unreadable_full_file_keeps_older_files(stream: Path, full: int, error: Error) -> None:
    with copied(stream) as folder:
        path = folder / f"step-{full:06d}.ckptz"
        publisher = Publisher(folder, full_every=2, keep_full=2, jobs=1)
        with unreadable(path, error):
            published = publisher.publish(published_state(6), 6)
        assert f"{path.name} cannot be read" in published.note
        for step in range(full + 1):
            assert follow(folder, step) == step
        publisher.publish(published_state(7), 7)
        assert min(version.step for version in versions_in(dict.fromkeys(os.listdir(folder), 1))) == 4
        assert follow(folder) == 7


@pytest.mark.parametrize("failing", ["sizes", "remove"])
def test_a_step_is_published_whatever_becomes_of_the_older_ones(
    stream: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with copied(stream) as folder:
        publisher = Publisher(folder, full_every=2, keep_full=1, jobs=1)
        real, calls = publisher._folder.sizes, []

        def refuse(*_: Any) -> Any:
            calls.append(1)
            if failing == "sizes" and len(calls) == 1:
                return real()
            raise CkptzError("no answer")

        monkeypatch.setattr(publisher._folder, failing, refuse)
        published = publisher.publish(published_state(6), 6)
        assert ("older files are kept" in published.note) == (failing == "sizes")
        assert follow(folder, 1) == 1
        assert follow(folder) == 6


@pytest.mark.parametrize("last", ["ckptz-index.json", "trainer_state.json"])
def test_prune_keeps_all_where_the_newest_step_was_not_written_to_its_end(tmp_path: Path, last: str) -> None:
    for step in (1, 2, 3):
        folder = tmp_path / f"checkpoint-{step}"
        Chain(ChainOptions(jobs=1)).write(folder / "model.ckptz", job_of({"w": torch.full((9,), step)}, step))
        if step < 3:
            (folder / last).write_text("{}")
    report = ckptz.prune(tmp_path, KeepPolicy(last=1))
    assert report.removed == ()
    assert (
        "checkpoint-3 cannot be read, so all that is older stays until it can: has none of ckptz-index.json"
        in report.notes[0]
    )
    assert ckptz.prune(tmp_path, after=2).removed == ("checkpoint-3",)
    assert ckptz.prune(tmp_path, KeepPolicy(last=1)).removed == ("checkpoint-1",)
