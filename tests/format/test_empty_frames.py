"""Frames of tensors without elements obey the rules of other frames, although no chunk of them is decoded."""

from pathlib import Path

import pytest

from ckptz.errors import CorruptionError
from ckptz.numpy import load_file
from tests.support.cli_support import ckptz
from tests.support.spec_files import File, Frame, plan

# A delta of shape [0] in a file without a base.
ORPHAN = File({"w": Frame(plan(dtype="F32", predictor=1, mode=2, shape=(0,)), (), b"", "F32", (0,), 0)})


@pytest.fixture
def orphan(tmp_path: Path) -> Path:
    path = tmp_path / "orphan.ckptz"
    path.write_bytes(ORPHAN.bytes())
    return path


def test_loading_checks_frames_without_elements(orphan: Path) -> None:
    with pytest.raises(CorruptionError, match="needs a base"):
        load_file(orphan)


@pytest.mark.parametrize("verb", ["restore", "verify"])
def test_verbs_check_frames_without_elements(verb: str, orphan: Path) -> None:
    run = ckptz(verb, orphan, fails=True)
    assert run.exit_code == 3
    assert "needs a base" in run.error
