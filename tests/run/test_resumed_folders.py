"""Folders that are compressed with --resume after a kill at any point, and verify of their linked bases."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ckptz import compress, restore
from ckptz.errors import ConfigError
from tests.support.cli_support import a_state, ckptz, content_of, hf_folder, temporaries, write_plain
from tests.support.kills import killed_after

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def two_steps(folder: Path) -> list[Path]:
    """Write two checkpoint folders, with other files in addition to tensors."""
    sources = [folder / f"checkpoint-{i}" for i in (1, 2)]
    for i, source in enumerate(sources):
        (source / "sub").mkdir(parents=True)
        write_plain(source / "model.safetensors", a_state(drift=i / 1000, n=2000))
        (source / "config.json").write_text("{}")
        (source / "sub" / "vocab.txt").write_text(f"step {i}")
    return sources


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def resumed_everywhere(folder: Path, work: Callable[[Path, bool], object]) -> int:
    """Kill `work` on a new folder at each point, resume it, and compare with an uninterrupted run.

    Returns the number of points.
    """
    work(folder / "whole", False)
    expected, n_points = contents(folder / "whole"), 0
    while killed_after(n_points, partial(work, out := folder / f"after-{n_points}", False)):
        work(out, True)
        assert contents(out) == expected
        assert temporaries(out) == []
        n_points += 1
    return n_points


def test_a_chain_of_folders_is_resumed_after_a_kill_at_any_point(tmp_path: Path) -> None:
    sources = [hf_folder(tmp_path / "checkpoint-0"), two_steps(tmp_path)[1]]
    n_points = resumed_everywhere(
        tmp_path, lambda out, on: compress(sources, out, chain=True, jobs=1, resume=on)
    )
    assert n_points > 16
    for source in sources:
        restore(tmp_path / "after-9" / source.name, tmp_path / f"back-{source.name}", jobs=1)
        assert contents(tmp_path / f"back-{source.name}") == contents(source)


def test_a_file_that_is_no_copy_is_refused_and_kept(tmp_path: Path) -> None:
    source, out = hf_folder(tmp_path / "hf"), tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("mine")
    with pytest.raises(ConfigError, match=r"config\.json: exists already; name another folder, or remove it"):
        compress(source, out, resume=True)
    assert contents(out) == {"config.json": b"mine"}


# --- verify FOLDER --against ORIGINAL ---------------------------------------------------------------


def test_linked_bases_are_not_compared_with_the_original(tmp_path: Path) -> None:
    sources = two_steps(tmp_path)
    compress(sources, tmp_path / "run", chain=True)
    second = tmp_path / "run" / sources[1].name
    assert len(list(second.glob("*.ckptz"))) == 2
    base, delta = ckptz("verify", second, "--against", sources[1]).stdout.splitlines()
    assert "bit for bit" not in base
    assert f"tensors identical to {sources[1]}" in delta
    run = ckptz("verify", second, "--against", sources[0], fails=True)
    assert "differs" in run.error


def test_bases_of_linked_bases_are_not_compared_either(tmp_path: Path) -> None:
    steps = [write_plain(tmp_path / f"step-{i}.safetensors", a_state(drift=i / 1000)) for i in range(3)]
    compress(steps[:2], tmp_path / "run", chain=True)
    folder = tmp_path / "folder"
    folder.mkdir()
    write_plain(folder / "model.safetensors", a_state(drift=0.002))
    compress(folder, tmp_path / "out", base=tmp_path / "run" / "step-1.ckptz")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "step-0.ckptz" in names
    assert len(names) == 3
    ckptz("verify", tmp_path / "out", "--against", folder)
    assert content_of(tmp_path / "out" / "model.ckptz") == content_of(folder / "model.safetensors")


def test_a_damaged_base_is_still_a_failure(tmp_path: Path) -> None:
    sources = two_steps(tmp_path)
    compress(sources, tmp_path / "run", chain=True)
    second = tmp_path / "run" / sources[1].name
    [base] = second.glob("base-*.ckptz")
    data = bytearray(base.read_bytes())
    data[len(data) // 2] ^= 1
    base.write_bytes(data)
    assert ckptz("verify", second, "--against", sources[1], fails=True).exit_code == 3
