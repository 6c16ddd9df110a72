"""Symbolic links to deltas: every reader finds bases in the folders of the link and of its target."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptz as package
from ckptz.codec.grid import Grid
from ckptz.errors import MissingBaseError
from ckptz.integrations.dcp import ChainOptions, CkptzStorageReader, CkptzStorageWriter
from ckptz.sync import Follower
from ckptz.torch import load_file, load_state
from tests.support.checkpointer_support import Run, same, saved_run, state_of
from tests.support.cli_support import Chain, ckptz, content_of, hf_folder
from tests.support.sync_support import a_state as a_live_state
from tests.support.sync_support import cloned, published


@pytest.fixture
def link(chain: Chain) -> Path:
    """Return a link in another folder, via a second link, to a delta whose plain files were deleted."""
    for name in ("links", "more"):
        (chain.folder.parent / name).mkdir()
    shutil.move(chain.second, chain.folder.parent / "original.safetensors")
    chain.first.unlink()
    newest = chain.folder.parent / "more" / "newest.ckptz"
    newest.symlink_to("../run/step-2.ckptz")
    latest = chain.folder.parent / "links" / "latest.ckptz"
    latest.symlink_to("../more/newest.ckptz")
    return latest


def weight_in(path: Path) -> Any:
    with package.safe_open(path, framework="np") as file:
        return file.get_tensor("layer.weight")


READERS: dict[str, Callable[[Path], object]] = {
    "numpy": weight_in,
    "torch": lambda path: load_file(path)["layer.half"],
    "state": lambda path: load_state(path),
    "inspect": lambda path: str(package.inspect(path).chain[0].path).index("step-1.ckptz"),
    "verify": lambda path: ckptz("verify", path, "--against", path.parent.parent / "original.safetensors"),
    "diff": lambda path: ckptz("diff", path, path.parent.parent / "original.safetensors", "--exit-code"),
    "report": lambda path: ckptz("report", path, "-o", path.with_name("page.html")),
    "rebase": lambda path: ckptz("rebase", path, "-o", path.with_name("alone.ckptz")),
    "compress": lambda path: ckptz("compress", path, "-o", path.with_name("again.ckptz")),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_finds_the_base_beside_the_target_of_a_link(reader: str, link: Path) -> None:
    READERS[reader](link)


def test_a_link_restores_to_the_original(link: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(link.parent)
    ckptz("restore", link.name)
    assert content_of(Path("latest.safetensors")) == content_of(Path("../original.safetensors"))


def test_a_base_beside_the_link_serves_too(link: Path) -> None:
    full = link.resolve().with_name("step-1.ckptz")
    shutil.move(full, link.with_name("any-name.ckptz"))
    content_of(link)
    link.with_name("any-name.ckptz").unlink()
    with pytest.raises(MissingBaseError, match=r"latest\.ckptz: its base 'step-1\.ckptz"):
        content_of(link)


def test_a_base_may_be_a_link_whose_own_base_is_beside_its_target(link: Path) -> None:
    last = link.with_name("third.ckptz")
    original = link.parent.parent / "original.safetensors"
    ckptz("compress", original, "--base", link, "-o", last)
    content = content_of(last)
    assert content == content_of(original)
    listed = ckptz("log", link.parent)
    assert "missing" not in listed.stdout
    assert "step-1.ckptz" in listed.stdout


def test_an_output_beside_the_target_of_its_base_gets_no_advice_to_move_files(link: Path) -> None:
    out = link.resolve().with_name("third.ckptz")
    run = ckptz("compress", link.parent.parent / "original.safetensors", "--base", link, "-o", out)
    assert "to restore, put both" not in run.stderr
    content_of(out)


def test_log_of_a_folder_of_links_lists_the_bases_of_their_targets(link: Path) -> None:
    [*_, delta] = package.log(link.parent).entries
    assert (delta.file, delta.kind, delta.level) == ("latest.ckptz", "delta", 1)
    assert not ckptz("log", link.parent).stderr


def test_a_link_to_a_packed_folder_restores_all_its_files(tmp_path: Path) -> None:
    folder, (link, back) = hf_folder(tmp_path / "hf"), (tmp_path / name for name in ("model.ckptz", "back"))
    ckptz("compress", folder, "-o", tmp_path / "packed")
    link.symlink_to(tmp_path / "packed" / "model.ckptz")
    assert "not found" not in ckptz("restore", link, "-o", back).stderr
    assert (back / "sub" / "vocab.txt").read_text() == "a b c"


def linked(folder: Path, target: Path, names: list[str]) -> Path:
    """Return a folder of links to the named files in another folder."""
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to(os.path.relpath(target / name, folder))
    return folder


@pytest.mark.usefixtures("deltas_at_any_cost")
def test_a_checkpointer_restores_a_step_that_is_linked_from_another_run(tmp_path: Path) -> None:
    saved_run(tmp_path / "run", 3)
    names = [f"step-00000003{kind}.ckptz" for kind in ("", ".state")]
    assert all(package.inspect(tmp_path / "run" / name).depth for name in names)
    runs = Run(), Run(seed=1)
    for run, folder in zip(runs, ("run", "links"), strict=True):
        if folder == "links":
            linked(tmp_path / folder, tmp_path / "run", names)
        with run.checkpointer(tmp_path / folder) as checkpointer:
            assert checkpointer.restore_latest() == 3
    assert same(*map(state_of, runs))


def test_a_follower_reads_links_to_published_files(tmp_path: Path) -> None:
    states = published(tmp_path / "published", 3)
    names = [path.name for path in (tmp_path / "published").glob("step-*.ckptz")]
    live = cloned(a_live_state(9))
    assert Follower(linked(tmp_path / "links", tmp_path / "published", names)).apply_to(live).step == 2
    assert all(torch.equal(live[name], states[-1][name]) for name in states[-1])


def test_dcp_reads_a_step_whose_files_are_links(tmp_path: Path) -> None:
    state = {"weight": torch.linspace(-1, 1, 3000), "more": torch.arange(7)}
    first, target = tmp_path / "run/step-1", tmp_path / "run/step-2"
    for folder, base in ((first, None), (target, first)):
        state["weight"][0] += 1
        writer = CkptzStorageWriter(folder, options=ChainOptions(jobs=1), base=base)
        dcp.save(state, storage_writer=writer)
    bases = [path.name for path in target.iterdir() if path.name.startswith("base-")]
    assert bases
    links = linked(tmp_path / "links", target, sorted({p.name for p in target.iterdir()} - set(bases)))
    back = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(back, storage_reader=CkptzStorageReader(links))
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_second_names_of_a_linked_base_lead_to_its_file(link: Path, tmp_path: Path) -> None:
    folder, third = hf_folder(tmp_path / "hf"), tmp_path / "third"
    ckptz("compress", folder, "-o", tmp_path / "packed")
    elsewhere = tmp_path / "links" / "base.ckptz"
    elsewhere.symlink_to("../packed/model.ckptz")
    ckptz("compress", folder, "--base", elsewhere, "-o", third)
    [base] = third.glob("base-*.ckptz")
    assert not base.is_symlink()
    assert np.array_equal(base.read_bytes(), elsewhere.read_bytes())


def test_the_residual_of_a_linked_step_is_found_beside_its_target(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300)
    with package.Checkpointer(tmp_path / "run", model, config=Grid(), background=False) as checkpointer:
        checkpointer.save(3)
    names = [f"step-00000003{kind}.ckptz" for kind in ("", ".state")]
    assert list((tmp_path / "run").glob("step-00000003.exact-*.ckptz"))
    links = linked(tmp_path / "links", tmp_path / "run", names)
    ckptz("restore", f"{links}@3", "-o", tmp_path / "restored.safetensors")
    assert torch.equal(load_file(tmp_path / "restored.safetensors")["model.weight"], model.weight)
