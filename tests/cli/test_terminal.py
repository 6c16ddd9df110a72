"""Verbs on a terminal of 60 columns: first and last lines of the output, the progress bar, and Ctrl-C."""

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptz_cli.main import main
from tests.support.cli_support import ckptz
from tests.support.terminal import Case, Shown, shown

NARROW = 60
PACE = re.compile(r"\d+\.\d\ds,[\d.]+MB/s|\d+\.\d\ds")


def a_folder(folder: Path) -> Path:
    """Write three steps as plain files, and their chain in `run`."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(64, 64)).astype(np.float32)
    for step in (1, 2, 3):
        weight = weight + np.float32(1e-4) * rng.normal(size=weight.shape).astype(np.float32)
        state = {"blocks.0.weight": weight, "blocks.0.bias": weight[0]}
        save_file(state, folder / f"step-{step}.safetensors")
    steps = [folder / f"step-{step}.safetensors" for step in (1, 2, 3)]
    ckptz("compress", *steps, "--chain", "-o", folder / "run")
    return folder


def squeezed(text: str) -> str:
    """Return a text without whitespace, seconds and speeds, which differ between runs and line widths."""
    return PACE.sub("", "".join(text.split()))


# --- three short command lines --------------------------------------------------------------------


@pytest.fixture(scope="module")
def in_short(tmp_path_factory: pytest.TempPathFactory) -> list[Shown]:
    folder = tmp_path_factory.mktemp("in-short")
    for name in "ab":
        save_file({"w": np.arange(4000, dtype=np.float32)}, folder / f"{name}.safetensors")
    lines = (
        ["compress", "a.safetensors", "b.safetensors"],
        [],
        ["inspect", "a.ckptz"],
    )
    return shown(Case(line, str(folder), NARROW) for line in lines)


def test_results_are_printed_above_the_progress_bar(in_short: list[Shown]) -> None:
    compressed = in_short[0]
    assert compressed.exit_code == 0
    assert compressed.is_tidy
    assert "b.safetensors" in compressed.raw  # in the progress bar
    text = squeezed("".join(compressed.lines))
    assert re.fullmatch(r"a\.ckptz:16kB->.*,b\.ckptz:16kB->.*,2files:32kB->.*,", text)
    assert re.search(r"\x1b\[2K\r?a\.ckptz: ", compressed.raw)  # printed after the bar's line is cleared


def test_the_program_without_arguments_prints_its_help(in_short: list[Shown]) -> None:
    help_page = in_short[1]
    assert (help_page.exit_code, help_page.lines[0]) == (2, "Usage: ckptz [OPTIONS] COMMAND [ARGS]...")
    assert "  compress  Compress checkpoints, losslessly by default." in help_page.lines
    assert help_page.lines[-1].split() == ["130", "interrupted"]


def test_a_narrow_terminal_cuts_no_word_and_no_value(in_short: list[Shown]) -> None:
    text = "\n".join(in_short[2].lines)
    assert "bits/element" in text
    assert "…" not in text


# --- every verb -----------------------------------------------------------------------------------

# Arguments of each verb, and patterns of the first and the last line of its output.
VERBS = {
    "compress": (["step-1.safetensors", "step-2.safetensors"], r"step-1\.ckptz: 16\.6 kB -> ", r"MB/s$"),
    "restore": (
        ["run/step-3.ckptz", "-o", "back.safetensors"],
        r"back\.safetensors: 16\.6 kB in 2 ",
        r"MB/s$",
    ),
    "inspect": (
        ["run/step-3.ckptz", "--tensors"],
        r"file +run/step-3\.ckptz$",
        r"slice decodes +1 chunk x 3$",
    ),
    "verify": (["run"], r"run/step-1\.ckptz: ok; 2 stored chunks", r"MB/s$"),
    "log": (["run"], r"checkpoint +", r"run: 3 files, "),
    "report": (["run", "-o", "page.html"], r"page\.html: a page of ", r"in a browser$"),
    "diff": (["step-1.safetensors", "step-2.safetensors"], r"tensor +", r"largest [\d.e-]+$"),
    "rebase": (["run/step-3.ckptz", "-o", "alone.ckptz"], r"alone\.ckptz: self-contained", r" s$"),
    "prune": (["run", "--after", "2", "--dry-run"], r"would remove step-3\.ckptz$", r"1 file, [\d.]+ kB$"),
    "warm-up": (["--jobs", "1"], r"kernels of lossless, ", r" s$"),
}
TABLES = ("inspect", "log", "diff")
WITH_FILES = [verb for verb in VERBS if verb != "warm-up"]


@pytest.fixture(scope="module")
def all_verbs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Shown, str]]:
    """Run each verb on a terminal and without one; return both outputs."""
    folders = [a_folder(tmp_path_factory.mktemp(name)) for name in ("shown", "plain")]
    lines = [[verb, *arguments] for verb, (arguments, _, _) in VERBS.items()]
    screens = shown(Case(line, str(folders[0]), NARROW) for line in lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folders[1])
        plain = [ckptz(*line).stdout for line in lines]
    return dict(zip(VERBS, zip(screens, plain, strict=True), strict=True))


@pytest.mark.apps
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_on_a_terminal(verb: str, all_verbs: dict[str, tuple[Shown, str]]) -> None:
    screen, plain = all_verbs[verb]
    _, first, last = VERBS[verb]
    assert screen.exit_code == 0, screen.lines
    assert screen.is_tidy
    assert re.match(first, screen.lines[0]), screen.lines
    assert re.search(last, screen.lines[-1]), screen.lines
    if verb not in TABLES:  # the layout of tables depends on the width
        assert squeezed("".join(screen.lines)) == squeezed(plain)


@pytest.mark.apps
def test_every_verb_is_shown() -> None:
    assert set(VERBS) == set(main.commands)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Shown]]:
    """Interrupt each verb as it opens its first file, which must leave no new files; return its output."""
    folder = a_folder(tmp_path_factory.mktemp("interrupted"))
    before = sorted(folder.rglob("*"))
    screens = shown(
        Case([verb, *VERBS[verb][0]], str(folder), NARROW, is_interrupted=True) for verb in WITH_FILES
    )
    assert sorted(folder.rglob("*")) == before
    return folder, dict(zip(WITH_FILES, screens, strict=True))


@pytest.mark.apps
@pytest.mark.parametrize("verb", WITH_FILES)
def test_ctrl_c_is_one_line(verb: str, interrupted: tuple[Path, dict[str, Shown]]) -> None:
    screen = interrupted[1][verb]
    assert screen.exit_code == 130
    assert screen.is_tidy
    assert [line for line in screen.lines if line.strip("^C")] == ["ckptz: interrupted"]
