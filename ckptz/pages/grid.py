"""Heat maps of numbers by kind of tensor and layer, as tables, which screen readers and printers know."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ckptz.pages.html import Html, el, name_of

MOST_LAYERS: Final = 64  # columns; more layers share them
MOST_ROWS: Final = 80
FLATTEST: Final = 0.8  # numbers that differ by less than this of each other look alike
LEAST_SHARE: Final = 0.0005  # of all weight, that cells of the scale have
WITH_NUMBERS: Final = 16  # columns whose cells have room for their number
_NUMBER: Final = re.compile(r"(?<![^._/])\d{1,9}(?![^._/])")


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor's part in the number of its cell, which is the sum of `top` by the sum of `bottom`."""

    name: str  # of the tensor
    group: str  # heading that its row stands under
    top: float
    bottom: float


Cells = dict[int | None, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Row:
    group: str
    kind: str


def place_of(name: str) -> tuple[str, int | None]:
    """Split a tensor's name into its kind and its layer: the first number between dots, or None.

    >>> place_of("model.layers.3.mlp.experts.12.up.weight")
    ('model.layers.#.mlp.experts.#.up.weight', 3)
    """
    found = _NUMBER.search(name)
    return _NUMBER.sub("#", name), int(found[0]) if found else None


def heat_map(items: Iterable[Item], *, caption: str, unit: str, is_root: bool = False) -> Html | None:
    """Draw a heat map; None of no items.

    Args:
        items: tensors.
        caption: says what the numbers are.
        unit: "%" multiplies them by 100.
        is_root: the number of a cell is the root of its sums' quotient.
    """
    sums: dict[_Row, Cells] = {}
    for item in items:
        kind, layer = place_of(item.name)
        cells = sums.setdefault(_Row(item.group, kind), {})
        top, bottom = cells.get(layer, (0.0, 0.0))
        cells[layer] = top + item.top, bottom + item.bottom
    layers = sorted({layer for cells in sums.values() for layer in cells if layer is not None})
    spans = _spans(layers)
    rows = {row: _by_span(cells, spans) for row, cells in list(sums.items())[:MOST_ROWS]}
    factor, power = 100 if unit == "%" else 1, 0.5 if is_root else 1.0
    values = {
        row: {at: factor * (top / bottom) ** power for at, (top, bottom) in cells.items() if bottom}
        for row, cells in rows.items()
    }
    scale = _scale(rows, values)
    if scale is None:
        return None
    left_out = f" The first {MOST_ROWS} of {len(sums)} kinds of tensors." if len(sums) > MOST_ROWS else ""
    about = el("caption", el("span", caption, left_out))
    head = el(
        "thead",
        el(
            "tr",
            el("th", "kind of tensor", scope="col"),
            [el("th", "–".join(map(str, dict.fromkeys(span))), scope="col") for span in spans],
        ),
    )
    body = [
        _group(group, [(row, values[row]) for row in values if row.group == group], len(spans), scale)
        for group in dict.fromkeys(row.group for row in values)
    ]
    many = "heat dense" if len(spans) > WITH_NUMBERS else "heat"
    scale_bar = el(
        "p", f"{scale.low:.3g} ", el("i", aria_hidden="true"), f" {scale.high:.3g} {unit}", class_="scale"
    )
    return Html(
        el("div", el("table", about, head, body, class_=many), class_="wide", tabindex="0") + scale_bar
    )


@dataclass(frozen=True, slots=True)
class _Scale:
    """The numbers that have the palest and the deepest colour."""

    low: float
    high: float

    def depth(self, value: float) -> float:
        """Give how deep the colour of a number is, from 0 to 1."""
        if self.high <= self.low:
            return 0.5
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)


def _scale(rows: Mapping[_Row, Cells], values: Mapping[_Row, Mapping[int | None, float]]) -> _Scale | None:
    """Span the numbers of cells that weigh something: single values would take all of the colours."""
    total = sum(bottom for cells in rows.values() for _, bottom in cells.values())
    found = [
        value
        for row, cells in values.items()
        for at, value in cells.items()
        if rows[row][at][1] >= LEAST_SHARE * total
    ]
    return _Scale(min([*found, FLATTEST * max(found)]), max(found)) if found else None


def _spans(layers: Sequence[int]) -> list[tuple[int, int]]:
    """The columns: the first and the last layer of each."""
    n = -(-len(layers) // MOST_LAYERS) or 1
    return [(layers[i], layers[min(i + n, len(layers)) - 1]) for i in range(0, len(layers), n)]


def _by_span(cells: Cells, spans: Sequence[tuple[int, int]]) -> Cells:
    """Sum up the layers of each column; the key is its number, None for what stands in no layer."""
    column: dict[int, int] = {}
    for i, (first, last) in enumerate(spans):
        column |= {layer: i for layer in cells if layer is not None and first <= layer <= last}
    found: Cells = {}
    for layer, (top, bottom) in cells.items():
        at = None if layer is None else column[layer]
        before = found.get(at, (0.0, 0.0))
        found[at] = before[0] + top, before[1] + bottom
    return found


def _group(
    group: str, rows: Sequence[tuple[_Row, dict[int | None, float]]], n_columns: int, scale: _Scale
) -> Html:
    heading = el("tr", el("th", group, scope="colgroup", colspan=n_columns + 1, class_="group"))
    return el("tbody", heading, [_row(row.kind, cells, n_columns, scale) for row, cells in rows])


def _row(kind: str, cells: dict[int | None, float], n_columns: int, scale: _Scale) -> Html:
    alone = cells.get(None)
    shown = (
        [_cell(alone, scale, n_columns or 1)]
        if alone is not None
        else [_cell(cells.get(at), scale) for at in range(n_columns)]
    )
    return el("tr", el("th", name_of(kind), scope="row"), shown)


def _cell(value: float | None, scale: _Scale, n_columns: int = 1) -> Html:
    wide = n_columns if n_columns > 1 else None
    if value is None:
        return el("td", colspan=wide)
    depth = scale.depth(value)
    deep = "deep" if depth > 0.5 else None
    return el("td", el("span", f"{value:.3g}"), style=f"--t:{100 * depth:.0f}%", class_=deep, colspan=wide)
