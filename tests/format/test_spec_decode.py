"""The program of spec/decode.md is run as it stands there, on every valid vector."""

import hashlib
import json
import math
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.spec_support import SPEC, table
from tests.support.vector_support import VALID, Vector

PAGE = (SPEC / "decode.md").read_text(encoding="utf-8")
LETTERS = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "f64": "d"}


@pytest.fixture(scope="module")
def second() -> Iterator[Any]:
    """The decoder that was written from the pages, which has the arithmetic that the program is given."""
    sys.path.insert(0, str(SPEC / "decoder"))
    try:
        import ckptz_frame

        yield ckptz_frame
    finally:
        sys.path.remove(str(SPEC / "decoder"))


def names_of(full: str, key: str = "id", value: str = "name") -> dict[int, str]:
    """A table of the registry."""
    return {int(row[key]): row[value] for row in table("registry.md", full, key, value)}


def given(second: Any) -> dict[str, Any]:
    """What the page takes as given, by the names that it uses."""

    class Reading(second.Cursor):
        def list(self, n: int, kind: str) -> list[Any]:
            return list(self.many(n, LETTERS[kind]))

        def __getattr__(self, kind: str) -> Any:
            return lambda: self.one(LETTERS[kind])

    def dtype(row: Any) -> Any:
        return SimpleNamespace(**row._asdict(), pattern=f"u{8 * row.size}", patterns=row.patterns)

    return {
        **{"r_of": Reading, "record": SimpleNamespace, "ceil": math.ceil, "prod": math.prod},
        **{"parse_json": json.loads, "inflate": zlib.decompress},
        "sha256": lambda data: hashlib.sha256(data).hexdigest(),
        "decode_zstandard": lambda data, n: second.Stream(data).zstd(n),
        "bytes_of": lambda patterns, kind: second.pack(kind.size, patterns),
        "dtype_of": lambda i: dtype(second.DTYPE_OF_ID[i]),
        "dtype_named": lambda name: dtype(second.DTYPE_OF_NAME[name]),
        "patterns_of": lambda dtype, shape: dtype.patterns(shape),
        "DOMAINS": names_of("domains"),
        "PREDICTORS": names_of("predictors"),
        "PLANE_MODES": names_of("plane-modes"),
        "CLASS_RULES": names_of("context-rules"),
        "TABLE_KINDS": names_of("table-kinds"),
        "CODERS": names_of("coders"),
        "LANES": {i: int(n) for i, n in names_of("lanes", "index", "lanes").items()},
        "xxh64": second.xxh64,
        "exp_golomb": lambda r, n, order: r.exp_golomb(n, order),
        "unzigzag": lambda z, w: z >> 1 ^ (2**w - 1 if z & 1 else 0),
        **{name: getattr(second, name) for name in ("order", "unorder", "widen", "cast")},
        "f32": second.nearest,
        "add": lambda a, b: second.nearest(second.number(a) + second.number(b)),
        "product": lambda a, b: second.nearest(second.number(a) * second.number(b)),
    }


@pytest.fixture(scope="module")
def program(second: Any) -> dict[str, Any]:
    """The indented lines of the page, as a program."""
    lines = [line[4:] if line.startswith("    ") else "" for line in PAGE.splitlines()]
    names = given(second)
    exec(compile("\n".join(lines), "spec/decode.md", "exec"), names)
    return names


def find_in(folder: Path, program: dict[str, Any]) -> Any:
    """Resolve bases, which the page 07-chain leaves to the reader, by the decoder of the pages."""
    import ckptz_decode

    def find_base(reference: dict[str, Any]) -> Any:
        delta = SimpleNamespace(path=folder / "delta.ckptz", base=reference)
        found = ckptz_decode.Shelf(2**30).find_base(delta)
        return program["tensors_of_file"](found.data, find_base)

    return find_base


@pytest.mark.parametrize("vector", VALID, ids=lambda vector: vector.name)
def test_the_program_of_the_page_decodes_every_valid_vector(
    vector: Vector, program: dict[str, Any], second: Any
) -> None:
    path = vector.paths[0]
    tensors = program["tensors_of_file"](path.read_bytes(), find_in(path.parent, program))
    found = {}
    for name, tensor in tensors.items():
        size = (tensor.plan or tensor).dtype.size
        found[name] = hashlib.sha256(second.pack(size, program["decode_tensor"](tensor))).hexdigest()
    assert found == {row["name"]: row["sha256"] for row in vector.row["tensors"]}
