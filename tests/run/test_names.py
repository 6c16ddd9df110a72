"""Names of files in run folders, and the kind and step that each name means."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptz.run.deletion import remove_checkpoints
from ckptz.run.names import is_of_state
from ckptz.run.residuals import residuals_in, residuals_of
from ckptz.run.step_files import is_residual_name

DIGITS = "1c4958cf768197da"


@pytest.mark.parametrize(
    ("name", "is_state"),
    [
        ("optimizer.ckptz", True),
        ("optimizer_1.bin", True),
        ("random_states_0.pkl", True),
        (f"optimizer.exact-{DIGITS}.ckptz", True),
        (f"step=8.state-{DIGITS}.ckptz", True),
        (f"step=8.state-{DIGITS}.exact-{DIGITS}.ckptz", False),
        ("step=8.state-1.ckptz", False),
        ("step=8.ckpt", False),
        ("model.ckptz", False),
        ("optimizer.exact-1.ckptz", False),
    ],
)
def test_files_that_only_a_resume_needs_are_told_by_name(name: str, is_state: bool) -> None:
    assert is_of_state(name) == is_state


def test_only_names_with_a_digest_are_residuals(tmp_path: Path) -> None:
    """A checkpoint that a user calls `best.exact-copy.ckptz` is not one of `best.ckptz`, whose go with it."""
    lossy, own, other = (tmp_path / f"best{end}.ckptz" for end in ("", ".exact-copy", f".exact-{'5' * 16}x"))
    residual = tmp_path / f"best.exact-{'a5' * 8}.ckptz"
    for path in (lossy, own, other, residual):
        path.write_bytes(b"")
    assert residuals_of(lossy) == residuals_in(tmp_path) == [residual]
    assert [is_residual_name(path.name) for path in (lossy, own, other, residual)] == [False] * 3 + [True]
    remove_checkpoints([lossy])
    assert sorted(tmp_path.iterdir()) == sorted([own, other])
