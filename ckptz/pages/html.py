"""HTML from Python. Every text is escaped, so that nothing that a file says can become markup or a script."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Final

from ckptz.pages.words import cut

VOID: Final = frozenset({"meta", "input", "col"})
PACKED_FROM: Final = 1_000_000  # characters of JSON that are embedded compressed


class Html(str):
    """Text that is markup already; plain text becomes it only by escaping."""

    __slots__ = ()


def el(tag: str, *children: object, **attributes: object) -> Html:
    """Make an HTML element.

    Args:
        tag: its name.
        children: markup as it is, sequences of children, and anything else as escaped text; None is left out.
        attributes: `class_` is class, `data_v` is data-v; True is one without a value, None and False none.
    """
    given = "".join(_attribute(name, value) for name, value in attributes.items())
    return Html(f"<{tag}{given}>" if tag in VOID else f"<{tag}{given}>{join(children)}</{tag}>")


def _attribute(name: str, value: object) -> str:
    name = name.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{escape(_text(value))}"'


def join(children: Iterable[object]) -> Html:
    """Join markup and texts, which are escaped."""
    return Html("".join(map(_child, children)))


def _child(child: object) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    return join(child) if isinstance(child, list | tuple) else escape(_text(child), quote=False)


def _text(value: object) -> str:
    """Write any value; half characters, as names of files may have on disk, as escapes."""
    return str(value).encode("utf-8", "backslashreplace").decode()


def name_of(text: str) -> Html:
    """Show a name from a file: as code, cut where it is absurdly long, whole when pointed at."""
    short = cut(text)
    return el("code", short, title=None if short == text else cut(text, 1000))


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    caption: str,
    class_: str = "",
    most: int = 2000,
) -> Html:
    """Make a table whose columns can be sorted.

    Args:
        headings: of the columns; those that begin with "#" hold numbers, which are set flush right.
        rows: cells; of a pair the first is shown, and the second is what sorting goes by.
        caption: says what it holds, for screen readers too.
        class_: more classes.
        most: rows that are shown; the caption says how many there are.
    """
    rows = list(rows)
    shown = f" (the first {most} of {len(rows)})" if len(rows) > most else ""
    kinds = ["n" if heading.startswith("#") else None for heading in headings]
    head = [
        el("th", heading.lstrip("#"), scope="col", class_=kind)
        for heading, kind in zip(headings, kinds, strict=True)
    ]
    body = [
        el("tr", [_cell(cell, kind) for cell, kind in zip(row, kinds, strict=True)]) for row in rows[:most]
    ]
    inner = (el("caption", el("span", caption, shown)), el("thead", el("tr", head)), el("tbody", body))
    return el("div", el("table", *inner, class_=f"sortable {class_}".strip()), class_="wide", tabindex="0")


def _cell(cell: object, kind: str | None) -> Html:
    shown, key = cell if isinstance(cell, tuple) else (cell, None)
    return el("td", shown, class_=kind, data_v=key)


def json_text(document: Any) -> str:
    """Write JSON that can stand in a script element: no text of a file can end the element."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("&", "\\u0026")


def embedded(document: Any, id_: str) -> Html:
    """Write a document into a page as JSON, which other programs read too; much of it zlib and base64."""
    text = json_text(document)
    if len(text) < PACKED_FROM:
        return el("script", Html(text), type="application/json", id_=id_)
    packed = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    return el("script", Html(packed), type="application/json", id_=id_, data_packed="zlib+base64")
