"""The pages of the specification as data: headings, anchors and tables."""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SPEC = ROOT / "spec"

Row = dict[str, str]
Table = list[Row]


@dataclass
class Section:
    """What stands under one heading, up to the next of any level."""

    anchor: str
    lines: list[str] = field(default_factory=list)

    @property
    def tables(self) -> list[Table]:
        """Every table, one dict a row."""
        return [_table(block) for block in _blocks(self.lines)]


def slug(heading: str) -> str:
    """The anchor that a heading gets where the pages are shown."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def _blocks(lines: list[str]) -> Iterator[list[str]]:
    block: list[str] = []
    for line in [*lines, ""]:
        if line.startswith("|"):
            block.append(line)
        elif block:
            yield block
            block = []


def cells(line: str) -> list[str]:
    """The cells of a table's row, without code marks; `\\|` stands for the bar itself."""
    parts = re.split(r"(?<!\\)\|", line.strip().strip("|"))
    return [part.strip().strip("`").replace("\\|", "|") for part in parts]


def _table(block: list[str]) -> Table:
    names = cells(block[0])
    return [dict(zip(names, cells(line), strict=True)) for line in block[2:]]


@functools.cache
def page(name: str) -> dict[str, Section]:
    """The sections of a page by anchor, in order."""
    sections: dict[str, Section] = {}
    current = Section("")
    for line in (SPEC / name).read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"#+ (.+)", line):
            current = Section(slug(match[1]))
            assert current.anchor not in sections, f"{name} has the heading {match[1]!r} twice"
            sections[current.anchor] = current
        current.lines.append(line)
    return sections


def table(name: str, anchor: str, *columns: str) -> Table:
    """The one table of a section that has these columns."""
    found = [t for t in page(name)[anchor].tables if set(columns) <= set(t[0])]
    assert len(found) == 1, f"{name}#{anchor} has {len(found)} tables with columns {columns}"
    return found[0]


def pages() -> list[str]:
    """All pages."""
    return sorted(path.name for path in SPEC.glob("*.md"))


def refusals() -> dict[str, tuple[str, str]]:
    """(page, kind) of every refusal of files, by id; those of messages have tests of their own."""
    found: dict[str, tuple[str, str]] = {}
    for name in pages():
        if "refusals" not in page(name) or name == "08-wire.md":
            continue
        for row in table(name, "refusals", "id", "refuse", "kind"):
            assert row["id"] not in found, f"refusal {row['id']} is listed twice"
            found[row["id"]] = name, row["kind"]
    return found


def hex_bytes(text: str) -> bytes:
    """Bytes as the pages write them: `00 01 ... 27` goes up in ones."""
    if text == "(empty)":
        return b""
    if match := re.fullmatch(r"([0-9a-f]{2}) .* \.\.\. ([0-9a-f]{2})", text):
        return bytes(range(int(match[1], 16), int(match[2], 16) + 1))
    return bytes.fromhex(text)


def numbers(text: str) -> list[int]:
    """Integers separated by spaces or commas."""
    return [int(part, 0) for part in re.split(r"[ ,]+", text) if part]


def block_with(page: Path, words: str) -> Any:
    """The one block of Python of a page that has these words, compiled."""
    found = [b for b in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL) if words in b]
    assert len(found) == 1
    return compile(found[0], page.name, "exec", dont_inherit=True)


def python_of(page: Path) -> str:
    """The Python of a page, one block behind the other."""
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL))
