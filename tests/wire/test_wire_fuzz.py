"""Mutants of messages with valid checksums, as from a faulty peer, and of link states.

Each is refused, or both kernels and the second receiver decode the same values; `test_bounds.py` runs more.
"""

import itertools
from collections import Counter

import pytest

from tests.support.bounds_worker import GOOD, outcome_of
from tests.support.wire_mutants import outcomes


@pytest.mark.parametrize("n", [500, pytest.param(50_000, marks=pytest.mark.slow)])
def test_mutants_are_refused_or_decode_the_same(n: int) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    for kind, outcome, about in itertools.islice(outcomes(3, outcome_of), n):
        assert outcome in GOOD, about
        counts[kind, outcome] += 1
    for kind in ("message", "state"):
        assert min(counts[kind, outcome] for outcome in ("accepted", "refused")) > n // 100
