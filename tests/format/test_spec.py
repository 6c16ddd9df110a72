"""The specification: its registry and field tables agree with the code, and its links have targets."""

import re
from typing import Any

import pytest

from ckptz.foreign import folders
from ckptz.format import (
    bits,
    context_rules,
    envelope,
    frame,
    frequency,
    index,
    plan,
    reader,
    sources,
    streams,
)
from ckptz.format.context_rules import RuleId
from ckptz.format.dtypes import DTYPES
from ckptz.format.plan import Domain, PlaneMode, Predictor
from ckptz.format.streams import LANE_CHOICES, CoderId
from ckptz.kernels import floats
from ckptz.store import resolve
from tests.support.spec_support import ROOT, SPEC, page, pages, refusals, slug, table

KINDS_OF_REFUSAL = {row["kind"] for row in table("00-conventions.md", "kinds-of-refusal", "kind", "meaning")}
JSON_NESTING = 256  # levels that a reader must accept; our parser accepts more


# --- registry -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("anchor", "enum"),
    [
        ("coders", CoderId),
        ("domains", Domain),
        ("predictors", Predictor),
        ("plane-modes", PlaneMode),
        ("context-rules", RuleId),
        ("table-kinds", frame.TableKind),
    ],
)
def test_the_registry_lists_the_ids_of_the_code(anchor: str, enum: Any) -> None:
    listed = {int(row["id"]): row["name"] for row in table("registry.md", anchor, "id", "name")}
    assert listed == {member.value: member.name.lower().replace("_", "-") for member in enum}


def test_the_registry_lists_the_dtypes_of_the_code() -> None:
    rows = [tuple(row.values()) for row in table("registry.md", "dtypes", "id", "float")]
    known = sorted(DTYPES.values(), key=lambda d: d.id)
    assert rows == [
        (str(d.id), d.name, str(d.bits), str(d.pattern_bytes), "yes" if d.is_float else "no") for d in known
    ]


def test_the_registry_lists_flags_features_and_lanes_of_the_code() -> None:
    flags = {row["name"]: int(row["value"]) for row in table("registry.md", "frame-flags", "value")}
    assert flags == {"zero": frame.FLAG_ZERO, "escape": frame.FLAG_ESCAPE}
    assert {row["name"] for row in table("registry.md", "features", "name")} == index.KNOWN_FEATURES
    lanes = [(int(row["index"]), int(row["lanes"])) for row in table("registry.md", "lanes", "lanes")]
    assert lanes == list(enumerate(LANE_CHOICES))


def test_the_registry_lists_the_limits_of_the_code() -> None:
    limits = {row["limit"]: int(row["value"]) for row in table("registry.md", "limits", "limit")}
    assert limits.pop("JSON nesting") == JSON_NESTING
    assert limits == {
        "Zstandard window bytes": streams.MAX_ZSTD_WINDOW,
        "envelope header bytes": envelope.MAX_HEADER_BYTES,
        "index bytes": index.MAX_INDEX_BYTES,
        "patterns of a group": index.MAX_GROUP,
        "dimensions": frame.MAX_DIMS,
        "elements": frame.MAX_ELEMENTS,
        "chunk patterns": sources.CHUNK_VALUES,
        "JSON openings and commas": envelope.MAX_JSON_VALUES,
        "labels and levels of all context rules of a frame": context_rules.MAX_INDICES,
        "context rules": context_rules.MAX_RULES,
        "contexts": context_rules.MAX_CONTEXTS,
        "depth of named tensors": reader.MAX_SOURCE_DEPTH,
        "frequency tables of a stream": context_rules.MAX_TABLES,
        "frequency sum": frequency.SCALE,
        "Huffman code length": floats.HUFFMAN_BITS,
        "Exp-Golomb order of a table": frequency.MAX_ORDER,
        "Exp-Golomb low bits": floats.MAX_GOLOMB_BITS,
        "varint bytes": bits.MAX_VARINT_BYTES,
        "map rows": plan.MAX_ROWS,
        "map codes": plan.MAX_CODES,
        "elements of all outer vectors of a frame": frame.MAX_OUTER,
        "rank": context_rules.MAX_RANK,
        "context shift": context_rules.MAX_SHIFT,
        "chain depth": resolve.MAX_DEPTH,
        "file name bytes": folders.MAX_NAME_BYTES,
        "file path parts": folders.MAX_DEPTH,
    }


def test_json_of_the_nesting_in_the_registry_is_parsed() -> None:
    text = b'{"a":' + b"[" * (JSON_NESTING - 1) + b"]" * (JSON_NESTING - 1) + b"}"
    assert envelope.strict_json(text, "here")


def test_the_newest_version_in_the_pages_is_that_of_the_code() -> None:
    newest = table("versions.md", "of-the-format", "version")[0]
    assert (newest["version"], newest["frame version"]) == (index.FORMAT_VERSION, str(frame.FRAME_VERSION))
    readme = (SPEC / "README.md").read_text()
    text = table("versions.md", "of-the-text", "text")[0]["text"]
    assert f"**Format version {newest['version']}**, text of this version {text}." in readme


@pytest.mark.parametrize(
    ("anchor", "struct"),
    [
        ("index", index.Index),
        ("tensor-entries", index.TensorEntry),
        ("lossy-record", index.LossyRecord),
        ("quality-record", index.QualityRecord),
        ("inline-bases", index.InlineBase),
        ("sharding", index.Sharding),
    ],
)
def test_the_pages_list_the_fields_of_the_index(anchor: str, struct: Any) -> None:
    rows = table("06-container.md", anchor, "field", "JSON")
    assert [row["field"] for row in rows] == list(struct.__struct_fields__)
    may_be_missing = {row["field"] for row in rows if "may be missing" in row["JSON"]}
    n_required = len(struct.__struct_fields__) - len(struct.__struct_defaults__)
    assert may_be_missing == set(struct.__struct_fields__[n_required:])


def test_the_pages_list_the_fields_of_the_base_and_the_keys_of_the_envelope() -> None:
    base = [row["field"] for row in table("07-chain.md", "base-reference", "field", "JSON")]
    assert base == list(index.BaseRef.__struct_fields__)
    keys = [row["key"] for row in table("06-container.md", "envelope", "key", "value")]
    assert keys == list(index.envelope_metadata([], b""))


# --- links --------------------------------------------------------------------------------------


def test_every_reference_in_the_sources_to_the_specification_has_a_target() -> None:
    n_references = 0
    for path in (p for folder in ("ckptz", "cli", "tests", "spec") for p in (ROOT / folder).rglob("*.py")):
        for name, anchor in re.findall(r"spec/([\w-]+\.md)(?:#([\w-]+))?", path.read_text()):
            n_references += 1
            assert (SPEC / name).is_file(), f"{path}: there is no spec/{name}"
            assert not anchor or anchor in page(name), f"{path}: spec/{name} has no #{anchor}"
    assert n_references > 30


@pytest.mark.parametrize("name", pages())
def test_every_link_of_a_page_has_a_target(name: str) -> None:
    text = (SPEC / name).read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        file, _, anchor = target.partition("#")
        assert not file or (SPEC / file).is_file(), f"{name} links to {target}"
        assert not anchor or anchor in page(file or name), f"{name} links to {target}"


@pytest.mark.parametrize("name", [name for name in pages() if re.match(r"0\d-", name)])
def test_pages_of_the_format_do_not_restrict_encoders_or_mention_code(name: str) -> None:
    text = (SPEC / name).read_text()
    assert "An encoder may choose anything that decodes" in text
    assert not re.search(r"ckptz/|\.py\b|numpy|numba", text)


def test_every_refusal_has_a_known_kind_and_the_next_number() -> None:
    listed = refusals()
    for name, kind in listed.values():
        assert kind in KINDS_OF_REFUSAL, f"{name}: {kind}"
    for letter in {refusal[0] for refusal in listed}:
        ids = [refusal for refusal in listed if refusal.startswith(letter)]
        assert ids == [f"{letter}{i}" for i in range(1, len(ids) + 1)]


def test_anchors_of_headings_are_lower_case_with_hyphens() -> None:
    assert slug("Nothing is believed before it is bounded") == "nothing-is-believed-before-it-is-bounded"
    assert slug("XXH64") == "xxh64"
