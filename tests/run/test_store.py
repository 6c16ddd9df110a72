"""The folder of a run: names, listings, locks and retention."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from ckptz import KeepPolicy, KeepRules, compress
from ckptz.errors import ConfigError, WriteError
from ckptz.format.byte_source import ByteSource
from ckptz.format.index import BaseRef
from ckptz.format.suffixes import TEMPORARY_SUFFIX
from ckptz.run.folder import StepStore
from ckptz.run.keep import KEEP_ALL, keep_policy
from ckptz.run.prune import decide, item_of, prune_folder
from ckptz.run.step_files import FILE_KINDS, ChainRule, FileFacts, Listing, StepFile
from ckptz.store.lock import FileLock, Holder, Lease, Spool
from ckptz.store.storage import LocalFolder
from ckptz.sync import Publisher
from ckptz.torch import load_file
from ckptz.torch import save_file as save_tensors
from tests.support.checkpointer_support import KEEP_TWO, Run, in_child, names_in, saved_run
from tests.support.cli_support import ckptz

# --- names --------------------------------------------------------------------------------------


TAILS = ["", ".exact", ".exact-9be27a01c35d8f64"]


@given(st.integers(0, (1 << 63) - 1), st.sampled_from(["weights", "state"]), st.sampled_from(TAILS))
def test_the_name_of_a_file_says_what_it_is(step: int, kind: Any, tail: str) -> None:
    file = StepFile(step, kind, tail)
    assert StepFile.parse(file.name) == file


def test_other_files_are_not_taken_for_steps() -> None:
    tails = (".exact.state.ckptz", ".exact-9be2.ckptz", ".from-00000000.ckptz", ".safetensors")
    for name in ("step-1.ckptz", "step-000000001.ckptz", *(f"step-00000001{tail}" for tail in tails)):
        assert StepFile.parse(name) is None, name


def test_a_step_is_there_when_its_weights_are() -> None:
    both = {StepFile(s, k).name: 1 for s in (1, 2, 3) for k in ("weights", "state")}
    names = {
        **both,
        StepFile(4, "state").name: 1,  # its writer was killed between weights and state
        StepFile(5, "weights").name: 1,  # its state was deleted by a rule
        StepFile(1, "weights").marker: 0,
        StepFile(9, "state").marker: 0,
        f".step-0123{TEMPORARY_SUFFIX}": 7,
        f".0123{TEMPORARY_SUFFIX}": 7,  # of another program
        "notes.txt": 3,
    }
    listing = Listing.of(names)
    assert listing.full_steps == (2, 3)
    assert listing.weights_steps == (2, 3, 5)
    assert set(listing.leftovers) == {f".step-0123{TEMPORARY_SUFFIX}", StepFile(9, "state").marker}


# --- rules --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        (KeepRules(last=None), {1, 2, 3, 4, 5, 6}),
        (KeepRules(last=2), {5, 6}),
        (KeepRules(last=1, every=2), {2, 4, 6}),
        (KeepRules(last=1, best=2), {2, 3, 6}),
        (KeepRules(last=1, best=1, lower_is_better=False), {4, 6}),
    ],
)
def test_keep_rules_select_the_steps_to_keep(rules: KeepRules, kept: set[int]) -> None:
    metrics = {1: float("nan"), 2: 0.5, 3: 0.25, 4: 0.75}
    assert rules.kept(range(1, 7), metrics) == kept


@pytest.mark.parametrize("rules", [{"last": 0}, {"every": 0}, {"best": -1}, {"exact": -1}])
def test_keep_rules_out_of_range_are_refused(rules: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(rules))):
        KeepPolicy(**rules)


def test_rules_of_the_command_line() -> None:
    none = (None, None, None)
    assert keep_policy(steps=none, weights=none, lower_is_better=True) == KeepPolicy(last=None, exact=None)
    policy = keep_policy(steps=(None, 10, None), weights=(3, None, None), lower_is_better=False, exact=2)
    weights = KeepRules(last=3, lower_is_better=False)
    assert policy == KeepPolicy(last=1, every=10, lower_is_better=False, weights=weights, exact=2)


# --- retention ----------------------------------------------------------------------------------


def n_hidden(rule: ChainRule) -> int:
    """Return the maximum number of hidden files that consecutive kept files may need."""
    return (rule.full_every - 1).bit_length() if rule.is_forked else rule.full_every - 1


def files_bound(last: int, rule: ChainRule, n_others: int = 0) -> int:
    """Return the maximum number of files of each kind, as docs/checkpointer.md promises."""
    return last + n_hidden(rule) + (1 + n_hidden(rule)) * n_others


@pytest.mark.parametrize(("is_forked", "n_saves"), [(True, 40), (False, 24)])
def test_the_disk_is_bounded_over_many_saves(tmp_path: Path, is_forked: bool, n_saves: int) -> None:
    run, most, rule = Run(), 0, ChainRule(8, is_forked)
    with run.checkpointer(tmp_path, background=False, keep=KeepPolicy(last=5), full_every=8) as ck:
        ck._rule = rule
        for step in range(1, n_saves + 1):
            run.position["seen"] += 1
            ck.save(step)
            kinds = [file.kind for file in Listing.of(dict.fromkeys(names_in(tmp_path), 1)).sizes]
            most = max(most, kinds.count("weights"), kinds.count("state"))
        assert ck.steps() == tuple(range(n_saves - 4, n_saves + 1))
        for step in ck.steps():
            ck.restore(step)
            assert run.position["seen"] == step
    assert most == files_bound(5, rule)


@pytest.mark.parametrize("full_every", [1, 2, 3, 7, 16, 64])
@pytest.mark.parametrize("is_forked", [True, False])
def test_a_base_is_the_file_before_or_one_that_it_is_stored_against(full_every: int, is_forked: bool) -> None:
    rule = ChainRule(full_every, is_forked)
    chains: list[list[int]] = [[0]]
    for position in range(1, full_every):
        base = rule.base_of(position)
        assert base is not None
        assert base in chains[-1]
        chains.append([position, *chains[base]])
    assert rule.base_of(0) is rule.base_of(full_every) is None
    assert max(len(chain) for chain in chains) - 1 <= n_hidden(rule)


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor])
def test_a_step_may_be_a_whole_number_of_any_library(tmp_path: Path, kind: Any) -> None:
    run = Run()
    with run.checkpointer(tmp_path, background=False, every=2) as ck:
        ck.save(kind(1))
        assert ck.maybe_save(kind(2))
        assert ck.steps() == (1, 2)
        for invalid in (None, 3.0, "3", -1, 1 << 63):
            with pytest.raises(ConfigError, match="a step is a whole number"):
                ck.save(invalid)
    assert Publisher(tmp_path / "weights").publish({"w": torch.ones(2)}, kind(3)).step == 3


@pytest.mark.parametrize("kind", [np.float64, np.float32, torch.tensor, int])
def test_a_metric_may_be_a_number_of_any_library(tmp_path: Path, kind: Any) -> None:
    run = Run()
    with run.checkpointer(tmp_path, background=False, keep=KeepPolicy(last=1, best=1)) as ck:
        for step in (1, 2, 3):
            ck.save(step, metric=kind(step))
        assert ck.steps() == (1, 3)
        with pytest.raises(ConfigError, match="metric must be a number"):
            ck.save(4, metric=torch.ones(2))
        assert ck.steps() == (1, 3)


def test_weights_outlive_their_state(tmp_path: Path) -> None:
    run = Run()
    policy = KeepPolicy(last=1, weights=KeepRules(last=3))
    with run.checkpointer(tmp_path, background=False, keep=policy, full_every=1) as ck:
        states = []
        for step in range(1, 6):
            run.step()
            states.append({name: tensor.clone() for name, tensor in run.model.state_dict().items()})
            ck.save(step)
        assert ck.steps() == (5,)
        assert ck.weights_steps() == (3, 4, 5)
        with pytest.raises(ConfigError, match="weights_only=True"):
            ck.restore(3)
        seen = run.position["seen"]
        ck.restore(3, weights_only=True)
    assert all(tensor.equal(states[2][name]) for name, tensor in run.model.state_dict().items())
    assert run.position["seen"] == seen
    assert names_in(tmp_path) == {
        ".ckptz-lock",
        *(f"step-0000000{step}.ckptz" for step in (3, 4, 5)),
        "step-00000005.state.ckptz",
    }


def weights_alone(folder: Path, step: int) -> None:
    """Write a step as the command line does: under this name, and without optimizer state."""
    save_file({"w": np.full(8, step, "f4")}, folder / "w.safetensors")
    compress(folder / "w.safetensors", folder / StepFile(step, "weights").name, step=step or None)
    (folder / "w.safetensors").unlink()


def test_weights_that_never_had_a_state_are_steps(tmp_path: Path) -> None:
    for step in range(4):
        weights_alone(tmp_path, step)
    before = names_in(tmp_path)
    report = prune_folder(tmp_path, KEEP_ALL)
    assert (report.removed, report.weights_only) == ((), (0, 1, 2, 3))
    assert names_in(tmp_path) == before | {".ckptz-lock"}
    report = prune_folder(tmp_path, KeepPolicy(last=1, every=2))
    assert (report.weights_only, report.steps) == ((0, 2, 3), ())


def test_weights_stay_without_rules_and_when_going_back(tmp_path: Path) -> None:
    policy = KeepPolicy(last=1, weights=KeepRules(last=3))
    saved_run(tmp_path, 5, keep=policy, full_every=1)
    weights_alone(tmp_path, 6)
    assert prune_folder(tmp_path, KEEP_ALL).weights_only == (3, 4, 6)
    with Run().checkpointer(tmp_path, background=False, keep=policy, full_every=1) as checkpointer:
        checkpointer.discard_after(5)
        assert checkpointer.weights_steps() == (3, 4, 5)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_newest_stays_under_every_rule(data: st.DataObject) -> None:
    """No prune deletes the newest weights or the newest complete step, or all files, of any folder."""
    steps = st.sets(st.integers(0, 9), max_size=6)
    weights, states = data.draw(steps), data.draw(steps)
    rules = st.builds(
        KeepRules,
        last=st.none() | st.integers(1, 3),
        every=st.none() | st.integers(1, 4),
        best=st.integers(0, 2),
    )
    weights_rules, exact = data.draw(st.none() | rules), data.draw(st.none() | st.integers(0, 2))
    step_rules = {key: getattr(data.draw(rules), key) for key in ("last", "every", "best")}
    policy = KeepPolicy(**step_rules, weights=weights_rules, exact=exact)
    files = {StepFile(step, "weights") for step in weights} | {StepFile(step, "state") for step in states}
    listing = Listing(dict.fromkeys(files, 1), frozenset(), ())
    facts = {file: FileFacts(file.name, None, file.step, {}, 0, 1) for file in files}
    units = {file: item_of(file, 1, facts[file], is_hidden=False) for file in files}
    stays, hidden, _, notes = decide("run", [*units.values()], policy)
    assert not hidden
    assert not notes
    kept = {file for file in files if units[file] in stays}
    newest = {*listing.full_steps[-1:]}
    assert {StepFile(step, kind) for step in newest for kind in FILE_KINDS} <= kept
    assert {StepFile(step, "weights") for step in listing.weights_steps[-1:]} <= kept
    if policy.last is None and weights_rules is None:
        assert kept >= files


@pytest.mark.parametrize(
    "named",
    [OSError("not now"), FileFacts("a", BaseRef("0", "step-00000000.ckptz", 1), 1, {}, 1, 1)],
    ids=["unreadable", "as deep as the delta"],
)
def test_a_file_with_the_values_of_a_base_stays_if_readers_refuse_the_one_of_its_name(
    named: FileFacts | Exception,
) -> None:
    """Readers then find the values of step 1 in the file of step 2."""
    facts = {
        0: FileFacts("0", None, 0, {}, 0, 1),
        1: named,
        2: FileFacts("a", None, 2, {}, 0, 1),
        3: FileFacts("b", BaseRef("a", "step-00000001.ckptz", 1), 3, {}, 1, 1),
    }
    items = [item_of(StepFile(n, "weights"), 1, facts[n], is_hidden=False) for n in facts]
    *_, removed, _ = decide("run", items, KeepPolicy(last=1))
    assert items[2] not in removed


def test_a_step_stays_hidden_while_a_file_of_the_user_is_stored_against_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_run(tmp_path, 1, full_every=1)
    best, first = tmp_path / "best.ckptz", tmp_path / "step-00000001.ckptz"
    save_tensors({f"model.{name}": values for name, values in load_file(first).items()}, best, base=first)
    (tmp_path / "other.ckptz").write_bytes(b"no checkpoint")
    run = Run()
    with run.checkpointer(tmp_path, background=False, keep=KeepPolicy(last=1), full_every=1) as checkpointer:
        checkpointer.restore_latest()
        for step in (2, 3):
            run.step()
            checkpointer.save(step)
        assert checkpointer.weights_steps() == (3,)
    assert load_file(best)
    with monkeypatch.context() as patch:
        opens = LocalFolder.open_header

        def fails(self: LocalFolder, name: str, n_bytes: int) -> ByteSource:
            if name == best.name:
                raise PermissionError(errno.EACCES, "permission denied", name)
            return opens(self, name, n_bytes)

        patch.setattr(LocalFolder, "open_header", fails)
        pruned = prune_folder(tmp_path, KeepPolicy(last=1))
    assert not pruned.removed
    assert any("best.ckptz cannot be read" in note for note in pruned.notes)
    best.unlink()
    assert first.name in prune_folder(tmp_path, KeepPolicy(last=1)).removed


# --- locks --------------------------------------------------------------------------------------


def test_a_second_writer_is_refused_and_a_reader_is_not(tmp_path: Path) -> None:
    saved_run(tmp_path, 2)
    first, second = Run(), Run()
    with first.checkpointer(tmp_path, every=1) as writer, second.checkpointer(tmp_path, every=5) as other:
        writer.restore_latest()
        first.step()
        writer.maybe_save(3)
        assert other.restore_latest() in (2, 3)
        with pytest.raises(ConfigError, match=rf"this process \({os.getpid()}\) .* close\(\) the first"):
            other.maybe_save(1)  # not due yet
        with pytest.raises(ConfigError, match="is writing here already"):
            prune_folder(tmp_path, KeepPolicy(last=1))
        prune_folder(tmp_path, KeepPolicy(last=1), dry_run=True)
    prune_folder(tmp_path, KeepPolicy(last=1))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_lock_of_a_killed_process_is_free_at_once_and_forks_do_not_hold_it(tmp_path: Path) -> None:
    def hold() -> None:
        lock, (reader, writer) = FileLock(tmp_path), os.pipe()
        if os.fork() == 0:  # as data loaders do
            os.write(writer, b"!")  # the inherited handle is closed
            time.sleep(5)
            os._exit(0)
        os.read(reader, 1)
        lock.check()
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(hold) == -signal.SIGKILL
    FileLock(tmp_path).release()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_write_beside_the_one_that_holds_the_lock(tmp_path: Path) -> None:
    run = Run()

    def save() -> None:
        with pytest.raises(WriteError, match="was forked from"):
            ck._store.check_lock()
        with pytest.raises(ConfigError, match="is writing here already"):
            ck.save(2)

    with run.checkpointer(tmp_path, background=False) as ck:
        ck.save(1)
        assert in_child(save) == 0
        assert ck.steps() == (1,)


@pytest.mark.parametrize("removes_folder", [False, True])
def test_a_lock_that_somebody_removes_is_taken_again_or_noticed(tmp_path: Path, removes_folder: bool) -> None:
    folder, run, other = tmp_path / "run", Run(), Run()
    with run.checkpointer(folder, background=False) as first, other.checkpointer(folder) as second:
        for step in (1, 2):
            first.save(step)
            if removes_folder:
                shutil.rmtree(folder)
            else:
                (folder / ".ckptz-lock").unlink()
        second.save(3)
        with pytest.raises(ConfigError, match="is writing here already"):
            first.save(4)


def test_a_lease_that_is_renewed_is_respected_and_a_stale_one_is_taken(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    lease = Lease(folder, beat=0.05, stale=60)
    with pytest.raises(ConfigError, match=r"process .* is writing here already"):
        Lease(folder, beat=0.05, stale=60)  # as soon as it is renewed
    lease.check()
    lease.release()
    assert not names_in(tmp_path)
    elsewhere = Holder("0123", 1, "another machine", 0.0)
    (tmp_path / ".ckptz-lease").write_bytes(elsewhere.pack())
    Lease(folder, beat=0.05, stale=0.2).release()


def test_a_lease_of_a_dead_process_is_taken_at_once(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    (tmp_path / ".ckptz-lease").write_bytes(Holder("0", process.pid, Holder.this_process().host, 0.0).pack())
    start = time.monotonic()
    Lease(LocalFolder(tmp_path), beat=0.05, stale=90).release()
    assert time.monotonic() - start < 60


def test_an_incomplete_lease_is_respected_until_it_is_stale(tmp_path: Path) -> None:
    folder, path = LocalFolder(tmp_path), tmp_path / ".ckptz-lease"
    for text in (b"", b'{"pid": 1}'):
        path.write_bytes(text)
        start = time.monotonic()
        Lease(folder, beat=0.05, stale=0.5).release()
        assert time.monotonic() - start > 0.5

    class CutOff(Lease):
        is_first = True

        def _read(self) -> bytes | None:
            text, self.is_first = super()._read(), not self.is_first
            return text if text is None or self.is_first else text[:-9]

    lease = Lease(folder, beat=0.05, stale=60)
    with pytest.raises(ConfigError, match="is writing here already"):
        CutOff(folder, beat=0.05, stale=60)
    lease.check()
    lease.release()


def test_a_lease_that_another_took_is_noticed(tmp_path: Path) -> None:
    lease = Lease(LocalFolder(tmp_path), beat=60, stale=60)
    (tmp_path / ".ckptz-lease").write_bytes(Holder("0123", 1, "another machine", 0.0).pack())
    with pytest.raises(WriteError, match="another writer took the folder"):
        lease.check()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_neither_holds_nor_ends_the_lease_of_its_parent(tmp_path: Path) -> None:
    lease = Lease(LocalFolder(tmp_path), beat=0.05, stale=60)

    def end() -> None:
        signal.alarm(20)
        assert lease.is_lost
        with pytest.raises(WriteError, match="was forked from"):
            lease.check()
        lease.release()

    assert in_child(end) == 0
    assert not lease.is_lost
    lease.check()
    lease.release()


def test_the_spool_of_a_killed_process_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    used = Spool()
    abandoned = tmp_path / "ckptz-spool-gone"
    abandoned.mkdir()
    FileLock(abandoned).release()
    other = Spool()
    assert not abandoned.exists()
    assert used.folder.exists()
    for spool in (used, other):
        spool.close()
    assert not names_in(tmp_path)


def test_half_written_files_are_removed_by_the_next_writer_and_nobody_elses(tmp_path: Path) -> None:
    saved_run(tmp_path, 1)
    names = (".step-0011", ".2233", ".4455")
    ours, foreign, old = (tmp_path / f"{name}{TEMPORARY_SUFFIX}" for name in names)
    for path in (ours, foreign, old):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    store = StepStore(tmp_path)
    store.lock()
    store.close()
    assert not ours.exists()
    assert not old.exists()
    assert foreign.exists()


# --- the command line ---------------------------------------------------------------------------


@pytest.mark.usefixtures("deltas_at_any_cost")
def test_verify_checks_every_file_of_a_folder_and_that_pairs_match(tmp_path: Path) -> None:
    saved_run(tmp_path, 3, keep=KEEP_TWO)
    result = ckptz("verify", tmp_path)
    assert result.stdout.count(": ok") == 6
    (tmp_path / f".step-00{TEMPORARY_SUFFIX}").touch()
    assert "unfinished files" in ckptz("verify", tmp_path).stderr
    other, run = tmp_path.with_name("other"), Run(seed=8)
    with run.checkpointer(other, background=False, full_every=1) as checkpointer:
        for step in range(1, 4):
            run.step()
            checkpointer.save(step)
    os.replace(other / "step-00000003.state.ckptz", tmp_path / "step-00000003.state.ckptz")
    failed = ckptz("verify", tmp_path, fails=True)
    assert failed.exit_code == 3
    assert "belongs to other weights than step-00000003.ckptz holds" in failed.stderr
