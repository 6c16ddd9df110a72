"""Optimizers of the package pytorch_optimizer resume bit for bit, or the save refuses them by name."""

from __future__ import annotations

import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.resumed_runs import Impossible, Run, check_resume

pytorch_optimizer = pytest.importorskip("pytorch_optimizer", reason="pip install pytorch_optimizer")

pytestmark = pytest.mark.apps
NAMES = pytorch_optimizer.get_supported_optimizers()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_optimizer_of_others_resumes(name: str, precision: str, tmp_path: Path) -> None:
    kind: Any = pytorch_optimizer.load_optimizer(name)
    makers = (
        ("several", kind),
        ("one", kind),
        ("one", lambda groups: kind([{"params": groups, "use_muon": True}])),
    )
    result, why = "", ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, (grouping, make) in enumerate(makers):
            try:
                result = check_resume(tmp_path / str(i), partial(Run, make, precision, grouping))
                break
            except Impossible as error:
                why = why or str(error)
    if not result:
        pytest.skip(f"does not step in this run: {why[:80]}")
    assert result == "equal" or result.startswith("refused: ")
    OUTCOMES[result.split(":")[0]] += 1


OUTCOMES: Counter[str] = Counter()


def test_most_of_them_ran() -> None:
    assert OUTCOMES["equal"] > len(NAMES)
