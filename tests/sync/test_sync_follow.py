"""Follower: all steps or some, late starts, restarts, longer deltas, and refusals that change no tensor."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import ckptz.torch
from ckptz import compress
from ckptz.errors import CorruptionError, FormatError, MissingBaseError
from ckptz.store import storage
from ckptz.sync import Follower, Publisher
from tests.support.sync_support import a_state, cloned, moved, published, refused, same, untouched

# --- following ------------------------------------------------------------------------------------


def test_a_follower_takes_every_step_or_skips_some(tmp_path: Path) -> None:
    publisher, follower, state = Publisher(tmp_path, full_every=50), Follower(tmp_path), a_state()
    live = cloned(a_state(9))
    assert follower.poll() is None
    publisher.publish(state, 0)
    assert follower.poll() == 0
    assert follower.apply_to(live).files == ("step-000000.ckptz",)
    assert follower.poll() is None
    assert follower.apply_to(live).files == ()
    for step in range(1, 8):
        state = moved(state, step)
        publisher.publish(state, step)
        if step not in (3, 4):
            update = follower.apply_to(live)
            assert (update.step, same(live, state)) == (step, True)
            assert len(update.files) == (3 if step == 5 else 1)


def test_a_late_one_catches_up_from_a_full_file(tmp_path: Path) -> None:
    states = published(tmp_path, 14, full_every=5)
    live, follower = cloned(a_state(9)), Follower(tmp_path)
    update = follower.apply_to(live)
    assert [update.previous, update.step, follower.step] == [None, 13, 13]
    assert [name.count("from") for name in update.files] == [0, 1, 1, 1]
    assert same(live, states[-1])


def test_a_restarted_one_finds_out_what_its_tensors_hold(tmp_path: Path) -> None:
    states = published(tmp_path, 9, full_every=5)
    for step in (5, 6, 8):
        live = cloned(states[step])
        update = Follower(tmp_path).apply_to(live)
        assert (update.previous, len(update.files)) == (step, 8 - step)
        assert same(live, states[8])
    torn = cloned(states[7])
    torn["float64"][0] = states[8]["float64"][0] + 1
    update = Follower(tmp_path).apply_to(torn)
    assert (update.previous, update.files[0]) == (None, "step-000005.ckptz")
    assert same(torn, states[8])


@pytest.mark.parametrize("check", ["base", "stored"])
def test_deltas_of_several_steps_in_the_folder_are_used(tmp_path: Path, check: Any) -> None:

    states = published(tmp_path, 8, full_every=50)
    live, follower = cloned(a_state(9)), Follower(tmp_path, check=check)
    follower.apply_to(live, step=2)
    first, last = (tmp_path / f"step-00000{step}.from-00000{step - 1}.ckptz" for step in (2, 7))
    compress(last, tmp_path / "step-000007.from-000002.ckptz", base=first)
    assert follower.apply_to(live).files == ("step-000007.from-000002.ckptz",)
    assert same(live, states[7])


def test_a_file_that_is_retired_on_the_way_is_gone_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = published(tmp_path, 4, full_every=50)
    live, follower = cloned(a_state(9)), Follower(tmp_path)
    follower.apply_to(live, step=1)
    real = storage.LocalFolder.open

    def open_late(self: Any, name: str) -> Any:
        if name == "step-000003.from-000002.ckptz" and (tmp_path / name).exists():
            (tmp_path / name).unlink()
            ckptz.torch.save_file(states[3], tmp_path / "full.ckptz")
            Publisher(tmp_path / "other").publish(states[3], 3)
            shutil.copy(tmp_path / "other" / "step-000003.ckptz", tmp_path)
        return real(self, name)

    monkeypatch.setattr(storage.LocalFolder, "open", open_late)
    update = follower.apply_to(live)
    assert update.files == ("step-000002.from-000001.ckptz", "step-000003.ckptz")
    assert same(live, states[3])


# --- what a follower refuses ----------------------------------------------------------------------


def test_a_gap_in_the_steps(tmp_path: Path) -> None:
    states = published(tmp_path, 6, full_every=50)
    live, follower = cloned(states[0]), Follower(tmp_path)
    follower.apply_to(live, step=2)
    (tmp_path / "step-000004.from-000003.ckptz").unlink()
    with untouched(live), refused(MissingBaseError, "no files lead from step 2 to step 5"):
        follower.apply_to(live)
    assert follower.step == 2
    follower.apply_to(live, step=3)
    assert same(live, states[3])
    Publisher(tmp_path, full_every=1).publish(states[5], 6)  # the next full file
    follower.apply_to(live)
    assert same(live, states[5])


def test_tensors_that_somebody_else_wrote_to(tmp_path: Path) -> None:
    states = published(tmp_path, 3, full_every=50)
    live, follower = cloned(states[0]), Follower(tmp_path)
    follower.apply_to(live, step=1)
    live["float16"][7] += 1
    with (
        untouched(live),
        refused(MissingBaseError, "'float16' holds other values; apply the deltas in order"),
    ):
        follower.apply_to(live)
    follower.reset()
    follower.apply_to(live)
    assert same(live, states[2])


@pytest.mark.parametrize("check", ["base", "stored"])
def test_files_of_another_run(tmp_path: Path, check: Any) -> None:
    published(tmp_path / "a", 2)
    published(tmp_path / "b", 4, state=a_state(5))
    live, follower = cloned(a_state()), Follower(tmp_path / "a", check=check)
    follower.apply_to(live)
    for name in ("step-000002.from-000001.ckptz", "step-000003.from-000002.ckptz"):
        shutil.copy(tmp_path / "b" / name, tmp_path / "a")
    with untouched(live), refused(MissingBaseError, "is not the step 1 of these tensors"):
        follower.apply_to(live)
    shutil.rmtree(tmp_path / "a")
    published(tmp_path / "a", 1)
    with untouched(live), refused(MissingBaseError, "newest step is 0, but the tensors have step 1"):
        follower.apply_to(live)


def test_a_file_under_another_name(tmp_path: Path) -> None:
    states = published(tmp_path, 3, full_every=50)
    (tmp_path / "step-000002.from-000001.ckptz").rename(tmp_path / "step-000005.from-000001.ckptz")
    live, follower = cloned(states[1]), Follower(tmp_path)
    with untouched(live), refused(CorruptionError, "holds step 2; it was renamed"):
        follower.apply_to(live)


def test_a_damaged_file_on_the_way(tmp_path: Path) -> None:
    states = published(tmp_path, 3, full_every=50)
    live, follower = cloned(states[0]), Follower(tmp_path)
    follower.apply_to(live, step=0)
    path = tmp_path / "step-000002.from-000001.ckptz"
    content = path.read_bytes()
    path.write_bytes(content[:-50])
    with pytest.raises(FormatError, match=r"step-000002\.from-000001"):
        follower.apply_to(live)
    assert follower.step == 1
    assert same(live, states[1])
    path.write_bytes(content)
    follower.apply_to(live)
    assert same(live, states[2])
