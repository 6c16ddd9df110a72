"""What notebooks show of reports: a table of their numbers, and of some a heat map or a list."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from ckptz.pages.facts import (
    bits_map,
    changes_map,
    checkpoints_table,
    file_facts,
    size_tiles,
    tiles,
    trials_table,
)
from ckptz.pages.html import Html, el
from ckptz.pages.page import style
from ckptz.pages.words import cut, size

Fields = Mapping[str, Any]


def shown(report: Any) -> str:
    """Give a report as HTML, without scripts."""
    fields = msgspec.to_builtins(report)
    parts = _PARTS.get(type(report).__name__, _facts)(fields)
    return el("div", el("style", Html(style())), parts, class_="ckptz")


def _facts(fields: Fields) -> Html:
    """Show the plain fields of any report."""
    plain = {
        name: value
        for name, value in fields.items()
        if not isinstance(value, dict | list | tuple) and value is not None
    }
    rows = [
        (el("dt", name.replace("_", " ")), el("dd", _value(name, value))) for name, value in plain.items()
    ]
    return el("dl", rows, class_="facts")


def _value(name: str, value: object) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{size(value)} ({value:,} bytes)"
    return f"{value:.4g}" if isinstance(value, float) else cut(str(value), 200)


def _searched(fields: Fields | None) -> list[Html | None]:
    return [] if fields is None else [_facts(fields), trials_table(fields)]


_PARTS: Final[Mapping[str, Callable[[Fields], object]]] = {
    "InspectReport": lambda fields: [tiles(*size_tiles(fields)), file_facts(fields), bits_map(fields)],
    "LogReport": lambda fields: [tiles(*size_tiles(fields)), checkpoints_table(fields)],
    "DiffReport": lambda fields: [_facts(fields), changes_map(fields)],
    "SearchReport": _searched,
    "CompressReport": lambda fields: [_facts(fields), _searched(fields["search"])],
}
