"""Output apart from results: the progress bar, the notice about compiling kernels, numbers with units."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptz.format.index import QualityRecord
from ckptz.kernels.cache import NOTICE
from ckptz.parallel import SILENT
from ckptz.verbs.quality_text import quality_text
from ckptz.words import format_bytes, format_ratio
from ckptz_cli.session import progress_bar
from tests.support.cli_support import ckptz, write_plain


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_shows_bytes_speed_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with progress_bar() as progress:
        for name in ("first[red]\x1b.safetensors", "second.safetensors"):
            progress.start(name, 4_000_000)
            progress.advance(1_000_000)
            progress.advance(1_000_000)
    output = terminal.getvalue()
    assert "first[red]\\x1b.safetensors" in output
    assert "2.0/4.0 MB" in output
    assert "second" in output


def test_no_progress_bar_is_drawn_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar() as progress:
        assert progress is SILENT
        progress.start("x", 1)
        progress.advance(1)
    assert capsys.readouterr() == ("", "")


def test_sizes_have_three_digits() -> None:
    sizes = {0: "0 B", 999: "999 B", 1000: "1 kB", 90_900_000: "90.9 MB", 999_600: "1 MB"}
    sizes |= {7 << 40: "7.7 TB", 10**18: "1000 PB"}
    assert {n_bytes: format_bytes(n_bytes) for n_bytes in sizes} == sizes


def test_a_ratio_is_shown_as_a_factor_and_a_share_of_the_raw_size() -> None:
    assert format_ratio(50, 100) == "2x smaller, 0.5000 of raw"
    assert format_ratio(38, 100_000) == "2,632x smaller, 0.0004 of raw"
    assert format_ratio(150, 100) == "1.5x larger, 1.5000 of raw"
    assert format_ratio(10005, 10000) == "1.0x, nothing gained, 1.0005 of raw"
    assert format_ratio(50, 0) == "no tensor bytes"


@pytest.mark.parametrize("is_warm", [False, True])
def test_the_notice_about_compiling_is_printed_once_and_only_when_compiling(
    is_warm: bool, tmp_path: Path
) -> None:
    code = (
        "import numpy as np; from ckptz.kernels import cache, compiled as cpu; cache.PATIENCE = 0;"
        "cpu().histogram(np.zeros(4, np.uint8)); cpu().magnitudes(np.zeros(4, np.uint16))"
    )
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    for _ in range(1 + is_warm):
        process = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
    assert process.stderr == ("" if is_warm else f"{NOTICE}\n")


@pytest.mark.parametrize("module", ["ckptz", "ckptz_cli", "ckptz_cli.main"])
def test_each_module_of_the_program_can_be_run(module: str) -> None:
    command = [sys.executable, "-m", module, "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("ckptz ")


def test_every_verb_accepts_an_empty_checkpoint(tmp_path: Path) -> None:
    path = write_plain(tmp_path / "empty.safetensors", {})
    assert "no tensor bytes" in ckptz("compress", path).stdout
    ckptz("restore", tmp_path / "empty.ckptz", "--force")
    assert "0 tensors" in ckptz("verify", tmp_path / "empty.ckptz", "--against", path).stdout
    ckptz("inspect", tmp_path / "empty.ckptz", "--tensors")


@pytest.mark.parametrize(
    ("measured", "is_relative", "lower_is_better", "text"),
    [
        (2.01, True, True, "loss 2.01 against 2, 0.50% worse (limit 1%)"),
        (1.5, True, True, "loss 1.5 against 2, 25.00% better (limit 1%; too few examples to be sure)"),
        (1.995, False, False, "loss 1.995 against 2, 0.005 worse (limit 0.01)"),
        (2.0, False, False, "loss 2 against 2, 0 worse (limit 0.01)"),
    ],
)
def test_the_text_of_a_measured_budget_says_better_or_worse(
    measured: float, is_relative: bool, lower_is_better: bool, text: str
) -> None:
    limit = {"promise": "quality-drop", "metric": "loss", "max_drop": 0.01, "is_relative": is_relative}
    outcome = {"lower_is_better": lower_is_better, "exact": 2.0, "measured": measured, "is_met": True}
    assert quality_text(QualityRecord(**limit, **outcome, date="2026-01-01")) == text
