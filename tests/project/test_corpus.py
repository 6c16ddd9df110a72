"""Written files have the committed sizes and digests; see tests/corpus/make_corpus.py."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.corpus import make_corpus

SCRIPT = Path(make_corpus.__file__)
TABLE = SCRIPT.with_name("written.csv")
FRAMEWORKS = ("accelerate", "lightning", "trainer")
QUICK = ("tools", "inputs", "kmeans-deltas", "grid-deltas", "saved-files")  # a case of each group of methods


def corpus(*args: object) -> subprocess.CompletedProcess[str]:
    """Run the script in a new process, so that no test has changed its random states and frameworks."""
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, args)], capture_output=True, text=True, check=False
    )


def check(*args: object) -> None:
    process = corpus("--check", "--portable", *args)
    if differing := [line for line in process.stdout.splitlines() if line.startswith("tools/")]:
        pytest.skip(f"the table was made with other versions: {', '.join(differing)}")
    assert process.returncode == 0, process.stdout + process.stderr


def test_no_written_byte_has_changed_in_quick_cases() -> None:
    check("--only", *QUICK)


@pytest.mark.apps
def test_no_written_byte_has_changed() -> None:
    check("--without", *QUICK[1:], *FRAMEWORKS)


@pytest.mark.apps
def test_no_byte_that_adapters_write_has_changed() -> None:
    for framework in ("accelerate", "lightning", "transformers"):
        pytest.importorskip(framework)
    check("--only", "tools", *FRAMEWORKS)


def test_each_difference_from_the_table_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.csv"
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("tools,zlib")]
    at = next(i for i, line in enumerate(lines) if line.startswith("tools,zstd"))
    lines[at] = lines[at][:-1] + ("0" if lines[at][-1] != "0" else "1")
    table.write_text("\n".join([*lines, "tools,gone.ckptz,1,ab"]) + "\n")
    monkeypatch.setattr(sys, "argv", ["make_corpus.py", "--check", "--only", "tools", "--table", str(table)])
    assert make_corpus.main() == 1
    _, gone, new, changed = capsys.readouterr().out.splitlines()
    assert gone == "tools/gone.ckptz: not written any more"
    assert new == "tools/zlib: not in the table"
    assert changed.startswith("tools/zstd: differs")
