"""Examples of frameworks without other tests: an interrupted run resumes to the same end."""

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.apps

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "package", "suffix"),
    [("fabric_loop.py", "lightning", ".ckpt"), ("accelerate_loop.py", "accelerate", "model.ckptz")],
)
def test_a_stopped_run_resumes_to_the_same_end(
    name: str,
    package: str,
    suffix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip(package)

    def last_line(folder: str, n_steps: int) -> str:
        monkeypatch.setattr("sys.argv", [name, str(tmp_path / folder), str(n_steps)])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()[-1]

    uninterrupted = last_line("uninterrupted", 8)
    last_line("stopped", 6)
    saved = [path for path in (tmp_path / "stopped").rglob("*") if str(path).endswith(suffix)]
    assert len(saved) == 2
    assert last_line("stopped", 8) == uninterrupted
