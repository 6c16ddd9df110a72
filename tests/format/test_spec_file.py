"""The annotated example of the specification is up to date and complete, and its file loads."""

import re
import runpy

import numpy as np
import safetensors.numpy

from ckptz.format.byte_source import MemoryBytes
from ckptz.store.resolve import open_checkpoint
from tests.support.spec_support import SPEC, page, table

FIELD_PAGES = ("02-entropy.md", "04-quantization.md", "05-frame.md", "06-container.md")
EXAMPLES = runpy.run_path(str(SPEC / "make_examples.py"))


def annotated_bytes() -> bytes:
    """Assemble the file from the tables and texts of the page, which must follow each other without gaps."""
    data = b""
    for section in page("examples.md").values():
        for lines in section.tables:
            for row in lines if "offset" in lines[0] else []:
                assert int(row["offset"]) == len(data), row
                data += bytes.fromhex(row["bytes"])
        text = "".join(line[4:] for line in section.lines if line.startswith("    "))
        if match := re.search(r"Bytes (\d+) to (\d+)", "\n".join(section.lines)):
            begin, end = int(match[1]), int(match[2])
            assert begin == len(data)
            data += text.encode().ljust(end + 1 - begin, b" ")
    return data


def test_the_page_is_up_to_date() -> None:
    page_text = (SPEC / "examples.md").read_text(encoding="utf-8")
    assert page_text == EXAMPLES["render"](), "run: python spec/make_examples.py"


def test_the_page_shows_every_byte_of_the_file() -> None:
    assert annotated_bytes() == EXAMPLES["build"]()[0]


def test_the_file_of_the_page_loads() -> None:
    data = annotated_bytes()
    tensors = open_checkpoint(MemoryBytes(data)).tensors
    rows = {row["tensor"]: row["patterns"].split() for row in table("examples.md", "decoded", "patterns")}
    assert rows.keys() == tensors.keys()
    for name, source in tensors.items():
        patterns = source.patterns(0, source.dtype.n_patterns(source.shape))
        assert patterns.tolist() == [int(pattern, 16) for pattern in rows[name]]
    assert np.array(tensors["weight"].patterns(17, 18)).view(np.float32).tolist() == [3.25]
    blobs = safetensors.numpy.load(data)
    assert set(blobs) == {"bias", "weight", "__ckptz__.index"}


def test_the_fields_of_the_file_are_defined_in_the_pages() -> None:
    defined = {
        row["field"]
        for name in FIELD_PAGES
        for section in page(name).values()
        for lines in section.tables
        for row in lines
        if "field" in row
    }
    annotated = {
        re.sub(r"^(stream \d+|context indices): ", "", row["field"])
        for section in page("examples.md").values()
        for lines in section.tables
        for row in lines
        if "offset" in row
    }
    assert len(annotated) > 30
    assert annotated - defined <= {"", "stream", "plain"}
