"""A few damaged inputs for each reader of other formats; `make fuzz` runs as many as time allows."""

import os

import pytest

pytest.importorskip("torch")

from bench.fuzz.foreign import fuzz  # torch is optional
from bench.fuzz.foreign_targets import TARGETS

EXECUTIONS = 120


@pytest.mark.parametrize("target", TARGETS)
def test_damage_ends_in_a_result_or_in_an_error_of_ours(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", os.fsync)  # the fuzzer sets it; monkeypatch restores it
    run = fuzz(target, seed=7, executions=EXECUTIONS)
    assert not run.kinds
    assert run.executions == EXECUTIONS
    assert run.errors > EXECUTIONS // 10 or target in ("publisher", "roles"), "the mutations reach the reader"
