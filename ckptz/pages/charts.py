"""Charts as SVG, drawn by Vega-Lite when the page is written; the page needs no script to show them.

Colours are variables of the page's style, so that they follow its dark or light. Each mark carries its
numbers in words, which screen readers say and the page's script shows where one points. Field names are our
own: what comes from files is only ever data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Final, TypeVar

from ckptz.errors import ConfigError
from ckptz.pages.html import Html, el
from ckptz.pages.words import UNITS

Values = Sequence[Mapping[str, Any]]
Spec = dict[str, Any]
T = TypeVar("T")

WIDTH, HEIGHT = 440, 240  # of a whole chart; pages scale it
COLOURS: Final = tuple(f"var(--c{n})" for n in range(1, 7))
KIND_COLOURS: Final = dict(zip(("anchor", "delta", "rebased", "plain", "exact"), COLOURS, strict=False))
OTHER: Final = "var(--soft)"
MOST_MARKS: Final = 400  # of one chart: more cannot be told apart

NAMES: Final = {"minExtent": 105}  # room that names of bars have, so that all charts of them are alike
_SOFT: Final = {"labelColor": "var(--soft)", "labelFontSize": 11}
_FIT: Final = {"type": "fit", "contains": "padding"}
_CONFIG: Final = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        **_SOFT,
        **{"titleColor": "var(--soft)", "titleFontSize": 11, "titleFontWeight": "normal", "titlePadding": 8},
        **{"domain": False, "ticks": False, "labelPadding": 6, "gridColor": "var(--line)", "labelLimit": 150},
    },
    "axisX": {"grid": False, "labelAngle": 0, "labelOverlap": "greedy"},
    "axisY": {"tickCount": 4},
    "legend": {
        **_SOFT,
        **{"orient": "top", "title": None, "symbolSize": 70, "symbolStrokeWidth": 0},
        **{"labelLimit": 300, "columnPadding": 10, "offset": 10},
    },
    "point": {"filled": True, "size": 50, "opacity": 1},
    "bar": {"stroke": "var(--card)", "strokeWidth": 0.6},
    "line": {"strokeWidth": 1.6},
    "rule": {"color": "var(--soft)"},
}


def loaded() -> ModuleType:
    """Load the library that draws.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import vl_convert
    except ModuleNotFoundError:
        needed = "a report draws with vl-convert-python"
        raise ConfigError(f"{needed}; install it with: pip install 'ckptz[report]'") from None
    return vl_convert


def figure(title: str, about: str, spec: Spec) -> Html:
    """Draw one chart with its title and a sentence about it."""
    whole = {"width": WIDTH, "height": HEIGHT, "autosize": _FIT, "config": _CONFIG, "padding": 4, **spec}
    svg = loaded().vegalite_to_svg(whole)
    opening = el("svg", tabindex="0", role="group", aria_label=title).removesuffix("></svg>")
    drawn = Html(svg.replace("<svg", opening, 1))
    return el("figure", el("figcaption", el("b", title), el("span", about)), el("div", drawn, class_="chart"))


def thinned(values: Sequence[T]) -> tuple[Sequence[T], str]:
    """Leave out all but every n-th of too many values, the last one kept; and what to say of that."""
    every = -(-len(values) // MOST_MARKS)
    if every <= 1:
        return values, ""
    return values[::-1][::every][::-1], f" Every {every}th is drawn."


def unit_of(n_bytes: float) -> tuple[str, float]:
    """Choose the unit for numbers of bytes up to this one: its name and its bytes."""
    power = next((i for i in range(len(UNITS) - 1) if n_bytes < 1000 ** (i + 1)), len(UNITS) - 1)
    return UNITS[power], float(1000**power)


def colours(field: str, range_of: Mapping[str, str], found: Sequence[str]) -> Spec:
    """Give marks a colour by the values of a field that were found; no legend for a single one."""
    legend = {} if len(found) > 1 else {"legend": None}
    scale = {"domain": list(found), "range": [range_of.get(value, OTHER) for value in found]}
    return {"field": field, "type": "nominal", "scale": scale, **legend}


def in_order(values: Values, field: str) -> list[str]:
    """Give the values of a field, each once, in the order in which they come."""
    return list(dict.fromkeys(value[field] for value in values))


def _steps(values: Values) -> Spec:
    scale = {"domain": in_order(values, "step")}
    return {"field": "step", "type": "ordinal", "title": None, "sort": None, "scale": scale}


def _words() -> Spec:
    return {"field": "words", "type": "nominal"}


def _numbers(field: str, title: str, **how: object) -> Spec:
    return {"field": field, "type": "quantitative", "title": title, **how}


def stacked_bars(values: Values, title: str) -> Spec:
    """Draw bars over steps: `step`, `amount`, `colour` (one of the kinds of files), `words`."""
    found = in_order(values, "colour")
    return {
        "data": {"values": values},
        "mark": "bar",
        "encoding": {
            "x": _steps(values),
            "y": _numbers("amount", title),
            "color": colours("colour", KIND_COLOURS, found),
            "order": {"field": "order", "type": "quantitative"},
            "description": _words(),
        },
    }


def lines(values: Values, title: str, *, limit: float | None = None, limit_title: str = "") -> Spec:
    """Draw points joined by lines over steps: `step`, `amount`, `series`, `words`; with a limit as a line."""
    found = in_order(values, "series")
    by = colours("series", dict(zip(found, COLOURS, strict=False)), found)
    joined = {"x": _steps(values), "y": _numbers("amount", title), "color": by}
    layers: list[Spec] = [
        {"mark": {"type": "line", "aria": False}, "encoding": joined},
        {"mark": "point", "encoding": {**joined, "description": _words()}},
    ]
    if limit is not None:
        layers += limit_line("y", limit, limit_title)
    return {"data": {"values": values}, "layer": layers}


def limit_line(axis: str, limit: float, title: str) -> list[Spec]:
    """Draw a limit as a dashed line with its name."""
    at = {axis: {"datum": limit}}
    once: Spec = {"values": [{}]}
    dashed = {"type": "rule", "strokeDash": [5, 4], "color": "var(--bad)"}
    rule = {"data": once, "mark": dashed, "encoding": at}
    text = {"type": "text", "align": "right", "dy": -6, "color": "var(--bad)", "fontSize": 11}
    name = {"data": once, "mark": {**text, "text": title, "x": "width"}, "encoding": at}
    return [rule, name]


def links(values: Values) -> Spec:
    """Draw files as points and what each is stored against as lines to it.

    Fields: `step`, `depth`, `colour`, `hollow`, `words`, and `base_step` and `base_depth`, None of anchors.
    """
    found = in_order(values, "colour")
    by = colours("colour", KIND_COLOURS | {"missing": "var(--bad)"}, found)
    scale, axis = {"reverse": True, "nice": False, "padding": 12}, {"tickMinStep": 1, "format": "d"}
    at = {"x": _steps(values), "y": _numbers("depth", "deltas down to the anchor", axis=axis, scale=scale)}
    to_base = {"x2": {"field": "base_step"}, "y2": {"field": "base_depth"}}
    empty = {"stroke": {**by, "legend": None}, "fill": {"value": "var(--card)"}}
    layers = (  # which files, marks, how these are drawn
        ("datum.base_step != null", {"type": "rule", "aria": False, "opacity": 0.6}, to_base),
        ("!datum.hollow", "point", {"color": by, "description": _words()}),
        (
            "datum.hollow",
            {"type": "point", "filled": True, "strokeWidth": 1.6},
            {**empty, "description": _words()},
        ),
    )
    return {
        "data": {"values": values},
        "layer": [
            {"transform": [{"filter": which}], "mark": mark, "encoding": {**at, **how}}
            for which, mark, how in layers
        ],
    }


def shares(values: Values, title: str, colour_of: Mapping[str, str]) -> Spec:
    """Draw horizontal bars: `name`, `amount`, `colour`, `words`; names in the order in which they come."""
    names = in_order(values, "name")
    return {
        "height": 80 + 28 * len(names),
        "data": {"values": values},
        "mark": {"type": "bar", "height": {"band": 0.72}},
        "encoding": {
            "y": {"field": "name", "type": "nominal", "title": None, "sort": names, "axis": NAMES},
            "x": _numbers("amount", title, axis={"grid": True, "tickCount": 4}),
            "color": colours("colour", colour_of, in_order(values, "colour")),
            "description": _words(),
        },
    }


def trials(values: Values, title: str, top: float) -> Spec:
    """Draw the trials of a search: `size`, `used` (share of the budget in percent), `colour`, `words`."""
    by = {"kept": COLOURS[1], "broken": OTHER, "chosen": COLOURS[0]}
    points = {
        "mark": {"type": "point", "size": 90},
        "encoding": {
            "x": _numbers("size", title, scale={"zero": False}, axis={"tickCount": 5}),
            "y": _numbers("used", "% of the budget used", scale={"domain": [0, top]}),
            "color": colours("colour", by, in_order(values, "colour")),
            "description": _words(),
        },
    }
    return {"data": {"values": values}, "layer": [*limit_line("y", 100, "the budget"), points]}
