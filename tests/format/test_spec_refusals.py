"""Every refusal that the specification lists has inputs that must meet it.

Here are those too large for vectors; test_vectors.py reads the others, spec/vectors/invalid.
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
OF_HEADERS = re.compile(r"I[234]|E[178]|T([1-6]|11)|Q([1-5]|9|1[01])|F([3-9]|10)")
COMMITTED = {vector.name for vector in INVALID}


def _params() -> list[Any]:
    """Inputs that are no vectors, and those of known leniencies."""
    params = []
    for refusal, inputs in CASES.items():
        for i, case in enumerate(inputs):
            accepted = isinstance(case, lenient)
            reason = f"errata {case.erratum}; once refused, delete its row and this mark" if accepted else ""
            marks = [pytest.mark.xfail(reason=reason)] if accepted else []
            if f"invalid/{refusal}-{i}" not in COMMITTED:
                params.append(pytest.param(refusal, case, id=f"{refusal}-{i}", marks=marks))
    return params


@pytest.mark.parametrize(("refusal", "case"), _params())
def test_the_reader_refuses_what_is_too_large_for_a_vector(refusal: str, case: Input, tmp_path: Path) -> None:
    with pytest.raises(ERROR_OF_KIND[refusals()[refusal][1]]):
        read_files(case.files(), tmp_path)


@pytest.mark.parametrize("refusal", [*filter(OF_HEADERS.fullmatch, CASES)])
def test_the_header_of_a_frame_is_refused_whatever_the_index_says(refusal: str) -> None:
    """A file may be refused for its index before its frame is read."""
    for case in CASES[refusal]:
        frame = case if isinstance(case, Frame) else case.frames["w"]
        with pytest.raises(ERROR_OF_KIND[refusals()[refusal][1]]):
            frame.parse()


def test_the_longest_header_is_read(tmp_path: Path) -> None:
    text = b"{}".ljust(100_000_000)
    data = len(text).to_bytes(8, "little") + text
    assert read_files(Raw(data).files(), tmp_path) == {}
    with pytest.raises(ERROR_OF_KIND["corrupt"]):
        read_files(Raw((len(text) + 1).to_bytes(8, "little") + text + b" ").files(), tmp_path)


def test_the_longest_outer_vectors_are_read() -> None:
    plan = outer_frame((0, 1 << 24), vectors(b"") + constant_vector(ONE)).parse().plan
    assert (len(plan.outer.rows), len(plan.outer.columns)) == (0, 1 << 24)
    assert (plan.outer.columns == 0x3F800000).all()


def test_what_the_inputs_are_made_from_is_accepted(tmp_path: Path) -> None:
    assert read_files(File().files(), tmp_path) == {"w": b"\1\2\3\4"}
    assert read_files(Raw(plain_file({"__metadata__": None}, b"")).files(), tmp_path) == {}


def test_every_refusal_has_an_input_and_every_input_a_refusal() -> None:
    assert set(refusals()) == set(CASES)


def test_the_errata_are_those_that_the_inputs_show() -> None:
    shown = {
        (case.erratum, refusal)
        for refusal, inputs in CASES.items()
        for case in inputs
        if isinstance(case, lenient)
    }
    section = page("errata.md")["readers"]
    rows = table("errata.md", "readers", "id", "refusal") if any(section.tables) else []
    assert {(row["id"], row["refusal"]) for row in rows} == shown
