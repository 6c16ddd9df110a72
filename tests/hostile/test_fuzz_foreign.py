"""Readers of other formats, with 120 damaged inputs each; `make fuzz` runs as many as time allows."""

import os

import pytest

pytest.importorskip("torch")

from bench.fuzz.foreign import fuzz  # torch is optional
from bench.fuzz.foreign_targets import TARGETS

EXECUTIONS = 120


@pytest.mark.parametrize("target", TARGETS)
def test_damaged_inputs_cause_no_other_error_than_those_of_ckptz(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", os.fsync)  # the fuzzer replaces it; monkeypatch restores it
    run = fuzz(target, seed=7, executions=EXECUTIONS)
    assert not run.kinds
    assert run.executions == EXECUTIONS
    assert run.errors > EXECUTIONS // 10 or target in ("publisher", "roles"), "the mutations reach the reader"
