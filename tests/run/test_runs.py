"""Folders of checkpoints from all writers: their steps, and verbs on them."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptz as library
from ckptz import KeepPolicy, compress, inspect, log, prune
from ckptz.errors import ConfigError
from ckptz.format.publish import publish
from ckptz.numpy import save_file
from ckptz.run.names import step_of
from tests.support.cli_support import a_state, ckptz, content_of, hf_folder, temporaries, write_plain

STEPS = (8, 9, 10, 11)
DIES = """
import os, sys
from pathlib import Path
from ckptz.format.publish import publish
held = [publish(Path(name)) for name in sys.argv[1:]]
for one in held:
    sink = one.__enter__()
    sink.write(b"half of it")
    sink.flush()
os._exit(0)
"""


def plain(folder: Path, steps: tuple[int, ...] = STEPS, name: str = "step-{}.safetensors") -> list[Path]:
    """Write plain checkpoints of some steps and return their paths."""
    states = ((step, a_state(drift=0.001 * step, n=500)) for step in steps)
    return [write_plain(folder / name.format(step), state) for step, state in states]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Compress four steps, named in the order of a shell, to a chain and return its folder."""
    files = sorted(plain(tmp_path))
    ckptz("compress", *files, "--chain", "-o", tmp_path / "run", "--jobs", 1)
    for file in files:
        file.unlink()
    return tmp_path / "run"


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


# --- steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "step"),
    [
        *(("step-200.safetensors", 200), ("model_step_0100.pt", 100), ("epoch=1-step=20.ckpt", 20)),
        *(("checkpoint-500", 500), ("checkpoint-500/model.safetensors", 500), ("global_step100/x.pt", 100)),
        *(("iter_0001000", 1000), ("run/step5.ckptz", 5), ("checkpoint-7/step-8.ckptz", 8)),
        *(("model.safetensors", None), ("model-00001-of-00002.safetensors", None), ("footstep-3.pt", None)),
        *(("7.ckptz", None), ("my-step-3-runs/model.ckptz", None), ("step-.ckptz", None)),
    ],
)
def test_names_have_steps(path: str, step: int | None) -> None:
    assert step_of(Path("/data") / path) == step


def test_the_step_comes_from_the_option_the_metadata_or_the_name(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, str] | None, int | None, int]] = [
        *((({"step": "3"}, 5, 5)), ({"step": "3"}, None, 3), ({"global_step": "4"}, None, 4)),
        *(({"step": "three"}, None, 9), (None, None, 9)),
    ]
    for metadata, option, expected in cases:
        file = write_plain(tmp_path / "step-9.safetensors", a_state(n=100), metadata)
        [report] = compress(file, tmp_path / "out.ckptz", step=option, force=True)
        assert (report.step, inspect(report.output).step) == (expected, expected)
    [second] = compress(tmp_path / "out.ckptz", tmp_path / "step-77.ckptz")
    assert second.step == 9  # the step that a .ckptz file records is kept


def test_a_series_of_numbers_is_one_of_steps(tmp_path: Path) -> None:
    states = {number: a_state(n=100) for number in ("0990", "1000", "0010")}
    files = [write_plain(tmp_path / f"gpt-{number}.safetensors", state) for number, state in states.items()]
    reports = compress(files, tmp_path / "run", chain=True)
    assert [(report.step, report.depth) for report in reports] == [(10, 0), (990, 1), (1000, 2)]
    assert not any("given order" in note for report in reports for note in report.notes)
    [single] = compress(files[1])
    assert single.step is None, "a number may be anything, as that of a version"


@pytest.mark.parametrize("config", [library.LOSSLESS, library.KMeans(min_elements=1)], ids=lambda c: c.name)
def test_a_killed_chain_resumes(config: Any, tmp_path: Path) -> None:
    sources = plain(tmp_path, (1, 2, 3))
    compress(sources, tmp_path / "whole", config=config, chain=True)
    expected = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    cut = tmp_path / "cut"
    cut.mkdir()
    compress(sources[0], cut / "step-1.ckptz", config=config)
    reports = compress(sources, cut, config=config, chain=True, resume=True)
    assert [Path(report.output).name for report in reports] == ["step-2.ckptz", "step-3.ckptz"]
    assert {path.name: path.read_bytes() for path in cut.iterdir()} == expected
    assert compress(sources, cut, config=config, chain=True, resume=True) == ()
    result = ckptz("compress", *sources, "--chain", "--resume", "-o", cut)
    assert "3 of 3 outputs existed and were kept" in result.stderr


def test_a_chain_does_not_resume_over_outputs_of_other_inputs(tmp_path: Path) -> None:
    first, second = plain(tmp_path, (1, 2))
    output = tmp_path / "step-1.ckptz"
    compress(first, output)
    os.utime(first, (2**32, 2**32))
    with pytest.raises(ConfigError, match=r"step-1\.ckptz: was not made from .*1\.safetensors"):
        compress(first, output, resume=True)
    with pytest.raises(ConfigError, match="leave out force"):
        compress(second, output, resume=True, force=True)


def test_files_that_record_no_step_have_that_of_their_name(tmp_path: Path) -> None:
    for step, file in zip(STEPS, plain(tmp_path, name="{}.safetensors"), strict=True):
        ckptz("compress", file, "-o", tmp_path / f"step-{step}.ckptz")
    assert inspect(tmp_path / "step-9.ckptz").step is None
    assert [entry.step for entry in log(tmp_path).entries] == list(STEPS)
    ckptz("restore", f"{tmp_path}@10", "-o", tmp_path / "back.safetensors")
    assert content_of(tmp_path / "back.safetensors") == content_of(tmp_path / "step-10.ckptz")


# --- chains of compress ---------------------------------------------------------------------------


def test_a_chain_is_pruned_but_for_what_is_needed(run: Path) -> None:
    before = content_of(run / "step-9.ckptz")
    report = prune(run, KeepPolicy(last=1))
    assert (report.steps, report.removed, len(report.hidden)) == ((11,), (), 3)
    assert ckptz("prune", run, "--after", 9, "--dry-run").stdout.count("would remove step-1") == 2
    report = prune(run, after=9)
    assert (report.steps, report.removed) == ((8, 9), ("step-11.ckptz", "step-10.ckptz"))
    assert names(run) == ["step-8.ckptz", "step-9.ckptz"]
    assert report.kept_bytes == sum(path.stat().st_size for path in run.iterdir())
    assert content_of(run / "step-9.ckptz") == before


def test_a_prune_tells_folders_from_files(run: Path, tmp_path: Path) -> None:
    model = write_plain(tmp_path / "model.safetensors", a_state())
    for step in (1, 2):
        (tmp_path / "of-folders" / f"checkpoint-{step}").mkdir(parents=True)
        ckptz("compress", model, "-o", tmp_path / "of-folders" / f"checkpoint-{step}")
    line = ckptz("prune", tmp_path / "of-folders", "--keep-last", 1).stdout
    assert "removed 1 folder, " in line
    assert "would remove 2 files, " in ckptz("prune", run, "--after", 9, "--dry-run").stdout


def test_a_rebased_file_frees_its_chain(run: Path) -> None:
    before = content_of(run / "step-11.ckptz")
    ckptz("rebase", run / "step-11.ckptz")
    assert ckptz("prune", run, "--keep-last", 1, "--json").json["steps"] == [11]
    assert names(run) == ["step-11.ckptz"]
    assert content_of(run / "step-11.ckptz") == before


def test_what_a_file_without_a_step_needs_stays_when_later_steps_go(run: Path, tmp_path: Path) -> None:
    state = a_state(drift=0.0112, n=500)
    ckptz("compress", write_plain(tmp_path / "other.safetensors", state), "--base", run / "step-11.ckptz")
    (tmp_path / "other.ckptz").rename(run / "other.ckptz")
    before = content_of(run / "other.ckptz")
    report = prune(run, after=9)
    assert (report.steps, report.removed) == ((8, 9), ())
    assert report.hidden == ("step-10.ckptz", "step-11.ckptz")
    assert content_of(run / "other.ckptz") == before


def test_what_a_link_leads_to_stays(tmp_path: Path) -> None:
    for step in STEPS:
        save_file({"weight": np.full(9, step)}, tmp_path / f"step-{step}.ckptz")
    (tmp_path / "latest.ckptz").symlink_to("step-9.ckptz")
    (tmp_path / "step-12.ckptz").symlink_to("step-10.ckptz")
    (tmp_path / "step-7.ckptz").symlink_to(tmp_path / "elsewhere" / "gone.ckptz")
    before = content_of(tmp_path / "step-12.ckptz")
    assert prune(tmp_path, KeepPolicy(last=1)).removed == ("step-11.ckptz", "step-8.ckptz")
    assert content_of(tmp_path / "step-12.ckptz") == before


def test_of_a_folder_that_was_moved_away_and_linked_the_link_goes(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / f"run/checkpoint-{step}").mkdir(parents=True)
        file = write_plain(tmp_path / "model.safetensors", a_state(n=100))
        ckptz("compress", file, "-o", tmp_path / f"run/checkpoint-{step}/model.ckptz")
    moved = (tmp_path / "run/checkpoint-1").rename(tmp_path / "archived")
    (tmp_path / "run/checkpoint-1").symlink_to(moved)
    assert prune(tmp_path / "run", KeepPolicy(last=1)).removed == ("checkpoint-1",)
    assert names(moved) == ["model.ckptz"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint-2"]


def test_what_has_no_step_or_cannot_be_read_stays(run: Path) -> None:
    with pytest.raises(ConfigError, match="whole checkpoints"):
        prune(run, KeepPolicy(weights=KeepPolicy()))
    (run / "step-10.ckptz").write_bytes(b"damaged")
    ckptz("compress", write_plain(run / "other.safetensors", a_state(n=100)))
    before = names(run)
    report = prune(run, KeepPolicy(last=1))
    assert report.removed == ()
    assert "step-10.ckptz cannot be read" in report.notes[0]
    with pytest.raises(ConfigError, match=r"step-10.ckptz cannot be read, so the steps after 10 stay"):
        prune(run, after=10)
    assert names(run) == before


# --- folders of the Trainer and Lightning -----------------------------------------------------------


def linked(folder: Path, path_of_step: Callable[[int], Path]) -> list[Path]:
    """Write a chain as the adapters do: deltas of the previous file, which is linked next to each."""
    import torch

    from ckptz.integrations.linked import Chain, job_of

    chain, paths = Chain(), []
    weights = torch.linspace(-1, 1, 4000)
    for step in STEPS:
        paths.append(folder / path_of_step(step))
        chain.write(paths[-1], job_of({"model": weights + step * 1e-5, "step": step}))
    return paths


KINDS: dict[str, Callable[[int], Path]] = {
    "trainer": lambda step: Path(f"checkpoint-{step}/model.ckptz"),
    "lightning": lambda step: Path(f"epoch=0-step={step}.ckpt"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_runs_of_frameworks_are_listed_restored_and_pruned(kind: str, tmp_path: Path) -> None:
    paths = linked(tmp_path, KINDS[kind])
    contents = [content_of(path) for path in paths]
    seen = [(e.file, e.step) for e in log(tmp_path).entries]
    assert seen == [(path.relative_to(tmp_path).as_posix(), s) for path, s in zip(paths, STEPS, strict=True)]
    assert log(tmp_path).stored_bytes == sum(path.stat().st_size for path in paths)
    ckptz("restore", f"{tmp_path}@10", "-o", tmp_path / "back.pt")
    assert content_of(tmp_path / "back.pt")[0] == contents[2][0]
    (tmp_path / "back.pt").unlink()
    assert inspect(tmp_path).file == str(paths[-1])
    assert inspect(f"{tmp_path}@9").file == str(paths[1])
    checked = {line.partition(": ok")[0] for line in ckptz("verify", tmp_path).stdout.splitlines()}
    assert checked == {str(tmp_path / entry.file) for entry in log(tmp_path).entries}
    assert ckptz("diff", paths[-1], tmp_path, "--exit-code").exit_code == 0
    report = prune(tmp_path, KeepPolicy(last=2))
    assert report.steps == (10, 11)
    assert not any(path.exists() for path in paths[:2])
    assert [content_of(path) for path in paths[2:]] == contents[2:]
    assert [entry.is_hidden for entry in log(tmp_path).entries].count(False) == 2
    inodes = {os.stat(path).st_ino: os.stat(path).st_size for path in tmp_path.rglob("*") if path.is_file()}
    assert report.kept_bytes == sum(inodes.values())


def test_what_killed_writers_left_in_a_run_goes_with_prune(tmp_path: Path) -> None:
    paths = linked(tmp_path, KINDS["trainer"])
    targets = (paths[-1], tmp_path / "x.ckptz")
    subprocess.run([sys.executable, "-c", DIES, *targets], check=True)
    left = temporaries(tmp_path)
    assert len(left) == 2
    report = prune(tmp_path, dry_run=True)
    assert sorted(report.removed) == sorted(path.relative_to(tmp_path).as_posix() for path in left)
    assert report.removed_bytes == sum(path.stat().st_size for path in left) > 0
    assert temporaries(tmp_path) == left
    damaged, content = paths[-1], paths[-1].read_bytes()
    damaged.write_bytes(b"damaged")
    assert prune(tmp_path, KeepPolicy(last=1), dry_run=True).removed == report.removed
    damaged.write_bytes(content)
    with publish(tmp_path / "y.ckptz"):  # of a running writer
        prune(tmp_path)
        assert len(temporaries(tmp_path)) == 1
    assert all(path.exists() for path in paths)


def test_torch_files_beside_are_no_checkpoints_of_ours(tmp_path: Path) -> None:
    linked(tmp_path, KINDS["lightning"])
    (tmp_path / "epoch=0-step=7.ckpt").write_bytes(b"PK\x03\x04" + bytes(50))
    assert len(log(tmp_path).entries) == len(STEPS)
    assert "epoch=0-step=7.ckpt" not in prune(tmp_path, KeepPolicy(last=1)).removed


# --- one step ---------------------------------------------------------------------------------------


def test_a_step_of_packed_folders_is_restored_as_a_folder(tmp_path: Path) -> None:
    folders = []
    for step in (60, 120):
        folders.append(tmp_path / f"checkpoint-{step}")
        folders[-1].mkdir()
        write_plain(folders[-1] / "model.safetensors", a_state(drift=0.001 * step))
        (folders[-1] / "config.json").write_text("{}")
    ckptz("compress", *folders, "--chain", "-o", tmp_path / "packed")
    ckptz("restore", f"{tmp_path / 'packed'}@120", "-o", tmp_path / "back")
    assert names(tmp_path / "back") == ["config.json", "model.safetensors"]
    for name in names(tmp_path / "back"):
        assert (tmp_path / "back" / name).read_bytes() == (folders[1] / name).read_bytes()


def test_of_several_files_of_a_step_the_one_that_stands_alone_is_taken(run: Path, tmp_path: Path) -> None:
    ckptz("rebase", run / "step-10.ckptz", "-o", run / "alone.ckptz")
    report = ckptz("restore", f"{run}@10", "-o", tmp_path / "out.safetensors", "--json").json
    assert Path(report["input"]).name == "alone.ckptz"
    assert content_of(tmp_path / "out.safetensors") == content_of(run / "step-10.ckptz")


def test_the_exact_weights_of_a_lossy_step_are_restored_by_its_name(tmp_path: Path) -> None:
    from ckptz.integrations.linked import Chain, ChainOptions, job_of

    folder = tmp_path / "checkpoint-7"
    folder.mkdir()
    weights = {"w": np.linspace(0, 1, 4096, dtype=np.float32).reshape(64, 64)}
    for name in ("model", "state"):
        chain = Chain(ChainOptions(config=library.KMeans(levels=4, min_elements=1)))
        chain.write(folder / f"{name}.ckptz", job_of(weights, 7))
    result = ckptz("restore", f"{tmp_path}@7", "--to", "safetensors", "-o", f"{tmp_path}/back/")
    assert "the output has only the weights; other files of the step: state.ckptz" in result.stderr
    [(_, (_, _, data))] = content_of(tmp_path / "back" / "model.safetensors")[0]
    assert data == weights["w"].tobytes()


def test_a_file_whose_name_looks_like_a_step_is_a_file(run: Path, tmp_path: Path) -> None:
    (run / "step-8.ckptz").rename(tmp_path / "model@8")
    assert inspect(tmp_path / "model@8").step == 8


# --- folders instead of files -----------------------------------------------------------------------


def test_a_folder_is_compared_with_what_it_was_packed_to(tmp_path: Path) -> None:
    folder, packed = hf_folder(tmp_path / "hf"), tmp_path / "packed"
    packed.mkdir()
    ckptz("compress", folder, "-o", packed)
    assert library.diff(folder, packed).is_equal
    assert library.diff(packed, folder).is_equal
    assert inspect(packed).shards == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    assert ckptz("inspect", packed).stdout == ckptz("inspect", packed / "model.ckptz").stdout
