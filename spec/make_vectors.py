"""Writes spec/vectors: small files that a reader must decode or refuse, and what each of them shows.

    python spec/make_vectors.py

Only adds: what readers were tested with stays as it is. The inputs are made by hand in spec_valid.py and
spec_cases*.py of tests/support; the bytes, and the values that they decode to, are given there, not computed
by a reader. Files over 4 KB, which show a limit, are left to the test suite. Messages of links, spec_wire.py,
are made by the slow kernels that define ours.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ckptz.format.index import FORMAT_VERSION, KEY_FEATURES, version_of
from ckptz.wire.header import VERSION as MESSAGE_VERSION
from tests.support.spec_cases import ALSO, ENTROPY, FRAME, INTEGERS, QUANTIZATION, TRANSFORMS, lenient
from tests.support.spec_cases_files import CHAIN, CONTAINER
from tests.support.spec_cases_tree import TREE
from tests.support.spec_files import Files, Input
from tests.support.spec_support import refusals
from tests.support.spec_valid import VALID, Valid
from tests.support.spec_wire import WIRE, WIRE_REFUSED, Session

FOLDER = Path(__file__).with_name("vectors")
MAX_BYTES = 4096
INVALID: Mapping[str, list[Any]] = (
    INTEGERS | ENTROPY | TRANSFORMS | QUANTIZATION | FRAME | CONTAINER | CHAIN | TREE
)
# Rules of records and sections that a reader may leave alone.
FOLLOWED = {"C21": "sharding", **dict.fromkeys(("H5", "H6"), "base-metadata"), **dict.fromkeys(TREE, "tree")}

Row = dict[str, Any]


def _features(data: bytes) -> list[str]:
    """Return the features that a file requires of a reader, if they can be read."""
    text = data[8 : 8 + int.from_bytes(data[:8], "little")]
    try:
        return str(json.loads(text)["__metadata__"][KEY_FEATURES]).split(",")
    except (ValueError, TypeError, KeyError):
        return []


def _row(name: str, files: Files) -> Row:
    """Return the description of a vector; one of several files is a folder."""
    kept = name if len(files) > 1 else str(Path(name).parent)
    first = next(iter(files))
    stem = "" if len(files) > 1 else f"{Path(name).name}{Path(first).suffix}"
    rows = [
        {"path": f"{kept}/{stem or file}", "sha256": hashlib.sha256(data).hexdigest()}
        for file, data in files.items()
    ]
    features = _features(files[first])
    return {"name": name, "version": version_of(features), "features": features, "files": rows}


def _valid(name: str, vector: Valid) -> Row:
    tensors = [
        {"name": key, "dtype": dtype, "shape": list(shape), "sha256": hashlib.sha256(data).hexdigest()}
        for key, (dtype, shape, data) in vector.tensors().items()
    ]
    where = "chain" if vector.beside else "valid"
    return {**_row(f"{where}/{name}", vector.files()), "needs": vector.needs.split(), "tensors": tensors}


def _invalid(rule: str, number: int, files: Files) -> Row:
    page, kind = refusals()[rule]
    row = {
        **_row(f"invalid/{rule}-{number}", files),
        "breaks": rule,
        "also": ALSO.get(f"{rule}-{number}", []),
    }
    row |= {"error": kind, "page": f"{page}#refusals"}
    return row | ({"when": FOLLOWED[rule]} if rule in FOLLOWED else {})


def inputs() -> Iterator[tuple[str, int, Input]]:
    """Every input that must be refused, with its rule and its number."""
    for rule, cases in INVALID.items():
        for number, case in enumerate(cases):
            if not isinstance(case, lenient):
                yield rule, number, case


def vectors() -> Iterator[tuple[Row, Files]]:
    """All vectors: what the manifest says of each, and its files."""
    for name, vector in VALID.items():
        yield _valid(name, vector), vector.files()
    for rule, number, case in inputs():
        files = case.files()
        if max(map(len, files.values())) <= MAX_BYTES:
            yield _invalid(rule, number, files), files


def sessions() -> Iterator[tuple[str, Session, Row]]:
    """All sessions of links by name, and what they need or break."""
    for name, session in WIRE.items():
        yield name, session, {"needs": session.rules.split()}
    for rule, broken in WIRE_REFUSED.items():
        for number, session in enumerate(broken):
            yield f"{rule}-{number}", session, {"breaks": rule, "page": "08-wire.md#refusals"}


def _session(name: str, session: Session, shown: Row) -> tuple[Row, dict[str, bytes]]:
    """Return the description of a session, and its messages by path (broken ones end with a refused one)."""
    messages, files = [], {}
    for number, (message, plan, data, tensor) in enumerate(session.arrivals()):
        path = f"wire/{name}/{number}.bin"
        files[path] = data
        place = {"step": message.place.step, "microbatch": message.place.microbatch}
        place |= {"direction": message.direction.word, "eval": message.place.is_eval, "plan": plan}
        row = {"path": path, "sha256": hashlib.sha256(data).hexdigest(), **place}
        messages.append({**row, "tensor_sha256": hashlib.sha256(tensor).hexdigest()})
    if "breaks" in shown:
        del messages[-1]["tensor_sha256"]
    row = {"name": f"wire/{name}", "version": MESSAGE_VERSION, **session.describe(), **shown}
    return {**row, "messages": messages}, files


def render() -> dict[str, bytes]:
    """The contents of the folder by path."""
    out, rows = {}, []
    for row, files in vectors():
        rows.append(row)
        out |= {file["path"]: data for file, data in zip(row["files"], files.values(), strict=True)}
    for name, session, shown in sessions():
        row, messages = _session(name, session, shown)
        rows.append(row)
        out |= messages
    lines = ",\n".join(json.dumps(row, ensure_ascii=True) for row in rows)
    out["manifest.json"] = f'{{"version": "{FORMAT_VERSION}", "vectors": [\n{lines}\n]}}\n'.encode()
    return out


def main() -> None:
    """Add what is missing; vectors that are there never change."""
    rendered = render()
    kept = {path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("*/**/*") if path.is_file()}
    changed = [path for path in kept if (FOLDER / path).read_bytes() != rendered.get(path)]
    if changed:
        sys.exit(
            f"{min(changed)} and {len(changed) - 1} more would change: new cases go to the end of their list"
        )
    for path, data in rendered.items():
        target = FOLDER / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


if __name__ == "__main__":
    main()
