"""Initial inputs of the fuzzers: the vectors of the specification, or parts of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

VECTORS: Final = Path(__file__).resolve().parents[2] / "spec" / "vectors"


def sessions() -> list[dict[str, Any]]:
    """Return the rows of the manifest with valid messages of a link."""
    return [row for row in _manifest() if "messages" in row and "needs" in row]


def _manifest() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((VECTORS / "manifest.json").read_text())["vectors"]
    return rows


def _regions(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield (name, bytes) of each tensor in an envelope, up to the first error in its header."""
    at = 8 + int.from_bytes(data[:8], "little")
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        for name, row in json.loads(data[8:at]).items():
            if name != "__metadata__":
                begin, end = row["data_offsets"]
                yield name, data[at + begin : at + end]


def _parts(target: str, data: bytes) -> Iterator[bytes]:
    """Yield the parts of a file that a target parses."""
    if target in ("envelope", "container"):
        yield data
    for name, region in _regions(data):
        is_index = name == "__ckptz__.index"
        if target == ("index" if is_index else "frame"):
            yield region
        if target == "tree" and is_index and region[:1] == b"\0":
            with contextlib.suppress(ValueError, KeyError, TypeError):
                yield json.dumps(json.loads(region[1:])["tree"]).encode()


def seeds(target: str) -> Iterator[bytes]:
    """Yield the initial inputs of a target; those of `wire` start with one byte, the number of a session."""
    if target == "wire":
        for number, row in enumerate(sessions()):
            yield bytes((number,)) + (VECTORS / row["messages"][0]["path"]).read_bytes()
        return
    for row in _manifest():
        for file in row.get("files", [])[:1]:
            yield from _parts(target, (VECTORS / file["path"]).read_bytes())
