"""Searches from a checkpoint to a file: what is measured, written, and left behind after a failure."""

import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_plain
from safetensors.torch import load_file as load_plain

from ckptz import Budget, compress
from ckptz.format.publish import Publication
from ckptz.search.budget import SearchOptions, TrialReport
from ckptz.search.spaces import SPACES
from ckptz.torch import load_file
from ckptz.verbs.compress import CompressReport
from tests.support.cli_support import ckptz
from tests.support.search_support import SPACE, TEMPLATE, model

KMEANS = ("--method", "kmeans")

EVALUATION = '''
"""An evaluation as users write it: the error of the weights, as if it were a loss of 2."""
from pathlib import Path
from safetensors.torch import load_file

HERE = Path(__file__).parent


def error(state):
    exact = load_file(HERE / "exact.safetensors")
    parts = [((state[n].double() - exact[n]) ** 2).sum() / (exact[n].double() ** 2).sum() for n in state]
    return float(sum(parts) / len(parts))


def loss(state):
    return {"loss": 2 + error(state)}


def hits(state):
    print("evaluating")
    return {"accuracy": 0.9 - error(state), "n": 100}


def raising(state):
    raise RuntimeError("shapes do not match")


def slow(state):
    import time
    (HERE / "began").touch()
    time.sleep(0.4)
    return loss(state)


loss.data_digest = "sha256:feed"
'''


def spoil(state: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Return a loss near 2 that grows with the error of the weights, and overwrite the weights with zeros."""
    parts = [float(((t - exact[n]) ** 2).sum() / (exact[n] ** 2).sum()) for n, t in state.items()]
    for tensor in state.values():
        tensor.zero_()
    return 2 + sum(parts) / len(parts)


class Quality:
    """An evaluation that keeps copies of the states that it was called with."""

    def __init__(self, path: Path) -> None:
        self.exact = {n: t for n, t in load_plain(path).items() if not n.startswith("optimizer.")}
        self.states: list[dict[str, torch.Tensor]] = []

    def __call__(self, state: dict[str, torch.Tensor]) -> float:
        self.states.append({name: tensor.clone() for name, tensor in state.items()})
        return spoil(state, self.exact)


@pytest.fixture(autouse=True)
def few_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the search space to a sixth; test_search.py tests searches of all of it."""
    few = {"levels": (32, 16, 8), "prune": (0.0, 0.2)}
    monkeypatch.setitem(SPACES, "kmeans", dataclasses.replace(SPACE, axes={**SPACE.axes, **few}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a checkpoint with Adam's second moments, and an evaluation of its weights."""
    save_plain(model(moments=True), tmp_path / "step-0.safetensors")
    save_plain(model(), tmp_path / "exact.safetensors")
    (tmp_path / "evaluate.py").write_text(EVALUATION)
    return tmp_path


def search(
    source: Path, output: Path, quality: Callable[..., Any] | None, drop: float = 0.005, **options: Any
) -> CompressReport:
    """Compress under one relative budget; options that begin with an underscore go to `compress`."""
    compress_options = {name[1:]: options.pop(name) for name in list(options) if name.startswith("_")}
    budgets = (Budget(quality, drop),) if quality is not None else ()
    options = {"cubes": ("magnitude",), "template": TEMPLATE, "max_evaluations": 10, **options}
    search_options = SearchOptions(budgets=budgets, **options)
    (report,) = compress([source], output, jobs=1, search=search_options, **compress_options)
    return report


def temporary_files(folder: Path) -> set[str]:
    """Return the names of unfinished files in a folder."""
    return {path.name for path in folder.iterdir() if path.name.endswith(".ckptz-tmp")}


@pytest.mark.parametrize("number", [0, 5])  # the sixth discarded file was the best one before
def test_an_interrupt_when_a_trial_is_removed_leaves_the_best_so_far_or_nothing(
    number: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output, n_removed = folder / "step-0.safetensors", folder / "out.ckptz", itertools.count()
    discard = Publication.discard

    def discard_and_interrupt(self: Publication) -> None:
        discard(self)
        if next(n_removed) == number:
            raise KeyboardInterrupt

    monkeypatch.setattr(Publication, "discard", discard_and_interrupt)
    quality = Quality(source)
    try:
        report = search(source, output, quality)
    except KeyboardInterrupt:
        assert not output.exists()
    else:
        assert report.search.is_interrupted
        restored = {n: t for n, t in load_file(output).items() if n in quality.exact}
        assert spoil(restored, quality.exact) <= 2 * 1.005
    assert not temporary_files(folder)


def test_the_measured_quality_is_that_of_the_restored_file_and_is_recorded(folder: Path) -> None:
    source, output = folder / "step-0.safetensors", folder / "out.ckptz"
    quality, trials = Quality(source), []
    report = search(source, output, quality, on_trial=trials.append)
    assert report.search.trials == tuple(trials)
    best = min((t for t in trials if t.is_feasible), key=lambda t: t.n_bytes)
    assert report.search.config == best.config
    assert abs(output.stat().st_size - best.n_bytes) < 1000  # the file also has the records of quality
    assert report.stored_bytes == output.stat().st_size
    restored = {n: t for n, t in load_file(output).items() if n in quality.exact}
    measured = spoil({n: t.clone() for n, t in restored.items()}, quality.exact)
    facts = ckptz("inspect", output, "--json").json
    (record,) = facts["quality"]
    assert record["measured"] == measured == best.values[0]
    assert record["exact"] == report.search.exact[0] == 2.0
    assert (record["promise"], record["is_met"], record["max_drop"]) == ("quality-drop", True, 0.005)
    assert measured <= 2.0 * 1.005
    promises = {t["lossy"]["promise"] for t in facts["tensors"] if t["lossy"]}
    assert promises == {"quality-drop"}
    ckptz("verify", output, "--against", source)
    assert not temporary_files(folder)


def test_each_call_gets_fresh_weights_with_their_names_and_types(folder: Path) -> None:
    source = folder / "mixed.safetensors"
    state = model(moments=True) | {"steps": np.array(3), "half.weight": np.ones(8, np.float16)}
    save_plain(state, source)
    quality = Quality(source)
    quality.exact = {n: t for n, t in quality.exact.items() if t.is_floating_point()}

    def evaluate(state: dict[str, torch.Tensor]) -> float:
        assert state.pop("steps").dtype == torch.int64
        return quality(state)

    search(source, folder / "out.ckptz", evaluate, max_evaluations=3)
    names = {name for name in state if not name.startswith("optimizer.")} - {"steps"}
    assert all(set(state) == names for state in quality.states)
    for name, tensor in quality.states[0].items():
        torch.testing.assert_close(tensor, quality.exact[name], rtol=0, atol=0)
    assert all(state["half.weight"].dtype == torch.float16 for state in quality.states)
    assert all(float(state["h.0.up.weight"].abs().max()) > 0 for state in quality.states)


def test_tied_weights_of_a_torch_file_keep_all_their_names(folder: Path) -> None:
    token = torch.from_numpy(model()["token.weight"])
    state = {"token.weight": token, "head.weight": token, "first": token[:1], "up": torch.ones(3)}
    torch.save(state, folder / "tied.pt")
    seen: list[dict[str, torch.Tensor]] = []

    def loss(state: dict[str, torch.Tensor]) -> float:
        seen.append(state)
        return 2 + float((state["head.weight"] - token).pow(2).sum() / token.pow(2).sum())

    search(folder / "tied.pt", folder / "out.ckptz", loss, 0.01, max_evaluations=2)
    assert all(set(state) == {"token.weight", "head.weight", "up"} for state in seen)
    assert torch.equal(seen[0]["head.weight"], token)
    assert all(state["head.weight"] is state["token.weight"] for state in seen)


def test_the_search_for_a_delta_begins_at_the_settings_of_its_base(folder: Path) -> None:
    first = search(folder / "step-0.safetensors", folder / "0.ckptz", Quality(folder / "step-0.safetensors"))
    source = folder / "step-1.safetensors"
    save_plain(model(1, moments=True), source)
    second = search(source, folder / "1.ckptz", Quality(source), _base=folder / "0.ckptz")
    assert (first.search.strategy, second.search.strategy) == ("guided", "neighbourhood")
    assert len(second.search.trials) <= 10
    assert second.n_deltas
    assert second.stored_bytes < first.stored_bytes
    config, parent = second.search.config, first.search.config
    assert config["levels"] >= parent["levels"]
    assert config["prune"] <= parent["prune"]
    ckptz("verify", folder / "1.ckptz")


def test_a_chain_searches_file_after_file(folder: Path) -> None:
    sources = [folder / "step-0.safetensors"]
    for step in (1, 2):
        sources.append(folder / f"step-{step}.safetensors")
        save_plain(model(step), sources[-1])
    budget = ("--eval", f"{folder}/evaluate.py:loss", "--budget", "3%", "--set", "search.max_evaluations=4")
    run = ckptz("compress", *sources, "--chain", "-o", folder / "run", *KMEANS, *budget, "--json")
    strategies = [report["search"]["strategy"] for report in run.json["files"]]
    assert strategies == ["guided", "neighbourhood", "neighbourhood"]
    assert [report["depth"] for report in run.json["files"]] == [0, 1, 2]
    assert all(report["search"]["quality"][0]["data_digest"] == "sha256:feed" for report in run.json["files"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_trial_without_a_finite_value_does_not_keep_the_budget(folder: Path, value: float) -> None:
    source = folder / "exact.safetensors"
    quality = Quality(source)
    trials: list[TrialReport] = []

    def fragile(state: dict[str, torch.Tensor]) -> float:
        measured = quality(state)
        return value if measured > 2.02 else measured

    report = search(source, folder / "out.ckptz", fragile, 0.5, on_trial=trials.append, max_evaluations=8)
    assert report.search.quality[0].measured <= 2.02
    assert any(trial.drop is None and trial.values == (None,) for trial in trials)
    assert all(trial.is_feasible == (trial.drop is not None) for trial in trials)


def test_the_command_line_says_that_an_interrupted_search_wrote_nothing(folder: Path) -> None:
    stops = "    if len(calls) > 2:\n        raise KeyboardInterrupt\n    return 2.0\n"
    (folder / "stops.py").write_text(f"calls = []\ndef loss(state):\n    calls.append(1)\n{stops}")
    search = ("--eval", f"{folder}/stops.py:loss", "-o", folder / "out.ckptz")
    run = ckptz("compress", folder / "exact.safetensors", *search, fails=True)
    assert run.exit_code == 130
    message = "ckptz: interrupted before any trial was within the budget; nothing is written\n"
    assert run.stderr.endswith(message)


@pytest.mark.parametrize("n_calls", [2, 3, 4])
def test_an_interrupted_search_leaves_the_best_so_far_or_nothing(folder: Path, n_calls: int) -> None:
    quality, output = Quality(folder / "exact.safetensors"), folder / "out.ckptz"

    def interrupted(state: dict[str, torch.Tensor]) -> float:
        if len(quality.states) == n_calls:
            raise KeyboardInterrupt
        return quality(state)

    trials: list[TrialReport] = []
    options: dict[str, Any] = {"drop": 0.03, "on_trial": trials.append}
    if n_calls == 2:
        with pytest.raises(
            KeyboardInterrupt, match="before any trial was within the budget; nothing is written"
        ):
            search(folder / "exact.safetensors", output, interrupted, **options)
        assert not output.exists()
    else:
        report = search(folder / "exact.safetensors", output, interrupted, **options)
        assert report.search.is_interrupted
        assert len(trials) == n_calls - 2
        best = min((t for t in trials if t.is_feasible), key=lambda t: t.n_bytes)
        assert report.search.config == best.config
        kept = f"keeps the budget, of {best.n_bytes:,} bytes, with {best.drop:.0%} of it used"
        assert any("interrupted" in note and kept in note for note in report.notes)
        ckptz("verify", output)
    assert not temporary_files(folder)


def test_missing_gradients_of_some_tensors_are_reported_once(folder: Path) -> None:
    state = model(moments=True)
    for name in ("h.0.up.weight", "h.1.attn.weight"):
        del state[f"optimizer.{name}.exp_avg_sq"]
    source = folder / "some.safetensors"
    save_plain(state, source)
    options = ("--method", "kmeans", "--set", "prune=0.2", "--set", "prune_by=sensitivity")
    run = ckptz("compress", source, "-o", folder / "out.ckptz", *options)
    notes = [line for line in run.stderr.splitlines() if "no average of gradients" in line]
    assert len(notes) == 1
    assert "2 tensors, first 'h.0.up.weight'" in notes[0] or "2 tensors, first 'h.1.attn.weight'" in notes[0]
    report = search(source, folder / "searched.ckptz", Quality(source), max_evaluations=2)
    assert sum("no average of gradients" in note for note in report.notes) <= 1


def test_pruning_by_sensitivity_prunes_the_least_sensitive_weights(folder: Path) -> None:
    options = (
        "--set",
        "prune=0.3",
        "--set",
        "prune_by=sensitivity",
        "--set",
        "protect=0.01",
        "--set",
        "protect_by=either",
    )
    ckptz("compress", folder / "step-0.safetensors", "-o", folder / "o.ckptz", "--method", "kmeans", *options)
    state, restored = model(moments=True), load_file(folder / "o.ckptz")
    name = "h.0.up.weight"
    weight, restored = state[name], restored[name].numpy()
    sensitivity = np.sqrt(state[f"optimizer.{name}.exp_avg_sq"]) * np.abs(weight)
    large = np.abs(weight) > np.quantile(np.abs(weight), 0.99)
    pruned = sensitivity < np.quantile(sensitivity, 0.29)
    assert (restored[pruned & ~large] == 0).all()
    kept = (sensitivity > np.quantile(sensitivity, 0.991)) | (
        np.abs(weight) > np.quantile(np.abs(weight), 0.991)
    )
    np.testing.assert_array_equal(restored[kept], weight[kept])
    spared = sensitivity > np.quantile(sensitivity, 0.31)
    assert not (restored[spared & (np.abs(weight) > np.quantile(np.abs(weight), 0.5))] == 0).any()


def test_rows_without_gradients_are_pruned_by_magnitude_and_not_all(folder: Path) -> None:
    state = model(moments=True)
    state["optimizer.token.weight.exp_avg_sq"][32:] = 0  # tokens that are in no batch
    save_plain(state, folder / "rare.safetensors")
    options = ("--method", "kmeans", "--set", "prune=0.3", "--set", "prune_by=sensitivity")
    ckptz("compress", folder / "rare.safetensors", "-o", folder / "o.ckptz", *options)
    restored, weight = load_file(folder / "o.ckptz")["token.weight"].numpy(), state["token.weight"]
    assert 0.29 <= (restored == 0).mean() <= 0.36  # zero takes what is nearest to it, too
    assert np.abs(weight[32:][restored[32:] == 0]).max() < np.quantile(np.abs(weight[32:]), 0.45)


# --- the command line ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--budget", "1%"), "needs --eval"),
        (("--eval", "{f}/evaluate.py:missing"), "has no function 'missing'"),
        (("--eval", "{f}/nothing.py:loss"), "no such file"),
        (("--eval", "no_such_package.module:loss"), "no module 'no_such_package'"),
        (("--eval", "loss"), "names no function"),
        (("--eval", "{f}/broken.py:loss"), "SyntaxError while it was loaded"),
        (("--eval", "{f}/evaluate.py:raising"), "shapes do not match"),
        (("--eval", "{f}/evaluate.py:loss", "--budget", "much"), "is not a budget"),
        (("--eval", "{f}/evaluate.py:loss", "--budget", "-1%"), "must be at least 0"),
        (("--eval", "{f}/evaluate.py:loss", "--method", "lossless"), "has no search space"),
        (("--dry-run", "--chain", "--method", "grid"), "dry run"),
        (("--method", "grid", "--method", "kmeans"), "several --method are only for --dry-run"),
        (("--config", "{f}/evaluate.py"), "not valid JSON"),
        (("--config", "{f}/code.json"), "unknown setting 'eval'"),
        (("--config", "{f}/plan.toml", "--method", "grid"), "which configures kmeans"),
        (("--set", "levels"), "is not KEY=VALUE"),
        (("--method", "kmeans", "--set", "levels=8", "--set", "levels=4"), "is set twice"),
        (("--method", "kmeans", "--set", "layer_prune=3"), "layer_prune must be pairs"),
        (("--method", "grid", "--set", "moments.third_step=2"), "--set moments"),
        (
            ("--eval", "{f}/evaluate.py:loss", "--set", "search.restores=0"),
            "0 is not an integer of at least 1",
        ),
        (("--eval", "{f}/evaluate.py:loss", "--set", "search.speed=2"), "use one of search.max_evaluations"),
        (("--eval", "{f}/evaluate.py:loss", "--dry-run", "--chain"), "dry run"),
    ],
)
def test_invalid_options_exit_with_2(folder: Path, options: tuple[object, ...], message: str) -> None:
    (folder / "broken.py").write_text("def loss(state:\n")
    file = {"search": {"method": "kmeans", "config": {"levels": 8, "eval": "evil.py:run"}}}
    (folder / "code.json").write_text(json.dumps({"files": [file]}))
    (folder / "plan.toml").write_text('method = "kmeans"\nlevels = 8\n')
    arguments = [str(option).replace("{f}", str(folder)) for option in options]
    run = ckptz("compress", folder / "exact.safetensors", "-o", folder / "out.ckptz", *arguments, fails=True)
    assert run.exit_code == 2
    assert message in run.stderr
    assert not (folder / "out.ckptz").exists()


def test_a_dry_run_reports_and_writes_nothing(folder: Path) -> None:
    options = ("--eval", f"{folder}/evaluate.py:hits", "--budget", "0.01", "--dry-run", "--json", *KMEANS)
    before = {path.name for path in folder.iterdir()}
    (report,) = ckptz("compress", folder / "exact.safetensors", *options).json["files"]
    search = report["search"]
    assert search["is_dry_run"]
    assert search["is_met"]
    assert (search["metrics"], search["quality"][0]["lower_is_better"]) == (["accuracy"], False)
    assert search["quality"][0]["measured"] >= 0.89
    assert {path.name for path in folder.iterdir()} - before <= {"__pycache__"}


def test_the_report_of_a_search_replays_it_without_its_evaluation(folder: Path) -> None:
    source, plan = folder / "exact.safetensors", folder / "plan.json"
    budget = ("--eval", f"{folder}/evaluate.py:loss", "--budget", "1%")
    plan.write_text(ckptz("compress", source, "-o", folder / "a.ckptz", *budget, *KMEANS, "--json").stdout)
    ckptz("compress", source, "-o", folder / "b.ckptz", "--config", plan)
    a, b = (load_file(folder / f"{name}.ckptz") for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)
    replayed = ckptz("compress", source, "-o", folder / "c.ckptz", "--config", plan, *budget, "--json")
    assert replayed.json["files"][0]["search"]["strategy"] == "neighbourhood"


def test_each_trial_is_printed_on_a_line(folder: Path) -> None:
    budget = ("--eval", f"{folder}/evaluate.py:loss", "--budget", "1%", "--set", "search.max_evaluations=4")
    options = (*budget, "-v", *KMEANS)
    run = ckptz("compress", folder / "exact.safetensors", "-o", folder / "out.ckptz", *options)
    lines = [line for line in run.stderr.splitlines() if line.startswith("ckptz: tried ")]
    assert len(lines) == 4
    assert "levels" in lines[0]
    assert re.search(r"2\.\d+, \d+\.\d\d% worse, \d+% of the budget", lines[0])
    assert re.search(r"loss 2\.\d+ against 2, \d\.\d\d% worse \(limit 1%\)", run.stdout)
    assert "loss 2.0" in ckptz("inspect", folder / "out.ckptz").stdout
    assert "attention" in ckptz("inspect", folder / "out.ckptz", "--tensors").stdout


@pytest.mark.slow
def test_ctrl_c_in_the_command_writes_the_best_so_far(folder: Path) -> None:
    output = folder / "out.ckptz"
    words = ["compress", str(folder / "exact.safetensors"), "-o", str(output), "-v"]
    words += ["--eval", f"{folder}/evaluate.py:slow", "--budget", "10%", *KMEANS]
    command = [sys.executable, "-c", "from ckptz_cli.main import main; main()", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stderr.readline()]
        while lines[-1] and "ckptz: tried" not in lines[-1]:
            lines.append(process.stderr.readline())
        time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert "interrupted after" in stderr
    ckptz("verify", output)
    assert not temporary_files(folder)
