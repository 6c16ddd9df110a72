"""Names of files in run folders, and the kind and step that each name means."""

from __future__ import annotations

import pytest

from ckptz.run.names import is_of_state

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
