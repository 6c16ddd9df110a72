"""The vectors of the specification: up to date, complete, and read as they say, whole, cut and flipped."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from spec_support import SPEC, refusals
from vector_support import ERROR_OF_KIND, FOLDER, INVALID, VALID, Vector, read_bytes, read_path, vectors

from ckptz.errors import CkptzError, TruncatedError

MAX_BYTES, MAX_TOTAL, TYPICAL_BYTES = 4096, 1_000_000, 700
# A plain safetensors file has no checksums: a flipped bit of a value is another value.
GUARDED = [vector for vector in VALID if vector.name != "valid/plain-file"]
FLIPPED_IN_EVERY_RUN = 5  # every so many of them are flipped from end to end


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    """The script that writes the vectors."""
    spec = importlib.util.spec_from_file_location("make_vectors", SPEC / "make_vectors.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def name_of(vector: Vector) -> str:
    return vector.name


# --- the set ------------------------------------------------------------------------------------


def test_the_vectors_are_what_their_maker_writes(maker: ModuleType) -> None:
    made = maker.render()
    found = {
        path.relative_to(FOLDER).as_posix(): path.read_bytes()
        for name in ("valid", "invalid", "chain", "wire")
        for path in (FOLDER / name).rglob("*")
        if path.is_file()
    }
    found["manifest.json"] = (FOLDER / "manifest.json").read_bytes()
    assert found.keys() == made.keys(), "run: python spec/make_vectors.py"
    assert [path for path in made if made[path] != found[path]] == []


def test_the_vectors_are_small_and_their_digests_right() -> None:
    sizes = []
    for vector in vectors():
        for row, path in zip(vector.row["files"], vector.paths, strict=True):
            data = path.read_bytes()
            sizes.append(len(data))
            assert hashlib.sha256(data).hexdigest() == row["sha256"], path
    assert max(sizes) <= MAX_BYTES
    assert sum(sizes) + len((FOLDER / "manifest.json").read_bytes()) < MAX_TOTAL
    assert sorted(sizes)[len(sizes) // 2] < TYPICAL_BYTES


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
    spool = tmp_path if "when" in vector.row else None
    with pytest.raises(ERROR_OF_KIND[vector.row["error"]]):
        read_path(vector.paths[0], spool)
    if spool:
        read_path(vector.paths[0])  # right for a reader that leaves the record alone


# --- cut and flipped ----------------------------------------------------------------------------


def prefixes_are_refused(vector: Vector) -> None:
    path = vector.paths[0]
    data = path.read_bytes()
    for n in range(len(data)):
        with pytest.raises(CkptzError):
            read_bytes(data[:n], path.parent)


def test_every_strict_prefix_is_refused() -> None:
    for vector in VALID:
        prefixes_are_refused(vector)


@pytest.mark.slow
def test_every_strict_prefix_of_an_invalid_vector_is_refused() -> None:
    for vector in INVALID:
        if vector.row["breaks"] != "C5":  # without the byte behind its end the file is right
            prefixes_are_refused(vector)


def test_a_prefix_of_a_whole_file_is_truncated() -> None:
    data = (FOLDER / "valid" / "coder-stored.ckptz").read_bytes()
    for n in range(len(data)):
        with pytest.raises(TruncatedError):
            read_bytes(data[:n])


def flips_change_nothing_or_are_refused(vector: Vector) -> None:
    path = vector.paths[0]
    data = bytearray(path.read_bytes())
    whole, n_refused = read_bytes(bytes(data), path.parent), 0
    for i in range(8 * len(data)):
        data[i // 8] ^= 1 << i % 8
        try:
            found = read_bytes(bytes(data), path.parent)
            assert found == whole, f"{vector.name}: bit {i % 8} of byte {i // 8} changes what is read"
        except CkptzError:
            n_refused += 1
        data[i // 8] ^= 1 << i % 8
    assert n_refused > 6 * len(data), vector.name  # not spaces, for one


@pytest.mark.parametrize("vector", GUARDED[::FLIPPED_IN_EVERY_RUN], ids=name_of)
def test_a_flipped_bit_is_refused_or_changes_nothing(vector: Vector) -> None:
    flips_change_nothing_or_are_refused(vector)


@pytest.mark.slow
def test_a_flipped_bit_of_any_vector_is_refused_or_changes_nothing() -> None:
    for vector in GUARDED:
        flips_change_nothing_or_are_refused(vector)
