"""Every refusal that the specification lists has inputs that a reader must refuse for it.

This file reads the inputs that are too large for a vector; test_vectors.py reads spec/vectors/invalid.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.spec_cases import (
    ENTROPY,
    FRAME,
    INTEGERS,
    ONE,
    QUANTIZATION,
    TRANSFORMS,
    constant_vector,
    lenient,
    outer_frame,
)
from tests.support.spec_cases_files import CHAIN, CONTAINER
from tests.support.spec_cases_tree import TREE
from tests.support.spec_files import File, Frame, Input, Raw, plain_file, read_files, vectors
from tests.support.spec_support import page, refusals, table
from tests.support.vector_support import ERROR_OF_KIND, INVALID

CASES = INTEGERS | ENTROPY | TRANSFORMS | QUANTIZATION | FRAME | CONTAINER | CHAIN | TREE
HEADER_REFUSALS = re.compile(r"I[234]|E[178]|T([1-6]|11)|Q([1-5]|9|1[01])|F([3-9]|10)")
COMMITTED = {vector.name for vector in INVALID}


def _params() -> list[Any]:
    """Return the inputs that are no vectors; those that readers wrongly accept are expected failures."""
    params = []
    for refusal, inputs in CASES.items():
        for i, case in enumerate(inputs):
            is_accepted = isinstance(case, lenient)
            reason = (
                f"errata {case.erratum}; once refused, delete its row and this mark" if is_accepted else ""
            )
            marks = [pytest.mark.xfail(reason=reason)] if is_accepted else []
            if f"invalid/{refusal}-{i}" not in COMMITTED:
                params.append(pytest.param(refusal, case, id=f"{refusal}-{i}", marks=marks))
    return params


@pytest.mark.parametrize(("refusal", "case"), _params())
def test_inputs_that_are_too_large_for_a_vector_are_refused(
    refusal: str, case: Input, tmp_path: Path
) -> None:
    with pytest.raises(ERROR_OF_KIND[refusals()[refusal][1]]):
        read_files(case.files(), tmp_path)


@pytest.mark.parametrize("refusal", [*filter(HEADER_REFUSALS.fullmatch, CASES)])
def test_a_frame_header_is_refused_when_it_is_parsed_alone(refusal: str) -> None:
    """A complete file could be refused for its index, before its frame is read."""
    for case in CASES[refusal]:
        frame = case if isinstance(case, Frame) else case.frames["w"]
        with pytest.raises(ERROR_OF_KIND[refusals()[refusal][1]]):
            frame.parse()


def test_a_header_of_100_million_bytes_is_read_and_a_longer_one_refused(tmp_path: Path) -> None:
    text = b"{}".ljust(100_000_000)
    data = len(text).to_bytes(8, "little") + text
    assert read_files(Raw(data).files(), tmp_path) == {}
    with pytest.raises(ERROR_OF_KIND["corrupt"]):
        read_files(Raw((len(text) + 1).to_bytes(8, "little") + text + b" ").files(), tmp_path)


def test_outer_vectors_of_2_24_elements_are_read() -> None:
    plan = outer_frame((0, 1 << 24), vectors(b"") + constant_vector(ONE)).parse().plan
    assert (len(plan.outer.rows), len(plan.outer.columns)) == (0, 1 << 24)
    assert (plan.outer.columns == 0x3F800000).all()


def test_the_valid_files_that_inputs_are_variants_of_are_read(tmp_path: Path) -> None:
    assert read_files(File().files(), tmp_path) == {"w": b"\1\2\3\4"}
    assert read_files(Raw(plain_file({"__metadata__": None}, b"")).files(), tmp_path) == {}


def test_the_inputs_cover_exactly_the_listed_refusals() -> None:
    assert set(refusals()) == set(CASES)


def test_the_listed_errata_are_exactly_the_inputs_that_readers_accept() -> None:
    accepted = {
        (case.erratum, refusal)
        for refusal, inputs in CASES.items()
        for case in inputs
        if isinstance(case, lenient)
    }
    section = page("errata.md")["readers"]
    rows = table("errata.md", "readers", "id", "refusal") if any(section.tables) else []
    assert {(row["id"], row["refusal"]) for row in rows} == accepted
