"""Fixtures that several test modules share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli_support import Chain, a_state, ckptz, write_plain


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    made = Chain(tmp_path / "run")
    made.folder.mkdir()
    write_plain(made.first, a_state(), {"step": "1"})
    write_plain(made.second, a_state(drift=0.01), {"step": "2"})
    ckptz("compress", made.first, made.second, "--chain", "--jobs", 1)
    return made
