"""Charts as SVG, drawn by Vega-Lite when the page is written; the page needs no script to show them.

Colours are variables of the page's style, so that they follow its dark or light. Field names are our own:
what comes from files is only ever data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from ckptz.pages.words import cut

Values = Sequence[Mapping[str, Any]]
Spec = dict[str, Any]

COLOURS: Final = tuple(f"var(--c{n})" for n in range(1, 7))
MOST_KINDS, MOST_CELLS = 80, 4000  # of a heat map: its rows, and tensors in all

_TEXT: Final = {"labelColor": "var(--soft)", "labelFontSize": 12}
_TITLE: Final = {"titleColor": "var(--soft)", "titleFontSize": 12, "titleFontWeight": "normal"}
_AXIS: Final = {"domain": False, "ticks": False, "labelPadding": 6, "gridColor": "var(--line)"}
_CONFIG: Final = {
    **{"background": None, "font": "system-ui, sans-serif", "view": {"stroke": None}},
    "axis": {**_TEXT, **_TITLE, **_AXIS, "labelLimit": 300, "titlePadding": 8},
    "axisX": {"grid": False, "labelAngle": 0, "labelOverlap": "greedy"},
    "axisY": {"tickCount": 4},
    "legend": {**_TEXT, **_TITLE, "orient": "top", "columns": 2, "symbolStrokeWidth": 0, "columnPadding": 25},
    "header": {**_TEXT, "title": None, "labelAnchor": "start", "labelAngle": 0, "labelOrient": "top"},
    "point": {"filled": True, "size": 45, "opacity": 1},
    "bar": {"stroke": "var(--card)", "strokeWidth": 0.6},
    "line": {"strokeWidth": 1.6, "aria": False},
}
STEPS: Final = {"field": "step", "type": "ordinal", "sort": None}
NAMES: Final = {"field": "name", "type": "nominal", "sort": "-x", "title": None, "axis": {"minExtent": 90}}
LINES: Final = ("line", "point")
BYTES: Final[Spec] = {"axis": {"format": "~s", "grid": True}}  # 2k, 3M: on top of B
LOGARITHMIC: Final[Spec] = {"scale": {"type": "log"}, "axis": {"format": "~r"}}


class Chart(NamedTuple):
    """One chart, ready for a page."""

    title: str
    about: str  # a sentence or two
    svg: str
    is_wide: bool = False  # has a row of its own, and is never made smaller


def number(field: str, title: str | None = None, **how: Any) -> Spec:
    """Encode a number; its axis is called as the field is, or otherwise."""
    return {"field": field, "type": "quantitative", "title": title or field, **how}


def draw(title: str, about: str, values: Values, marks: Sequence[str], y: Spec, **how: Any) -> Chart:
    """Draw marks of Vega-Lite, one above the other; `y` encodes the vertical axis.

    Of `how`, `x` encodes the other axis, `by` is a field that colours tell apart, some of whose values have
    `known` ones, `limit` is a number on the vertical axis and its name. The rest are more encodings.
    """
    by, known, limit = how.pop("by", None), how.pop("known", {}), how.pop("limit", None)
    frame = {"width": 360, "height": how.pop("height", 230)}  # a phone's width: texts keep their size there
    colour: Spec = {"value": COLOURS[0]}
    if by is not None:
        found = list(dict.fromkeys(value[by] for value in values))
        colour = {"field": by, "type": "nominal", "legend": {"title": None} if len(found) > 1 else None}
        used = [known.get(name, COLOURS[i % 6]) for i, name in enumerate(found)]
        colour["scale"] = {"domain": [cut(name) for name in found], "range": used}
    of = {"x": STEPS, "y": y, "color": colour, **how}
    layers: list[Spec] = [{"mark": mark, "encoding": of} for mark in marks]
    if limit is not None:
        once: Spec = {"data": {"values": [{}]}, "encoding": {"y": {"datum": limit[0]}}}
        text = {"type": "text", "align": "right", "dy": -7, "text": limit[1], "x": "width", "fontSize": 12}
        lines = ({"type": "rule", "strokeDash": [5, 4]}, text)
        layers += [{**once, "mark": {**mark, "color": "var(--bad)", "aria": False}} for mark in lines]
    fit = {"type": "fit", "contains": "padding"}
    return Chart(title, about, _svg(values, {**frame, "autosize": fit, "layer": layers}))


def _svg(values: Values, spec: Spec) -> str:
    import vl_convert

    shown = [{key: cut(v) if isinstance(v, str) else v for key, v in row.items()} for row in values]
    return vl_convert.vegalite_to_svg({"padding": 4, "config": _CONFIG, "data": {"values": shown}, **spec})


def heat_map(title: str, about: str, items: Values, quotient: str) -> list[Chart]:
    """Draw numbers by kind of tensor and layer as depths of a colour; nothing where there are none.

    Each item is a tensor: `group`, `kind`, `layer`, `top` and `bottom`; the number of a cell is the quotient
    of the sums, as an expression of Vega. Kinds beyond `MOST_KINDS` are left out.
    """
    kinds = list(dict.fromkeys((item["group"], item["kind"]) for item in items))[:MOST_KINDS]
    shown = [item for item in items if (item["group"], item["kind"]) in kinds][:MOST_CELLS]
    if not shown:
        return []
    room = min(182, 7 * max(len(kind) for _, kind in kinds))  # browsers' fonts are wider than the library's
    label = (
        "length(datum.label) > 26 ? '…' + slice(datum.label, -25) : datum.label"  # names differ at the end
    )
    order = [*sorted({item["layer"] for item in shown} - {"none"}, key=int), "none"]
    depth: Spec = {"scale": {"type": "log", "range": [0.1, 1]}, "legend": {"format": ".3~r", "columns": 5}}
    x: Spec = {"field": "layer", "type": "ordinal", "sort": order, "axis": {"orient": "top"}}
    y: Spec = {"field": "kind", "type": "nominal", "title": None, "sort": None}
    y["axis"] = {"minExtent": room, "labelExpr": label}
    cells = {"mark": {"type": "rect", "color": COLOURS[0]}, "width": {"step": 24}, "height": {"step": 20}}
    cells["encoding"] = {"x": x, "y": y, "opacity": number("value", "pale to deep", **depth)}
    sums = [{"op": "sum", "field": name, "as": name} for name in ("top", "bottom")]
    summed = {"aggregate": sums, "groupby": ["group", "kind", "layer"]}
    spec: Spec = {"transform": [summed, {"calculate": quotient, "as": "value"}], "spec": cells}
    spec |= {"facet": {"row": {"field": "group", "sort": None}}, "resolve": {"scale": {"y": "independent"}}}
    return [Chart(title, about, _svg(shown, spec), is_wide=room + 24 * len(order) > 380)]
