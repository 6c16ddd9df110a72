"""The pages of the specification as data: sections, tables and code."""

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
    """The lines from one heading to the next heading of any level."""

    anchor: str
    lines: list[str] = field(default_factory=list)

    @property
    def tables(self) -> list[Table]:
        """Every table of the section, as one dict per row."""
        return [_table(block) for block in _blocks(self.lines)]


def slug(heading: str) -> str:
    """Return the anchor of a heading on GitHub and on the site."""
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
    """Split a table's row into its cells, without code marks; `\\|` is a literal bar."""
    parts = re.split(r"(?<!\\)\|", line.strip().strip("|"))
    return [part.strip().strip("`").replace("\\|", "|") for part in parts]


def _table(block: list[str]) -> Table:
    names = cells(block[0])
    return [dict(zip(names, cells(line), strict=True)) for line in block[2:]]


@functools.cache
def page(name: str) -> dict[str, Section]:
    """Return the sections of a page by anchor, in order."""
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
    """Return the only table of a section that has these columns."""
    matches = [t for t in page(name)[anchor].tables if set(columns) <= set(t[0])]
    assert len(matches) == 1, f"{name}#{anchor} has {len(matches)} tables with columns {columns}"
    return matches[0]


def pages() -> list[str]:
    """List the names of all pages."""
    return sorted(path.name for path in SPEC.glob("*.md"))


def refusals() -> dict[str, tuple[str, str]]:
    """Return (page, kind) of every refusal of files by its id; tests of the wire check those of messages."""
    by_id: dict[str, tuple[str, str]] = {}
    for name in pages():
        if "refusals" not in page(name) or name == "08-wire.md":
            continue
        for row in table(name, "refusals", "id", "refuse", "kind"):
            assert row["id"] not in by_id, f"refusal {row['id']} is listed twice"
            by_id[row["id"]] = name, row["kind"]
    return by_id


def hex_bytes(text: str) -> bytes:
    """Parse bytes as the pages write them; `00 01 ... 27` counts up by one."""
    if text == "(empty)":
        return b""
    if match := re.fullmatch(r"([0-9a-f]{2}) .* \.\.\. ([0-9a-f]{2})", text):
        return bytes(range(int(match[1], 16), int(match[2], 16) + 1))
    return bytes.fromhex(text)


def numbers(text: str) -> list[int]:
    """Parse integers separated by spaces or commas."""
    return [int(part, 0) for part in re.split(r"[ ,]+", text) if part]


def block_with(page: Path, words: str) -> Any:
    """Compile the only Python block of a page that contains `words`."""
    blocks = [b for b in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL) if words in b]
    assert len(blocks) == 1
    return compile(blocks[0], page.name, "exec", dont_inherit=True)


def python_of(page: Path) -> str:
    """Return all Python blocks of a page as one text."""
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL))
