"""Frames with maps decode to the values of the reference, also while the CPU flushes subnormals to zero."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from ckptz.errors import UnsupportedError
from ckptz.format import values as values_module
from ckptz.format.dtypes import DType, dtype_of
from ckptz.format.plan import Domain, Plan, Predictor, QuantizationMap
from ckptz.format.sources import PATTERN_TYPES
from tests.support import reference
from tests.support.frame_support import (
    RULE_SETS,
    Case,
    build_case,
    cases,
    expected_patterns,
    random_patterns,
    random_table,
    round_trip,
)
from tests.support.spec_cases import quantized
from tests.support.spec_files import Frame

# The first example may wait for kernels to be compiled.
NO_DEADLINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("n", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_frames_decode_as_the_reference_does(n: int) -> None:
    @given(cases())
    @settings(NO_DEADLINE, max_examples=n)
    def check(case: Case) -> None:
        np.testing.assert_array_equal(round_trip(case), expected_patterns(case))

    check()


@pytest.mark.usefixtures("flush_mode")
@pytest.mark.parametrize("names", RULE_SETS, ids=" and ".join)
@pytest.mark.parametrize("predictor", list(Predictor))
@pytest.mark.parametrize("domain", [Domain.LINEAR, Domain.BITS])
def test_every_domain_predictor_and_context_rule_decodes_as_the_reference_does(
    domain: Domain, predictor: Predictor, names: list[str]
) -> None:
    for dtype in ("F32", "BF16", "F16"):
        rng = np.random.default_rng(5)
        case = build_case(rng, dtype_of(dtype), (6, 7), domain, predictor, list(names), 42)
        np.testing.assert_array_equal(round_trip(case), expected_patterns(case))


@pytest.mark.parametrize("predictor", Predictor)
@pytest.mark.parametrize("domain", [Domain.LINEAR, Domain.BITS])
@pytest.mark.parametrize("dtype", [dtype_of("F32"), dtype_of("BF16")], ids=["F32", "BF16"])
def test_few_patterns_are_decoded_without_expanding_the_map(
    dtype: DType, domain: Domain, predictor: Predictor
) -> None:
    """A header of a few kilobytes may describe a map of a million entries for a tensor of four patterns.

    700 patterns of a map of 40 x 30 entries do not expand it, 1400 may; both decode to the same patterns.
    """
    rng, (n_rows, n_codes), n = np.random.default_rng(5), (40, 30), 700
    for table in (random_table(rng, domain, (n_rows, n_codes), dtype) for _ in range(6)):
        quant_map = QuantizationMap(table, rng.permutation(n_rows), zero_code=3)
        plan = Plan(quant_map=quant_map, domain=domain, predictor=predictor)
        codes, labels = rng.integers(0, n_codes, n).astype(np.uint8), rng.integers(0, n_rows, n)
        is_outer = predictor in (Predictor.OUTER, Predictor.LOW_RANK)
        kind = reference.F32 if is_outer else values_module.FLOAT_KINDS[dtype.name]
        base = None if predictor is Predictor.ZERO else random_patterns(rng, kind, n)
        few, many = (np.empty(m, PATTERN_TYPES[dtype.pattern_bytes]) for m in (n, 2 * n))
        value_table = values_module.ValueTable(dtype, plan)
        value_table.decode(codes, labels, base, few)
        assert "entries" not in vars(value_table)
        value_table.decode(
            np.tile(codes, 2), np.tile(labels, 2), None if base is None else np.tile(base, 2), many
        )
        assert np.array_equal(np.tile(few, 2), many)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (quantized(flags=4), "mask of protected values, which this version of ckptz lacks"),
        (
            quantized(bytes(24), kind=1, n_codes=1, domain=2),
            "expanded table of integers, which this version of ckptz lacks",
        ),
    ],
)
def test_unsupported_parts_of_a_frame_are_refused_by_name(frame: Frame, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        frame.parse()
