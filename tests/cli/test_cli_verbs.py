"""compress, restore, inspect and verify on valid input: outputs, reports, help, dry runs and target sizes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import ckptz.numpy as ckptz_numpy
import ckptz.torch as ckptz_torch
from ckptz import compress, restore
from ckptz.codec.registry import METHODS
from ckptz.errors import ConfigError
from ckptz.format.index import FORMAT_VERSION
from ckptz.search import sampled
from ckptz_cli.main import main
from tests.support.cli_support import (
    Chain,
    Rows,
    a_state,
    ckptz,
    content_of,
    plain_bytes,
    write_plain,
)

# --- round trips ----------------------------------------------------------------------------------


def test_a_file_with_spaces_in_its_header_keeps_its_tensors_and_their_order(tmp_path: Path) -> None:
    data = plain_bytes(a_state(), {"a": "b"})
    n = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + n]), indent=2).encode()
    path = tmp_path / "loose.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + n :])
    ckptz("compress", path)
    ckptz("restore", tmp_path / "loose.ckptz", "-o", tmp_path / "back.safetensors")
    assert content_of(tmp_path / "back.safetensors") == content_of(path)


def test_the_bytes_do_not_depend_on_the_number_of_threads(chain: Chain) -> None:
    contents = set()
    for jobs in (1, 3):
        out, back = chain.folder / f"out-{jobs}.ckptz", chain.folder / f"back-{jobs}.safetensors"
        ckptz("compress", chain.second, "-o", out, "--base", chain.full, "--jobs", jobs)
        ckptz("restore", chain.delta, "-o", back, "--jobs", jobs)
        assert back.read_bytes() == chain.second.read_bytes()
        contents.add(out.read_bytes())
    assert len(contents) == 1


def test_a_plain_file_restores_to_torch_if_asked(chain: Chain) -> None:
    ckptz("restore", chain.full, "--to", "pt")
    back = torch.load(chain.folder / "step-1.pt", weights_only=True)
    assert torch.equal(back["counts"], torch.arange(12).reshape(3, 4))


@pytest.mark.parametrize("in_python", [False, True])
def test_an_output_that_ends_with_a_separator_is_a_folder(
    in_python: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = write_plain(tmp_path / "model.safetensors", a_state())
    if in_python:
        compress(str(model), "packed/")
        restore("packed/model.ckptz", "back/")
    else:
        ckptz("compress", model, "-o", "packed/")
        ckptz("restore", "packed/model.ckptz", "-o", "back/")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == model.read_bytes()
    with pytest.raises(ConfigError, match=r"model.safetensors: the name means a folder.*this is a file"):
        restore("packed/model.ckptz", f"{model}/")


# --- reports --------------------------------------------------------------------------------------


def test_compress_prints_sizes_ratio_and_speed(chain: Chain) -> None:
    run = ckptz("compress", chain.first, "-o", chain.folder / "again.ckptz")
    [line] = run.stdout.splitlines()
    assert "x smaller, 0." in line or "x larger, " in line
    assert all(word in line for word in ("again.ckptz", "->", "MB/s", " s,"))
    assert run.stderr == ""


def test_compress_reports_in_json(chain: Chain) -> None:
    out = chain.folder / "again.ckptz"
    run = ckptz("compress", chain.second, "-o", out, "--base", chain.full, "--set", "input.step=7", "--json")
    [report] = run.json["files"]
    n_bytes = sum(len(data) for _, _, data in a_state().values())
    assert (report["tensor_bytes"], report["stored_bytes"]) == (n_bytes, out.stat().st_size)
    assert report["ratio"] == pytest.approx(n_bytes / out.stat().st_size)
    assert (report["base"], report["depth"], report["step"]) == ("step-1.ckptz", 1, 7)
    assert 0 < report["n_deltas"] <= report["n_tensors"] == len(a_state())
    assert ckptz("inspect", out, "--json").json["step"] == 7


def test_restore_reports_in_json(chain: Chain) -> None:
    out = chain.folder / "out.safetensors"
    report = ckptz("restore", chain.delta, "-o", out, "--json").json
    assert (report["output"], report["kind"], report["depth"]) == (str(out), "safetensors", 1)
    assert report["stored_bytes"] == chain.delta.stat().st_size + chain.full.stat().st_size
    assert report["content_id"] == ckptz("inspect", chain.delta, "--json").json["content_id"]


def test_restore_reports_that_checksums_match(chain: Chain) -> None:
    [line] = ckptz("restore", chain.delta, "-o", chain.folder / "o.safetensors").stdout.splitlines()
    assert "all checksums match" in line
    assert "chain of 2 files" in line


def test_inspect_describes_a_delta(chain: Chain) -> None:
    report = ckptz("inspect", chain.delta, "--json").json
    assert (report["format_version"], report["depth"]) == ("1.0", 1)
    assert report["writer"].startswith("ckptz ")
    assert report["metadata"] == {"step": "2"}
    assert report["broken"] is None
    [member] = report["chain"]
    assert (member["file"], member["depth"], member["path"]) == ("step-1.ckptz", 0, str(chain.full))
    by_name = {tensor["name"]: tensor for tensor in report["tensors"]}
    weight = by_name["layer.half"]
    assert (weight["dtype"], weight["shape"], weight["predictor"]) == ("BF16", [3000], "base")
    assert weight["mode"] in ("xor", "difference")
    assert (weight["n_chunks"], weight["n_frames"]) == (1, 2)
    assert weight["bits_per_element"] == pytest.approx(weight["stored_bytes"] * 8 / 3000)
    assert sum(weight["coders"].values()) == pytest.approx(1)
    assert by_name["empty"]["bits_per_element"] is None
    assert sum(t["tensor_bytes"] for t in report["tensors"]) == report["tensor_bytes"]


def test_inspect_names_the_version_of_the_file() -> None:
    vector = Path(__file__).parents[2] / "spec" / "vectors" / "valid" / "file-of-a-later-minor-version.ckptz"
    assert ckptz("inspect", vector, "--json").json["format_version"] == "1.10"


def test_inspect_shows_tables(chain: Chain) -> None:
    short = ckptz("inspect", chain.delta).stdout
    assert "layer.weight" not in short
    for word in ("content id", "delta", "step-1.ckptz", "difference", "1.0, written by ckptz"):
        assert word in short
    long = ckptz("inspect", chain.delta, "--tensors").stdout
    assert long.startswith(short.rstrip("\n"))
    assert "1 chunk x 2" in long
    assert "lossless" in short
    assert "loss " not in long


def test_verify_counts_what_it_checked(chain: Chain) -> None:
    report = ckptz("verify", chain.delta, chain.full, "--json").json
    delta, full = report["files"]
    n = sum(bool(data) for _, _, data in a_state().values())
    assert (delta["n_chunks"], full["n_chunks"]) == (2 * n, n)
    assert delta["chain"] == [str(chain.full)]
    for path in (chain.delta, chain.second):
        assert "ok, 9 tensors identical to" in ckptz("verify", path, "--against", chain.second).stdout


def test_verify_checks_chunks_of_a_base_that_the_delta_does_not_need(chain: Chain) -> None:
    """Damage a chunk of the base that no tensor of the delta is predicted from."""
    data = bytearray(chain.full.read_bytes())
    report = ckptz("inspect", chain.full, "--json").json
    begin = 8 + int.from_bytes(data[:8], "little")
    sparse = next(i for i, t in enumerate(report["tensors"]) if t["name"] == "sparse")
    end = begin + sum(t["stored_bytes"] for t in report["tensors"][: sparse + 1])
    data[end - 1] ^= 1
    chain.full.write_bytes(data)
    run = ckptz("verify", chain.delta, fails=True)
    assert run.exit_code == 3
    assert "step-1.ckptz" in run.error
    assert "'sparse'" in run.error


CHANGES: dict[str, tuple[Rows, dict[str, str] | None]] = {
    "differs from the original, first at element 2999": (
        a_state(drift=0.01) | {"sparse": ("U8", (3000,), a_state()["sparse"][2][:-1] + b"\x77")},
        {"step": "2"},
    ),
    "'extra' is missing": (a_state(drift=0.01) | {"extra": ("U8", (1,), b"1")}, {"step": "2"}),
    "not in the original": ({k: v for k, v in a_state(drift=0.01).items() if k != "odd"}, {"step": "2"}),
    "'odd' is F32 [4], not F32 [2, 2]": (
        a_state(drift=0.01) | {"odd": ("F32", (2, 2), a_state()["odd"][2])},
        {"step": "2"},
    ),
    "'odd' is F32 [4], not I32 [4]": (
        a_state(drift=0.01) | {"odd": ("I32", (4,), a_state()["odd"][2])},
        {"step": "2"},
    ),
    "metadata": (a_state(drift=0.01), {"step": "3"}),
}


@pytest.mark.parametrize("difference", CHANGES)
def test_verify_names_the_first_difference(difference: str, chain: Chain) -> None:
    rows, metadata = CHANGES[difference]
    other = write_plain(chain.folder / "other.safetensors", rows, metadata)
    run = ckptz("verify", chain.delta, "--against", other, fails=True)
    assert run.exit_code == 3
    assert difference in run.error
    assert "step-2.ckptz" in run.error


def test_verify_continues_after_a_damaged_file(chain: Chain) -> None:
    data = chain.full.read_bytes()
    broken = chain.folder / "broken.ckptz"
    broken.write_bytes(data[:-1])
    run = ckptz("verify", broken, chain.folder / "gone.ckptz", chain.full, "--json", fails=True)
    assert run.exit_code == 3
    first, second, third = run.json["files"]
    assert (first["error"]["exit_code"], second["error"]["exit_code"]) == (3, 5)
    assert third["n_tensors"] == len(a_state())
    assert len(run.stderr.splitlines()) == 2


def test_the_suffix_of_an_output_selects_its_format(tmp_path: Path) -> None:
    weight, nested = torch.randn(40, 30), {"a": {"b": torch.ones(3)}, "epoch": 3}
    ckptz_torch.save_state({"wte": weight, "head": weight}, tmp_path / "tied.ckptz")
    ckptz_torch.save_state(nested, tmp_path / "nested.ckptz")
    report = restore(tmp_path / "tied.ckptz", tmp_path / "tied.safetensors")
    assert list(load_file(tmp_path / "tied.safetensors")) == ["wte"]
    assert report.notes == ("tied tensors are stored once: without head",)
    assert set(torch.load(restore(tmp_path / "tied.ckptz").output)) == {"wte", "head"}
    report = restore(tmp_path / "nested.ckptz", tmp_path / "flat.safetensors")
    assert list(load_file(tmp_path / "flat.safetensors")) == ["a.b"]
    assert "the nesting is lost" in report.notes[0]
    ckptz_numpy.save_file({"x": np.ones(3)}, tmp_path / "plain.ckptz")
    assert list(torch.load(restore(tmp_path / "plain.ckptz", tmp_path / "x.pt").output)) == ["x"]
    restore(tmp_path / "tied.ckptz", tmp_path / "odd.pt", to="safetensors")
    assert list(load_file(tmp_path / "odd.pt")) == ["wte"], "--to goes before"


# --- the program ----------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", sorted(main.commands))
def test_every_verb_explains_itself_with_examples(verb: str) -> None:
    text = ckptz(verb, "--help").stdout
    assert "Examples:" in text
    assert f"ckptz {verb} " in text


def test_the_help_of_compress_has_each_option_once_and_the_common_ones_first() -> None:
    text = ckptz("compress", "--help").stdout
    titles = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert titles[0] == "Used most"
    assert titles[-2:] == ["What is read and written", "Every command has"]
    listed = re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE)
    verb = main.commands["compress"]
    with click.Context(verb) as context:
        options = [param.opts[-1] for param in verb.get_params(context) if isinstance(param, click.Option)]
    assert sorted(listed) == sorted(options)


def test_the_list_of_verbs_cuts_no_sentence() -> None:
    assert "..." not in ckptz("--help").stdout.partition("Commands:")[2]


def test_the_version_names_the_format_too() -> None:
    assert ckptz("--version").stdout.startswith("ckptz 0.")
    assert f"(format {FORMAT_VERSION})" in ckptz("--version").stdout


def test_help_is_quick_and_loads_little() -> None:
    code = (
        "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr));"
        "from ckptz_cli.main import main; main(['--help'])"
    )
    seconds = []
    for _ in range(3):
        start = _children_seconds()
        process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        seconds.append(_children_seconds() - start)
    assert not set(process.stderr.split()) & {"torch", "numba", "numpy", "rich", "msgspec"}
    assert min(seconds) < 0.3


def _children_seconds() -> float:
    """Return the CPU seconds of ended child processes, which other load on the machine does not increase."""
    times = os.times()
    return times.children_user + times.children_system


# --- dry runs -------------------------------------------------------------------------------------


def a_model(folder: Path, drift: float = 0.0) -> Path:
    """Write a model: 12 similar layers with biases, and an embedding of which 500 rows are larger."""
    rng, changes = np.random.default_rng(0), np.random.default_rng(1)
    state = {f"layers.{i}.up.weight": rng.normal(0, 0.02 + 0.002 * i, (256, 64)) for i in range(12)}
    state["embed.weight"] = (
        rng.normal(0, 0.02, (6000, 64)) * np.where(np.arange(6000) < 500, 3.0, 1.0)[:, None]
    )
    state |= {f"layers.{i}.bias": rng.normal(0, 0.01, 64) for i in range(12)}
    tensors = {name: (x + drift * changes.normal(0, 0.02, x.shape)).astype("f4") for name, x in state.items()}
    save_file(tensors, folder / f"model-{drift}.safetensors")
    return folder / f"model-{drift}.safetensors"


def test_a_dry_run_predicts_what_each_method_would_write_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampled, "SAMPLE", 1 << 17)
    monkeypatch.setattr(sampled, "MIN_VALUES", 1 << 12)
    source, base = a_model(tmp_path, 0.01), a_model(tmp_path)
    ckptz("compress", base)
    for against in ((), ("--base", base.with_suffix(".ckptz"))):
        before = sorted(os.listdir(tmp_path))
        methods = [word for name in METHODS for word in ("--method", name)]
        dry_run = ckptz(
            "compress", source, "-o", tmp_path / "new/", *against, "--dry-run", *methods, "--json"
        )
        assert sorted(os.listdir(tmp_path)) == before
        for report in dry_run.json["files"]:
            method = ("--method", report["method"])
            out = tmp_path / "out.ckptz"
            (real,) = ckptz("compress", source, "-f", "-o", out, *against, *method, "--json").json["files"]
            out.unlink()
            assert report["is_dry_run"]
            assert report["stored_bytes"] == pytest.approx(real["stored_bytes"], rel=0.05), method
            same = ("n_tensors", "n_lossy", "tensor_bytes", "base", "depth")
            assert [report[name] for name in same] == [real[name] for name in same]
    text = ckptz("compress", source, "--dry-run").stdout
    assert re.search(r", lossless: \S+ MB -> about \S+ MB .* nothing was written$", text.strip())


def test_a_dry_run_of_a_small_file_is_exact(chain: Chain) -> None:
    (report,) = ckptz("compress", chain.first, "--dry-run", "--json").json["files"]
    assert report["stored_bytes"] == chain.full.stat().st_size


# --- target sizes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "ratio"), [("grid", 8), ("kmeans", 8), ("kmeans", 2)])
def test_a_target_size_gives_the_finest_file_that_fits(method: str, ratio: int, tmp_path: Path) -> None:
    source, out = a_model(tmp_path), tmp_path / "out.ckptz"
    run = ckptz("compress", source, "-o", out, "--target-size", f"{ratio}x", "--method", method, "--json")
    (report,) = run.json["files"]
    limit = report["tensor_bytes"] / ratio
    assert 0.99 * limit <= out.stat().st_size == report["stored_bytes"] <= limit
    assert report["search"]["method"] == method
    config = tmp_path / "config.json"
    config.write_text(run.stdout)
    ckptz("compress", source, "-o", tmp_path / "again.ckptz", "--config", config)
    assert content_of(tmp_path / "again.ckptz") == content_of(out)
    assert sorted(os.listdir(tmp_path)) == ["again.ckptz", "config.json", source.name, "out.ckptz"]


def test_a_target_size_is_met_without_loss_if_possible_and_refused_if_impossible(tmp_path: Path) -> None:
    source, out = a_model(tmp_path), tmp_path / "out.ckptz"
    (report,) = ckptz("compress", source, "-o", out, "--target-size", "1GB", "--json").json["files"]
    assert report["n_lossy"] == 0
    ckptz("verify", out, "--against", source)
    for words, message in (
        (("--target-size", "2000x"), "the smallest has about"),
        (("--target-size", "much"), "must be a size such as 500MB"),
        (("--target-size", "9x", "--method", "lossless"), "leave out --eval and --method lossless"),
        (("--target-size", "9x", "--chain"), "and a chain"),
    ):
        run = ckptz("compress", source, "-o", tmp_path / "new.ckptz", *words, fails=True)
        assert (run.exit_code, message in run.error) == (2, True), run.error
    assert not (tmp_path / "new.ckptz").exists()


# --- the options of compress ----------------------------------------------------------------------


def test_the_help_of_compress_is_at_most_70_lines() -> None:
    text = ckptz("compress", "--help").stdout
    assert len(re.findall(r"^  (?:-\w, )?--[a-z]", text, re.MULTILINE)) <= 22 + 1  # 1 for --help
    assert len(text.splitlines()) <= 70


@pytest.mark.parametrize("verb", main.commands)
def test_short_options_mean_the_same_for_every_verb(verb: str) -> None:
    short = {"--force": "-f", "--jobs": "-j", "--verbose": "-v", "--quiet": "-q", "--output": "-o"}
    for param in main.commands[verb].params:
        for name in set(param.opts) & set(short):
            assert param.opts[0] == short[name]


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".bin"])
def test_an_output_with_the_suffix_of_another_format_is_refused(
    suffix: str, chain: Chain, tmp_path: Path
) -> None:
    run = ckptz("compress", chain.first, "-o", tmp_path / f"x{suffix}", fails=True)
    assert run.exit_code == 2
    assert f"write to {tmp_path}/x.ckptz" in run.error
    assert not (tmp_path / f"x{suffix}").exists()


def test_calibrations_among_several_inputs_are_skipped_with_a_note(chain: Chain, tmp_path: Path) -> None:
    guide = write_plain(tmp_path / "a.calibration.safetensors", {}, {"ckptz.guide": "calibration"})
    run = ckptz("compress", chain.first, guide, chain.second, "-o", tmp_path / "out")
    assert run.stderr.startswith(f"ckptz: note: {guide}: skipped, a calibration file is not an input")
    assert sorted(os.listdir(tmp_path / "out")) == ["step-1.ckptz", "step-2.ckptz"]
    ckptz("compress", chain.first, guide, "-o", tmp_path / "one")
    assert os.listdir(tmp_path / "one") == ["step-1.ckptz"]
    ckptz("compress", chain.first, guide, "-o", tmp_path / "one.ckptz")
    assert (tmp_path / "one.ckptz").is_file()


def test_a_configuration_file_has_settings_of_all_kinds(tmp_path: Path) -> None:
    config = tmp_path / "settings.toml"
    config.write_text('method = "kmeans"\nlevels = 8\n[input]\nstep = 7\n')
    source = write_plain(tmp_path / "large.safetensors", a_state(n=9000))
    out = ("-o", tmp_path / "a.ckptz", "--config", config, "--json")
    (report,) = ckptz("compress", source, *out).json["files"]
    assert (report["step"], report["n_lossy"] > 0) == (7, True)
    (report,) = ckptz("compress", source, *out, "-f", "--set", "input.step=8").json["files"]
    assert report["step"] == 8
    for text, message in (
        ("[input]\nstop = 7", "input.stop: unknown; use one of"),
        ("levels = 4", "names no method"),
    ):
        config.write_text(text)
        assert message in ckptz("compress", source, *out, "-f", fails=True).json["error"]["message"]
    run = ckptz("compress", source, "-f", "--set", "guide.calibration=", fails=True)
    assert "is not a file name" in run.error
