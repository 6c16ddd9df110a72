"""Lossy checkpoints of frameworks, which restore exactly while they are the newest."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptz import Grid, KMeans, inspect
from ckptz.errors import ConfigError
from ckptz.integrations.dcp import ChainOptions, CkptzStorageReader, CkptzStorageWriter
from ckptz.integrations.linked import Chain, job_of, read_newest
from ckptz.torch import load_state

OPTIONS = ChainOptions(config=KMeans(levels=8), jobs=1)


def a_state(step: int) -> dict[str, Any]:
    weight = torch.randn(80, 80, generator=torch.Generator().manual_seed(3))
    return {"weight": weight + step / 1000, "step": step}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a["step"] == b["step"] and torch.equal(a["weight"], b["weight"])


def residuals(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.exact-*.ckptz"))


@pytest.mark.parametrize("name", ["{}/model.ckptz", "{}.ckpt", "last.ckpt"])
def test_the_newest_file_is_restored_exactly(tmp_path: Path, name: str) -> None:
    chain = Chain(OPTIONS)
    for step in range(4):
        path = tmp_path / name.format(step)
        chain.write(path, job_of(a_state(step)))
        assert same(read_newest(path), a_state(step))
        assert not same(load_state(path), a_state(step)), "a path gives that file's own values"
        assert len(residuals(tmp_path)) == 1 + (step > 0 and name != "last.ckpt"), "until the step is whole"
        chain.settle()
        assert len(residuals(tmp_path)) == 1


@pytest.mark.parametrize(("dtype", "is_delta"), [(torch.float32, False), (torch.bfloat16, True)])
def test_a_residual_is_a_delta_where_that_takes_much_less(
    tmp_path: Path, dtype: torch.dtype, is_delta: bool
) -> None:
    state = {"weight": a_state(0)["weight"].to(dtype), "step": 0}
    Chain(OPTIONS).write(tmp_path / "0.ckpt", job_of(state))
    [residual] = residuals(tmp_path)
    assert (inspect(residual).depth > 0) == is_delta
    assert same(read_newest(tmp_path / "0.ckpt"), state)


def test_a_residual_goes_when_a_later_step_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain(OPTIONS)
    for step in range(3):
        chain.write(tmp_path / f"{step}.ckpt", job_of(a_state(step)))
        assert all(
            same(read_newest(tmp_path / f"{i}.ckpt"), a_state(i)) for i in range(max(0, step - 1), step)
        )
        chain.settle()
    assert [path.name.split(".")[0] for path in residuals(tmp_path)] == ["2"]
    monkeypatch.setattr(Chain, "_publish", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        chain.write(tmp_path / "3.ckpt", job_of(a_state(3)))
    assert same(read_newest(tmp_path / "2.ckpt"), a_state(2))
    assert not same(read_newest(tmp_path / "1.ckpt"), a_state(1))


def test_no_residual_goes_where_the_newest_file_cannot_be_opened(tmp_path: Path) -> None:
    chain = Chain(OPTIONS)
    for step in range(2):
        chain.write(tmp_path / f"{step}.ckpt", job_of(a_state(step)))
    residuals(tmp_path)[1].write_bytes(b"damaged")
    chain.settle()
    assert "older files stay exact" in chain.notes[-1]
    assert same(read_newest(tmp_path / "0.ckpt"), a_state(0))


def test_a_folder_keeps_its_time_when_residuals_go(tmp_path: Path) -> None:
    """The Trainer sorts checkpoints by modification time to find the oldest."""
    chain = Chain(OPTIONS)
    for step in range(2):
        chain.write(tmp_path / str(step) / "model.ckptz", job_of(a_state(step)))
        os.utime(tmp_path / str(step), (step + 1, step + 1))
    chain.settle()
    assert not residuals(tmp_path / "0")
    assert [(tmp_path / str(step)).stat().st_mtime for step in range(2)] == [1, 2]


def test_who_keeps_no_more_steps_than_stay_exact_is_told() -> None:
    with pytest.warns(RuntimeWarning, match="more disk than lossless ones"):
        CkptzStorageWriter(options=OPTIONS, keep_last=1)
    CkptzStorageWriter(options=OPTIONS, keep_last=2)
    CkptzStorageWriter(options=ChainOptions(jobs=1), keep_last=1)


def test_deleting_a_file_deletes_its_residual(tmp_path: Path) -> None:
    chain = Chain(OPTIONS)
    for step in range(2):
        chain.write(tmp_path / f"{step}.ckpt", job_of(a_state(step)))
    chain.remove(tmp_path / "1.ckpt")
    chain.remove(tmp_path / "0.ckpt")
    assert not [path.name for path in tmp_path.iterdir()]
    assert not chain.notes


@pytest.mark.parametrize("exact", [0, 2])
def test_others_may_be_exact_or_none(tmp_path: Path, exact: int) -> None:
    chain = Chain(ChainOptions(config=KMeans(levels=8), exact=exact, jobs=1))
    for step in range(4):
        chain.write(tmp_path / f"{step}.ckpt", job_of(a_state(step)))
        chain.settle()
    is_exact = [same(read_newest(tmp_path / f"{step}.ckpt"), a_state(step)) for step in range(4)]
    assert is_exact == ([False] * 4 if not exact else [False, False, True, True])
    with pytest.raises(ConfigError, match="exact must be at least 0"):
        ChainOptions(exact=-1)


@pytest.mark.parametrize("exact", [0, 1])
def test_an_average_keeps_its_movement_in_each_of_several_restarts(tmp_path: Path, exact: int) -> None:
    """It follows the weights, so it also moves back by a part of the error of its last rounding."""
    generator, shares = torch.Generator().manual_seed(0), list[float]()
    weight, average = torch.randn(2, 64, 256, generator=generator)
    for step in range(6):
        chain, path = Chain(ChainOptions(config=Grid(), exact=exact, jobs=1)), tmp_path / f"{step}.ckpt"
        if step:
            average = read_newest(before := tmp_path / f"{step - 1}.ckpt")["weight"]
            chain.resume_from(before)
        weight = weight + 0.1 * torch.randn(64, 256, generator=generator)
        moved = 0.1 * (weight - average)
        chain.write(path, job_of({"weight": average + moved, "step": step}))
        kept = load_state(path)["weight"] - average
        shares.append(float((kept * moved).sum() / moved.square().sum()))
    assert shares == pytest.approx([1] * 6, abs=0.1)


def test_lossless_files_have_no_residual(tmp_path: Path) -> None:
    Chain(ChainOptions(jobs=1)).write(tmp_path / "0.ckpt", job_of(a_state(0)))
    assert not residuals(tmp_path)


@pytest.mark.parametrize("content", [b"", b"no file of ours at all", None])
def test_a_wrong_residual_causes_a_warning(tmp_path: Path, content: bytes | None) -> None:
    chain = Chain(OPTIONS)
    for step in range(2):
        chain.write(tmp_path / f"{step}.ckpt", job_of(a_state(step)))
    other, [residual] = residuals(tmp_path)[0], residuals(tmp_path)[1:]
    residual.write_bytes(other.read_bytes()[:-20] if content is None else content)
    with pytest.warns(RuntimeWarning, match="is restored with what it loses"):
        newest = read_newest(tmp_path / "1.ckpt")
    assert same(newest, load_state(tmp_path / "1.ckpt"))


# --- folders of shards ----------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [0, 1, 2])
def test_the_newest_folders_of_shards_are_exact(tmp_path: Path, exact: int) -> None:
    options = ChainOptions(config=KMeans(levels=8), exact=exact, jobs=1)
    writer = CkptzStorageWriter(options=options, keep_last=3)
    for step in range(3):
        dcp.save(a_state(step), checkpoint_id=tmp_path / f"step-{step}", storage_writer=writer, no_dist=True)
    for step in range(3):
        folder = tmp_path / f"step-{step}"
        assert same(loaded(folder), a_state(step)) == (step > 2 - exact)
        assert len(residuals(folder)) == (step > 2 - exact)


def test_a_folder_of_shards_without_its_residual_is_read_with_its_loss(tmp_path: Path) -> None:
    writer = CkptzStorageWriter(options=OPTIONS, keep_last=2)
    dcp.save(a_state(1), checkpoint_id=tmp_path / "step-1", storage_writer=writer, no_dist=True)
    [residual] = residuals(tmp_path / "step-1")
    residual.write_bytes(residual.read_bytes()[:-9])
    with pytest.warns(RuntimeWarning, match="is restored with what it loses"):
        assert not same(loaded(tmp_path / "step-1"), a_state(1))


def test_a_folder_that_cannot_be_listed_when_it_is_tidied_keeps_what_makes_it_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A glob returns nothing for a folder that cannot be listed, as for an empty folder."""
    scandir, refused = os.scandir, []

    def refuse_once(path: Any = ".") -> Any:
        if (tmp_path / "step-1" / "ckptz-index.json").exists() and not refused:
            refused.append(path)
            raise PermissionError(13, "permission denied")
        return scandir(path)

    writer = CkptzStorageWriter(options=OPTIONS, keep_last=2)
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the problem is reported
        patch.setattr(os, "scandir", refuse_once)
        dcp.save(a_state(1), checkpoint_id=tmp_path / "step-1", storage_writer=writer, no_dist=True)
    assert refused
    assert same(loaded(tmp_path / "step-1"), a_state(1))


def loaded(folder: Path) -> dict[str, Any]:
    state = {"weight": torch.zeros(80, 80), "step": 0}
    dcp.load(state, storage_reader=CkptzStorageReader(folder, jobs=1), no_dist=True)
    return state
