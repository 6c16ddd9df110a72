"""Fixtures that several test modules share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from cli_support import a_state, ckptz, write_plain


@dataclass(frozen=True)
class Chain:
    """Two checkpoints of a run: plain files, and an anchor with a delta in the same folder."""

    folder: Path

    @property
    def first(self) -> Path:
        return self.folder / "step-1.safetensors"

    @property
    def second(self) -> Path:
        return self.folder / "step-2.safetensors"

    @property
    def anchor(self) -> Path:
        return self.folder / "step-1.ckptz"

    @property
    def delta(self) -> Path:
        return self.folder / "step-2.ckptz"


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    made = Chain(tmp_path / "run")
    made.folder.mkdir()
    write_plain(made.first, a_state(), {"step": "1"})
    write_plain(made.second, a_state(drift=0.01), {"step": "2"})
    ckptz("compress", made.first, made.second, "--chain", "--jobs", 1)
    return made
