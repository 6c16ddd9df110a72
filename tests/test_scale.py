"""The study for GPUs, tried without one: an arm of a toy, and the table of what is not measured yet."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from bench.core.measure import read_rows
from bench.studies import restarts, scale


@pytest.mark.apps
@pytest.mark.parametrize("arm", scale.TARGETS)
def test_an_arm_restarts_and_says_what_it_stored(
    arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "CACHE", tmp_path)
    own = scale.plan(scale.TINY, "cpu", first=3, every=1, n=4)
    [found] = restarts.rows_of(own, [arm], 0, only_known=False)
    row = scale.row(arm, found)
    assert row["restarts"] == 2
    assert math.isfinite(found["loss_change_percent, held out"])
    assert float(str(row["smaller, with anchor"]).rstrip("x")) > 3
    # Nothing that is not measured is in the row's place.
    rows = scale.with_row([], row)
    assert [one["verdict"] for one in rows if one["arm"] != arm] == [scale.NOT_MEASURED] * 2
    assert [one for one in rows if one["arm"] == arm] == [row]


def test_tokens_are_pairs_of_bytes() -> None:
    text = torch.tensor(list(b"abcdabxyz"), dtype=torch.uint8)
    frequent = [int.from_bytes(b"ab", "little"), int.from_bytes(b"cd", "little")]
    assert scale.as_tokens(text, frequent).tolist() == [0, 1, 0, 2]


def test_the_table_has_a_row_for_every_arm() -> None:
    assert [row["arm"] for row in read_rows("scale")] == list(scale.TARGETS)
