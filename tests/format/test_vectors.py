"""The vectors of the specification are up to date, cover all rules, and are read as their manifest says."""

import hashlib
import runpy
from collections import Counter
from pathlib import Path

import pytest

from tests.support.spec_support import SPEC, refusals
from tests.support.vector_support import ERROR_OF_KIND, FOLDER, INVALID, VALID, Vector, read_path, vectors

MAX_BYTES = 4096


def name_of(vector: Vector) -> str:
    return vector.name


# --- the set ------------------------------------------------------------------------------------


def test_the_committed_vectors_are_those_that_make_vectors_writes() -> None:
    expected = runpy.run_path(str(SPEC / "make_vectors.py"))["render"]()
    committed = {
        path.relative_to(FOLDER).as_posix(): path.read_bytes()
        for name in ("valid", "invalid", "chain", "wire")
        for path in (FOLDER / name).rglob("*")
        if path.is_file()
    }
    committed["manifest.json"] = (FOLDER / "manifest.json").read_bytes()
    assert committed.keys() == expected.keys(), "run: python spec/make_vectors.py"
    assert [path for path in expected if expected[path] != committed[path]] == []


def test_vectors_have_at_most_4096_bytes_and_the_digest_of_the_manifest() -> None:
    for vector in vectors():
        for row, path in zip(vector.row["files"], vector.paths, strict=True):
            data = path.read_bytes()
            assert len(data) <= MAX_BYTES
            assert hashlib.sha256(data).hexdigest() == row["sha256"], path


def test_every_rule_has_a_vector_that_needs_it_and_one_that_breaks_it() -> None:
    needed = {rule for vector in VALID for rule in vector.row["needs"]}
    broken = Counter(vector.row["breaks"] for vector in INVALID)
    assert set(refusals()) == needed
    assert set(refusals()) == set(broken)


def test_every_vector_names_the_page_and_the_kind_of_its_rule() -> None:
    for vector in INVALID:
        page, kind = refusals()[vector.row["breaks"]]
        assert (vector.row["page"], vector.row["error"]) == (f"{page}#refusals", kind)
        assert set(vector.row["also"]) <= set(refusals())


# --- reading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", VALID, ids=name_of)
def test_a_valid_vector_decodes_to_the_tensors_of_the_manifest(vector: Vector, tmp_path: Path) -> None:
    tensors, _ = read_path(vector.paths[0], tmp_path)
    decoded = [
        {"name": name, "dtype": dtype, "shape": list(shape), "sha256": hashlib.sha256(data).hexdigest()}
        for name, (dtype, shape, data) in tensors.items()
    ]
    expected = sorted(vector.row["tensors"], key=lambda row: row["name"])
    assert sorted(decoded, key=lambda row: row["name"]) == expected


@pytest.mark.parametrize("vector", INVALID, ids=name_of)
def test_an_invalid_vector_is_refused_with_the_error_of_the_manifest(vector: Vector, tmp_path: Path) -> None:
    spool = tmp_path if vector.row.get("when") in ("sharding", "tree") else None
    with pytest.raises(ERROR_OF_KIND[vector.row["error"]]):
        read_path(vector.paths[0], spool)
    if spool:
        read_path(vector.paths[0])  # valid for a reader that ignores the record
