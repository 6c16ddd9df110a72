"""Every refusal that the specification lists has inputs that must meet it, and the reader refuses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import zstandard
from spec_cases import (
    ENTROPY,
    FLAT_TABLE,
    FRAME,
    INFINITY,
    INTEGERS,
    LANE,
    ONE,
    QUANTIZATION,
    TRANSFORMS,
    Case,
    block_rule,
    classed,
    coded,
    escaped,
    lenient,
    quantized,
    row_rule,
    sparse,
    tables,
)
from spec_cases_files import CHAIN, CONTAINER, ChainCase, chain, packed_text
from spec_files import OWN, ZSTD, File, Frame, header_text, open_bytes, plain_file, plan
from spec_support import page, refusals, table

from ckptz.errors import (
    ChecksumError,
    CkptzError,
    CorruptionError,
    MissingBaseError,
    TruncatedError,
    UnsupportedError,
)

ERROR_OF_KIND: dict[str, type[CkptzError]] = {
    "truncated": TruncatedError,
    "checksum": ChecksumError,
    "corrupt": CorruptionError,
    "unsupported": UnsupportedError,
    "missing base": MissingBaseError,
}
CASES = INTEGERS | ENTROPY | TRANSFORMS | QUANTIZATION | FRAME | CONTAINER


def _params(cases: dict[str, list[Any]]) -> list[Any]:
    params = []
    for refusal, inputs in cases.items():
        for i, case in enumerate(inputs):
            accepted = isinstance(case, lenient)
            reason = f"errata {case.erratum}; once refused, delete its row and this mark" if accepted else ""
            marks = [pytest.mark.xfail(reason=reason)] if accepted else []
            params.append(pytest.param(refusal, case, id=f"{refusal}-{i}", marks=marks))
    return params


@pytest.mark.parametrize(("refusal", "case"), _params(CASES))
def test_the_reader_refuses(refusal: str, case: Case) -> None:
    with pytest.raises(ERROR_OF_KIND[refusals()[refusal][1]]):
        case()


@pytest.mark.parametrize(("refusal", "case"), _params(CHAIN))
def test_the_reader_refuses_a_chain(refusal: str, case: ChainCase, tmp_path: Path) -> None:
    with pytest.raises(ERROR_OF_KIND[refusals()[refusal][1]]):
        case(tmp_path)


def test_what_the_cases_are_made_from_is_accepted(tmp_path: Path) -> None:
    assert Frame().decode() == b"\1\2\3\4"
    assert File().read() == {"w": b"\1\2\3\4"}
    chain(tmp_path)


CHECKED = zstandard.ZstdCompressor(write_checksum=True).compress(bytes(4))
PERMITTED: dict[str, Case] = {
    "spaces behind the header": File(text=header_text(File().bytes()) + b" " * 5).read,
    "fields that are null": File(index={"metadata": None, "base": None, "tree": None, "step": None}).read,
    "a plain file with null metadata": lambda: open_bytes(plain_file({"__metadata__": None}, b"")),
    "a deflated index": File(packed=b"\1" + packed_text()).read,
    "the largest step": File(index={"step": (1 << 63) - 1}).read,
    "no tensors": File({}).read,
    "a tensor without units": Frame(plan(shape=(0, 5)), n_chunks=0).parse,
    "2^48 elements beside none": Frame(plan(shape=(1 << 48, 0)), n_chunks=0).parse,
    "a sparse stream without values": sparse(b"", b"").decode,
    "a sparse value that is common": sparse(b"\1", b"\0").decode,
    "a table of one code": coded(OWN, FLAT_TABLE + LANE).decode,
    "a checksum of Zstandard": coded(ZSTD, CHECKED).decode,
    "32 lanes for four codes": coded(OWN, FLAT_TABLE + b"\2" + LANE[1:] * 32).decode,
    "runs with the same table": classed(row_rule(2, bytes(4)), n_classes=2, rest=tables(1) + b"\1\0").parse,
    "tables that no class uses": classed(row_rule(2, bytes(4)), n_classes=2, rest=tables(2, 64)).parse,
    "a rule listed twice": classed(*[row_rule(2, bytes(4))] * 2, n_classes=4).parse,
    "a block beyond the tensor": classed(block_rule(2, 1 << 20, b"\1"), n_classes=2).decode,
    "an infinite entry that no code names": quantized(ONE + INFINITY).decode,
    "a zero code that is the escape code": quantized(flags=3, zero=b"\0", streams=escaped(ONE)).decode,
}


@pytest.mark.parametrize("case", PERMITTED.values(), ids=PERMITTED)
def test_the_reader_accepts_what_the_pages_permit(case: Case) -> None:
    case()


def test_every_refusal_has_an_input_and_every_input_a_refusal() -> None:
    assert set(refusals()) == set(CASES) | set(CHAIN)


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
