"""Files of every version of the format decode to the recorded digests; see tests/old/README.md."""

import hashlib
import json
from pathlib import Path

import pytest

from ckptz.format.byte_source import MemoryBytes
from ckptz.format.envelope import read_envelope
from ckptz.format.index import FORMAT_VERSION, KEY_VERSION
from ckptz.numpy import load_file

FOLDER = Path(__file__).parents[1] / "old"
FILES = sorted(FOLDER.glob("*/*.ckptz"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_an_old_file_decodes_to_its_recorded_digests(path: Path) -> None:
    expected = json.loads((path.parent / "digests.json").read_text())[path.name]
    assert {n: hashlib.sha256(t.tobytes()).hexdigest() for n, t in load_file(path).items()} == expected


def test_every_file_has_the_format_version_of_its_folder() -> None:
    assert {path.parent.name for path in FILES} >= {FORMAT_VERSION}
    for path in FILES:
        metadata = read_envelope(MemoryBytes(path.read_bytes())).metadata
        assert metadata[KEY_VERSION] == path.parent.name
