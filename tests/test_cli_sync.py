"""`ckptz fold`, `apply` and `export` on the command line, and the example."""

from __future__ import annotations

import os
import re
import resource
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_support import a_state, ckptz, content_of, temporaries, write_plain

ROOT = Path(__file__).parent.parent
N_STEPS = 4


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Plain checkpoints of four steps, and the chain that they make, each with its step."""
    folder = tmp_path / "run"
    folder.mkdir()
    for step in range(N_STEPS):
        write_plain(folder / f"{step}.safetensors", a_state(drift=0.001 * step), {"format": "pt"})
        base = ("--base", folder / f"{step - 1}.ckptz") if step else ()
        ckptz("compress", folder / f"{step}.safetensors", *base, "--step", step, "--jobs", 1)
    return folder


def same(a: Path, b: Path) -> bool:
    return content_of(a) == content_of(b)


# --- fold ---------------------------------------------------------------------------------------


def test_a_fold_leads_straight_from_one_step_to_another(run: Path, tmp_path: Path) -> None:
    done = ckptz("fold", f"{run / '1.ckptz'}..3.ckptz", "-o", run / "fold.ckptz", "--json").json
    assert (done["step"], Path(done["base"]).name) == (3, "1.ckptz")
    assert same(run / "fold.ckptz", run / "3.safetensors")
    ckptz("apply", run / "fold.ckptz", "--to", run / "1.safetensors", "-o", tmp_path / "3.safetensors")
    assert same(tmp_path / "3.safetensors", run / "3.safetensors")
    for name in ("0.ckptz", "2.ckptz", "3.ckptz"):
        (run / name).unlink()  # a plain file of step 0 is still there, and serves as base
    ckptz("verify", run / "fold.ckptz", "--against", run / "3.safetensors")


def test_steps_are_found_by_number(run: Path) -> None:
    ckptz("fold", "0..2", "--folder", run, "-o", run / "by-number.ckptz")
    ckptz("fold", f"{run / '0.ckptz'}..{run / '2.ckptz'}", "-o", run / "by-name.ckptz")
    assert (run / "by-number.ckptz").read_bytes() == (run / "by-name.ckptz").read_bytes()
    out = ckptz("fold", "1..3", "--folder", run, "-o", run / "out.ckptz").stdout
    assert "out.ckptz: step 3, " in out
    assert "1.ckptz" in out


def test_names_with_dots_are_no_obstacle(run: Path, tmp_path: Path) -> None:
    odd = tmp_path / "a..b"
    run.rename(odd)
    ckptz("fold", f"{odd / '0.ckptz'}..{odd / '2.ckptz'}", "-o", tmp_path / "out.ckptz")
    assert same_after_apply(odd / "0.safetensors", tmp_path / "out.ckptz", odd / "2.safetensors")


def same_after_apply(base: Path, delta: Path, wanted: Path) -> bool:
    out = delta.with_name("applied.safetensors")
    ckptz("apply", delta, "--to", base, "-o", out, "--force")
    return same(out, wanted)


def test_plain_files_may_be_folded(run: Path) -> None:
    ckptz("fold", f"{run / '0.safetensors'}..{run / '1.safetensors'}", "-o", run / "out.ckptz")
    assert same_after_apply(run / "0.safetensors", run / "out.ckptz", run / "1.safetensors")


def test_ranges_that_are_none(run: Path) -> None:
    for text in ("0", "0..", "..3", "0..9", f"{run / '0.ckptz'}..nowhere.ckptz", "x..y"):
        failed = ckptz("fold", text, "--folder", run, "-o", run / "out.ckptz", fails=True)
        assert failed.exit_code == 2
        assert not (run / "out.ckptz").exists()
    assert "records step 9" in ckptz("fold", "0..9", "--folder", run, "-o", run / "x.ckptz", fails=True).error


def test_a_fold_over_a_missing_file(run: Path) -> None:
    (run / "1.ckptz").unlink()
    (run / "1.safetensors").unlink()
    failed = ckptz("fold", "0..2", "--folder", run, "-o", run / "out.ckptz", fails=True)
    assert (failed.exit_code, "1.ckptz" in failed.error) == (5, True)


def test_an_output_is_not_lost(run: Path) -> None:
    before = (run / "3.ckptz").read_bytes()
    for output in ("1.ckptz", "3.ckptz"):
        failed = ckptz("fold", "1..3", "--folder", run, "-o", run / output, "--force", fails=True)
        assert (failed.exit_code, "would replace a file that is read" in failed.error) == (2, True)
    failed = ckptz("fold", "0..1", "--folder", run, "-o", run / "3.ckptz", fails=True)
    assert "exists already" in failed.error
    failed = ckptz(
        "apply", run / "1.ckptz", "--to", run / "0.safetensors", "-o", run / "new.ckptz", fails=True
    )
    assert "apply writes .safetensors files" in failed.error
    assert (run / "3.ckptz").read_bytes() == before


# --- export -------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".ckptz", ".safetensors"])
def test_an_export_needs_no_other_file(run: Path, tmp_path: Path, suffix: str) -> None:
    (tmp_path / "alone").mkdir()
    out = tmp_path / "alone" / f"out{suffix}"
    done = ckptz("export", 2, "--folder", run, "-o", out, "--json").json
    assert (done["step"], done["base"], done["n_deltas"]) == (2, None, 0)
    assert done["stored_bytes"] == out.stat().st_size
    assert same(out, run / "2.safetensors")
    ckptz("export", run / "2.ckptz", "-o", out, "--force")
    assert same(out, run / "2.safetensors")


def test_exports_that_are_refused(run: Path) -> None:
    assert ckptz("export", 2, "--folder", run, "-o", run / "out.pt", fails=True).exit_code == 2
    assert ckptz("export", 7, "--folder", run, "-o", run / "out.ckptz", fails=True).exit_code == 2
    assert ckptz("export", run / "no.ckptz", "-o", run / "out.ckptz", fails=True).exit_code == 5
    assert (
        "would replace"
        in ckptz("export", run / "2.ckptz", "-o", run / "1.ckptz", "--force", fails=True).error
    )


def test_of_several_files_of_a_step_the_one_that_stands_alone_is_taken(run: Path, tmp_path: Path) -> None:
    ckptz("export", 3, "--folder", run, "-o", run / "alone.ckptz")
    done = ckptz("export", 3, "--folder", run, "-o", tmp_path / "out.safetensors", "--json").json
    assert Path(done["input"]).name == "alone.ckptz"


# --- apply --------------------------------------------------------------------------------------


def test_apply_writes_the_next_checkpoint(run: Path, tmp_path: Path) -> None:
    current = tmp_path / "model.safetensors"
    current.write_bytes((run / "0.safetensors").read_bytes())
    current.chmod(0o640)
    for step in range(1, N_STEPS):
        done = ckptz("apply", run / f"{step}.ckptz", "--to", current, "--in-place", "--json").json
        assert same(current, run / f"{step}.safetensors")
        assert (done["step"], done["output"], done["base"]) == (step, str(current), str(current))
    assert stat.S_IMODE(current.stat().st_mode) == 0o640
    assert not temporaries(tmp_path)


def test_apply_takes_a_compressed_base_too(run: Path) -> None:
    out = run / "out.safetensors"
    said = ckptz("apply", run / "2.ckptz", "--to", run / "1.ckptz", "-o", out).stdout
    assert "all checksums match" in said
    assert same(out, run / "2.safetensors")


def test_a_delta_for_another_base_or_applied_twice(run: Path) -> None:
    for base, message in (("0", "has content id .* was made from .* '1.ckptz'"), ("2", "applied before")):
        before = (run / f"{base}.safetensors").read_bytes()
        failed = ckptz(
            "apply", run / "2.ckptz", "--to", run / f"{base}.safetensors", "--in-place", fails=True
        )
        assert failed.exit_code == 5
        assert re.search(message, failed.error)
        assert (run / f"{base}.safetensors").read_bytes() == before
    assert not temporaries(run)


def test_a_tensor_of_another_dtype_or_shape(run: Path) -> None:
    rows = a_state(drift=0.001)
    for other in (("F16", (3000,), rows["layer.half"][2]), ("BF16", (3, 1000), rows["layer.half"][2])):
        model = write_plain(run / "model.safetensors", rows | {"layer.half": other})
        before = model.read_bytes()
        assert ckptz("apply", run / "2.ckptz", "--to", model, "--in-place", fails=True).exit_code == 5
        assert model.read_bytes() == before


def test_the_metadata_is_kept(run: Path) -> None:
    for step in (0, 1):  # the delta has none of its own
        write_plain(run / f"bare-{step}.safetensors", a_state(drift=0.001 * step))
    ckptz("compress", run / "bare-1.safetensors", "--base", run / "bare-0.safetensors")
    ckptz("apply", run / "bare-1.ckptz", "--to", run / "0.safetensors", "--in-place")
    assert content_of(run / "0.safetensors")[1] == {"format": "pt"}


def test_a_damaged_delta_leaves_the_file(run: Path) -> None:
    model, delta = run / "1.safetensors", run / "2.ckptz"
    before, raw = model.read_bytes(), delta.read_bytes()
    for position in (9, len(raw) // 3, len(raw) - 9):
        damaged = bytearray(raw)
        damaged[position] ^= 4
        delta.write_bytes(damaged)
        assert ckptz("apply", delta, "--to", model, "--in-place", fails=True).exit_code in (3, 4)
        assert model.read_bytes() == before
    assert not temporaries(run)


@pytest.mark.parametrize("verb", ["apply", "fold", "export"])
def test_a_full_disk_leaves_everything_as_it_was(run: Path, verb: str) -> None:
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    words: dict[str, tuple[Any, ...]] = {
        "apply": ("apply", run / "1.ckptz", "--to", run / "0.safetensors", "--in-place"),
        "fold": ("fold", "0..3", "--folder", run, "-o", run / "new.ckptz"),
        "export": ("export", 3, "--folder", run, "-o", run / "new.ckptz"),
    }
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        failed = ckptz(*words[verb], "--jobs", 1, fails=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert failed.exit_code == 7
    assert "file size limit" in failed.error
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_apply_says_what_it_needs(run: Path) -> None:
    neither = ckptz("apply", run / "2.ckptz", "--to", run / "1.safetensors", fails=True)
    assert (neither.exit_code, "--in-place" in neither.error) == (2, True)
    both = ("-o", run / "out.safetensors", "--in-place")
    assert ckptz("apply", run / "2.ckptz", "--to", run / "1.safetensors", *both, fails=True).exit_code == 2
    swapped = ckptz("apply", run / "1.safetensors", "--to", run / "2.ckptz", "-o", run / "o", fails=True)
    assert (swapped.exit_code, "is no delta" in swapped.error) == (3, True)
    ckptz_file = ckptz("apply", run / "2.ckptz", "--to", run / "1.ckptz", "--in-place", fails=True)
    assert (ckptz_file.exit_code, "name another with -o" in ckptz_file.error) == (2, True)
    missing = ckptz("apply", run / "2.ckptz", "--to", run / "no.safetensors", "--in-place", fails=True)
    assert missing.exit_code == 5


# --- the example --------------------------------------------------------------------------------


@pytest.mark.apps
def test_the_example_ends_with_the_same_weights_everywhere(tmp_path: Path) -> None:
    script = ROOT / "examples" / "weight_sync.py"
    assert len(script.read_text().splitlines()) < 80
    command = [sys.executable, script, tmp_path / "weights"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    held = re.findall(r"^(trainer|engine 0|engine 1) +holds ([\d.]+)$", done.stdout, re.MULTILINE)
    assert sorted(name for name, _ in held) == ["engine 0", "engine 1", "trainer"]
    assert len({total for _, total in held}) == 1
    assert "step-000005.ckptz" in {path.name for path in (tmp_path / "weights").iterdir()}
