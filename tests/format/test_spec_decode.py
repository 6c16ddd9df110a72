"""The program of spec/decode.md decodes every valid vector.

The names that the page assumes, such as `xxh64` or `cast`, come from the second decoder.
"""

import hashlib
import json
import math
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.second_decoder import files, frames
from tests.support.spec_support import SPEC, table
from tests.support.vector_support import VALID, Vector

STRUCT_CODES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "f64": "d"}


def registry(anchor: str, key: str = "id", value: str = "name") -> dict[int, str]:
    """Return two columns of a table of the registry."""
    return {int(row[key]): row[value] for row in table("registry.md", anchor, key, value)}


def assumed_names() -> dict[str, Any]:
    """Return the definitions that the page assumes, by name."""

    class Reading(frames.Cursor):
        def list(self, n: int, kind: str) -> list[Any]:
            return list(self.many(n, STRUCT_CODES[kind]))

        def __getattr__(self, kind: str) -> Any:
            return lambda: self.one(STRUCT_CODES[kind])

    def dtype(row: Any) -> Any:
        return SimpleNamespace(**row._asdict(), pattern=f"u{8 * row.size}", patterns=row.patterns)

    return {
        **{"r_of": Reading, "record": SimpleNamespace, "ceil": math.ceil, "prod": math.prod},
        **{"parse_json": json.loads, "inflate": zlib.decompress},
        "sha256": lambda data: hashlib.sha256(data).hexdigest(),
        "decode_zstandard": lambda data, n: frames.Stream(data).zstd(n),
        "bytes_of": lambda patterns, kind: frames.pack(kind.size, patterns),
        "dtype_of": lambda i: dtype(frames.DTYPE_OF_ID[i]),
        "dtype_named": lambda name: dtype(frames.DTYPE_OF_NAME[name]),
        "patterns_of": lambda dtype, shape: dtype.patterns(shape),
        "DOMAINS": registry("domains"),
        "PREDICTORS": registry("predictors"),
        "PLANE_MODES": registry("plane-modes"),
        "CLASS_RULES": registry("context-rules"),
        "TABLE_KINDS": registry("table-kinds"),
        "CODERS": registry("coders"),
        "LANES": {i: int(n) for i, n in registry("lanes", "index", "lanes").items()},
        "xxh64": frames.xxh64,
        "exp_golomb": lambda r, n, order: r.exp_golomb(n, order),
        "unzigzag": lambda z, w: z >> 1 ^ (2**w - 1 if z & 1 else 0),
        **{name: getattr(frames, name) for name in ("order", "unorder", "widen", "cast")},
        "f32": frames.nearest,
        "add": lambda a, b: frames.nearest(frames.number(a) + frames.number(b)),
        "product": lambda a, b: frames.nearest(frames.number(a) * frames.number(b)),
    }


@pytest.fixture(scope="module")
def program() -> dict[str, Any]:
    """Run the indented lines of the page as a program, and return its definitions."""
    page = (SPEC / "decode.md").read_text(encoding="utf-8")
    lines = [line[4:] if line.startswith("    ") else "" for line in page.splitlines()]
    names = assumed_names()
    exec(compile("\n".join(lines), "spec/decode.md", "exec"), names)
    return names


def base_finder(folder: Path, program: dict[str, Any]) -> Any:
    """Return the function `find_base` that the page assumes: the second decoder finds the file of a base."""

    def find_base(reference: dict[str, Any]) -> Any:
        delta = SimpleNamespace(path=folder / "delta.ckptz", base=reference)
        base = files.Shelf(2**30).find_base(delta)
        return program["tensors_of_file"](base.data, find_base)

    return find_base


@pytest.mark.parametrize("vector", VALID, ids=lambda vector: vector.name)
def test_the_program_of_the_page_decodes_every_valid_vector(vector: Vector, program: dict[str, Any]) -> None:
    path = vector.paths[0]
    tensors = program["tensors_of_file"](path.read_bytes(), base_finder(path.parent, program))
    digests = {}
    for name, tensor in tensors.items():
        size = (tensor.plan or tensor).dtype.size
        digests[name] = hashlib.sha256(frames.pack(size, program["decode_tensor"](tensor))).hexdigest()
    assert digests == {row["name"]: row["sha256"] for row in vector.row["tensors"]}
