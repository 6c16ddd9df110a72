"""A checkpoint says with what links it was trained, and loading it for others warns."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from ckptz.torch import load_file, save_file
from ckptz.wire import PolicyWarning, policy_metadata


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "top10.ckptz"
    save_file({"w": torch.ones(4)}, path, policy_metadata("paper_top10"))
    return path


def test_loading_a_topk_model_without_its_links_warns_why(saved: Path) -> None:
    with pytest.warns(PolicyWarning, match="have only seen the greatest 10%"):
        assert load_file(saved)["w"].tolist() == [1, 1, 1, 1]


def test_loading_it_with_its_links_does_not(saved: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_file(saved, link_policy="paper_top10")
        save_file({"w": torch.ones(4)}, tmp_path / "plain.ckptz", {"a": "b"})
        load_file(tmp_path / "plain.ckptz")
