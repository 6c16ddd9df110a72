"""The vectors of the specification: up to date, complete, and read as they say."""

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


def test_the_vectors_are_what_their_maker_writes() -> None:
    made = runpy.run_path(str(SPEC / "make_vectors.py"))["render"]()
    found = {
        path.relative_to(FOLDER).as_posix(): path.read_bytes()
        for name in ("valid", "invalid", "chain", "wire")
        for path in (FOLDER / name).rglob("*")
        if path.is_file()
    }
    found["manifest.json"] = (FOLDER / "manifest.json").read_bytes()
    assert found.keys() == made.keys(), "run: python spec/make_vectors.py"
    assert [path for path in made if made[path] != found[path]] == []


def test_the_vectors_are_as_small_as_their_page_says_and_their_digests_right() -> None:
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


# --- as they are --------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", VALID, ids=name_of)
def test_a_valid_vector_decodes_to_what_the_manifest_says(vector: Vector, tmp_path: Path) -> None:
    tensors, _ = read_path(vector.paths[0], tmp_path)
    found = [
        {"name": name, "dtype": dtype, "shape": list(shape), "sha256": hashlib.sha256(data).hexdigest()}
        for name, (dtype, shape, data) in tensors.items()
    ]
    by_name = sorted(vector.row["tensors"], key=lambda row: row["name"])
    assert sorted(found, key=lambda row: row["name"]) == by_name


@pytest.mark.parametrize("vector", INVALID, ids=name_of)
def test_an_invalid_vector_is_refused_as_the_manifest_says(vector: Vector, tmp_path: Path) -> None:
    follows = vector.row.get("when")
    spool = tmp_path if follows in ("sharding", "tree") else None
    with pytest.raises(ERROR_OF_KIND[vector.row["error"]]):
        read_path(vector.paths[0], spool)
    if spool:
        read_path(vector.paths[0])  # right for a reader that leaves the record alone
