"""Formats sizes, ratios and names for people, and reports as a table for notebooks."""

from __future__ import annotations

import math
from dataclasses import fields
from html import escape
from typing import Any, Final

UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")

ROLES: Final = {
    "weight": "weights",
    "exp_avg": "first moments",
    "exp_avg_sq": "second moments",
    "factor": "factored second moments",
    "momentum": "momentum",
    "other": "the rest",
}


def printable(text: str) -> str:
    """Escape control characters and other characters that do not print."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def finite_or_none(value: float) -> float | None:
    """Return a number for a report as a built-in float, or None if it is not finite."""
    return float(value) if math.isfinite(value) else None


def format_bytes(n_bytes: float) -> str:
    """Format a number of bytes in decimal units, such as "1.23 MB"."""
    for unit in UNITS[:-1]:
        if n_bytes < 999.5:
            return f"{n_bytes:.3g} {unit}" if unit != "B" else f"{n_bytes:.0f} B"
        n_bytes /= 1000
    return f"{n_bytes:.4g} {UNITS[-1]}"


def format_ratio(stored_bytes: int, tensor_bytes: int) -> str:
    """Format a compression ratio, such as "2x smaller, 0.5000 of raw"."""
    if not tensor_bytes:
        return "no tensor bytes"
    share = f"{stored_bytes / tensor_bytes:.4f} of raw"
    if f"{stored_bytes / tensor_bytes:.3g}" == "1":
        return f"1.0x, nothing gained, {share}"
    if stored_bytes > tensor_bytes:
        return f"{format_factor(stored_bytes / tensor_bytes)} larger, {share}"
    return f"{format_factor(tensor_bytes / stored_bytes)} smaller, {share}" if stored_bytes else share


def format_factor(factor: float) -> str:
    """Format a factor with three significant digits, such as "12.2x"; from 1000 without decimals."""
    return f"{factor:,.0f}x" if factor >= 1000 else f"{factor:.3g}x"


def shorten(text: str, n: int = 100) -> str:
    """Shorten a text from a file to `n` characters, and escape characters that do not print."""
    return printable(text) if len(text) <= n else f"{printable(text[:n])}... ({len(text)} characters)"


def format_percent(share: float | None) -> str:
    """Format a share as a percentage with three significant digits; None as a dash."""
    return "–" if share is None else f"{100 * share:.3g} %"


def format_reduction(tensor_bytes: int, stored_bytes: int) -> str:
    """Format a compression ratio without its share, such as "2x smaller"; a dash if there are no bytes."""
    if not tensor_bytes or not stored_bytes:
        return "–"
    factor = tensor_bytes / stored_bytes
    return f"{format_factor(factor)} smaller" if factor >= 1 else f"{format_factor(1 / factor)} larger"


def heading(name: str) -> str:
    """Return the heading for a field of a report."""
    special = {
        "tensor_bytes": "raw",
        "stored_bytes": "stored",
        "ratio": "times smaller",
        "drop": "of the budget",
        "is_met": "budget kept",
        "is_feasible": "budget kept",
        "config": "settings",
        "exact": "value of the exact tensors",
        "values": "measured",
        "n_only_a": "only in A",
        "n_only_b": "only in B",
        "n_values": "plain values",
        "n_values_changed": "plain values changed",
        "has_same_metadata": "same metadata",
    }
    return special.get(name) or name.removeprefix("n_").removeprefix("is_").replace("_", " ")


def field_text(name: str, value: Any) -> str:
    """Format the value of a report's field; its name decides the unit."""
    if value is None or isinstance(value, bool):
        return "–" if value is None else "yes" if value else "no"
    if isinstance(value, dict):
        item_name = "share" if name == "coders" else ""
        label = heading if name == "config" else str  # other keys are names from files
        items = (
            f"{shorten(label(key), 40)} {field_text(item_name, item)}" for key, item in value.items() if item
        )
        return ", ".join(items) or "none"
    if isinstance(value, list | tuple):
        return (" × " if name == "shape" else ", ").join(field_text("", item) for item in value) or "–"
    if isinstance(value, str):
        return shorten(value, 300)
    return _number_text(name, value)


def _number_text(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith(("share", "relative_change", "error", "drop")):
        return format_percent(value)
    if isinstance(value, int):
        return str(value) if name == "step" else f"{value:,}"
    return f"{value:.4g}"


# --- reports -------------------------------------------------------------------------------------


def fields_of(report: Any) -> dict[str, Any]:
    """Return the fields of a report by name."""
    return {field.name: getattr(report, field.name) for field in fields(report)}


def facts_of(report: Any) -> dict[str, str]:
    """Return headings and values of the non-empty fields of a report as text, without lists of records."""
    facts: dict[str, str] = {}
    for name, value in fields_of(report).items():
        items = value if isinstance(value, list | tuple) else ()
        has_records = not all(isinstance(item, str | int | float | None) for item in items)
        if value not in (None, ()) and not has_records:
            facts.setdefault(heading(name), field_text(name, value))
    return facts


class Report:
    """Base class of report dataclasses, which notebooks show as a table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Return the report as a table in HTML."""
        facts = facts_of(self).items()
        cells = (f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in facts)
        return f"<table>{''.join(cells)}</table>"
