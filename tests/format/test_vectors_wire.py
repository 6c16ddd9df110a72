"""The messages of spec/vectors/wire are decoded or refused as the manifest says; damaged ones are refused."""

import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptz.errors import WireError
from ckptz.format.dtypes import dtype_of
from ckptz.wire import LinkPolicy
from ckptz.wire.endpoint import Link
from ckptz.wire.header import HEADER_BYTES, Direction
from ckptz.wire.state import MessageKey
from tests.support import wire_reference
from tests.support.cli_support import flipped
from tests.support.spec_support import table
from tests.support.vector_support import FOLDER, sessions

Row = dict[str, Any]
GOOD = [row for row in sessions() if "needs" in row]
BROKEN = [row for row in sessions() if "breaks" in row]
MAX_BYTES = 4096


def name_of(row: Row) -> str:
    return str(row["name"])


def link_of(row: Row) -> Link:
    """Create the receiving end of the session."""
    policy = LinkPolicy.from_json(json.dumps(row["policy"]))
    return Link(row["src"], row["dst"], policy, kernels=wire_reference)


def receive(link: Link, row: Row, message: Row, data: bytes) -> Any:
    """Decode the bytes of one message to the patterns of its tensor."""
    direction = Direction[message["direction"].upper()]
    key = MessageKey(message["step"], message["microbatch"], is_eval=message["eval"])
    array = np.frombuffer(data, np.uint8)
    return link.receive(direction, array, dtype_of(row["dtype"]), tuple(row["shape"]), key)


def bytes_of(message: Row) -> bytes:
    """Read a message, and check its digest and size."""
    data = Path(FOLDER / message["path"]).read_bytes()
    assert hashlib.sha256(data).hexdigest() == message["sha256"]
    assert len(data) <= MAX_BYTES
    return data


@pytest.mark.parametrize("row", GOOD, ids=name_of)
def test_a_session_decodes_to_the_tensors_of_the_manifest(row: Row) -> None:
    link = link_of(row)
    for message in row["messages"]:
        patterns = receive(link, row, message, bytes_of(message))
        assert hashlib.sha256(patterns.tobytes()).hexdigest() == message["tensor_sha256"]


@pytest.mark.parametrize("row", BROKEN, ids=name_of)
def test_the_last_message_of_a_broken_session_is_refused(row: Row) -> None:
    link = link_of(row)
    *earlier, last = row["messages"]
    for message in earlier:
        receive(link, row, message, bytes_of(message))
    with pytest.raises(WireError):
        receive(link, row, last, bytes_of(last))


def test_every_rule_has_a_session_that_needs_it_and_one_that_breaks_it() -> None:
    listed = {row["id"] for row in table("08-wire.md", "refusals", "id", "refuse", "when")}
    assert listed == {rule for row in GOOD for rule in row["needs"]}
    assert listed == {row["breaks"] for row in BROKEN}


# --- damage -------------------------------------------------------------------------------------


def damaged(data: bytes, n_flipped: int, stride: int) -> Iterator[bytes]:
    """Yield strict prefixes, and copies with a bit of the first `n_flipped` bytes flipped; 1 in `stride`."""
    first = zlib.crc32(data) % stride
    yield from (data[:n] for n in range(first, len(data), stride))
    yield from flipped(data, range(first, 8 * n_flipped, stride))


@pytest.mark.parametrize(
    ("max_flipped", "stride"),
    [(HEADER_BYTES, 3), pytest.param(MAX_BYTES, 1, marks=pytest.mark.slow)],
    ids=["header", "all"],
)
@pytest.mark.parametrize("row", GOOD, ids=name_of)
def test_damaged_messages_are_refused_without_changing_the_link(
    row: Row, max_flipped: int, stride: int
) -> None:
    """After the damaged messages, the intact one is still decoded."""
    link = link_of(row)
    for message in row["messages"]:
        data = bytes_of(message)
        for damaged_data in damaged(data, min(max_flipped, len(data)), stride):
            with pytest.raises(WireError):
                receive(link, row, message, damaged_data)
        patterns = receive(link, row, message, data)
        assert hashlib.sha256(patterns.tobytes()).hexdigest() == message["tensor_sha256"]
