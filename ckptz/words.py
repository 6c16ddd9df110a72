"""Numbers and names as people read them, and the short table that notebooks show of a report."""

from __future__ import annotations

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
    """Write control characters, and what else does not print, as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size(n_bytes: float) -> str:
    """Write a number of bytes in decimal units."""
    for unit in UNITS[:-1]:
        if n_bytes < 999.5:
            return f"{n_bytes:.3g} {unit}" if unit != "B" else f"{n_bytes:.0f} B"
        n_bytes /= 1000
    return f"{n_bytes:.4g} {UNITS[-1]}"


def ratio(stored_bytes: int, tensor_bytes: int) -> str:
    """Write stored size by decoded size, in bytes, with both named."""
    if not tensor_bytes:
        return "no tensor bytes"
    share = f"{stored_bytes / tensor_bytes:.4f} of raw"
    if f"{stored_bytes / tensor_bytes:.3g}" == "1":
        return f"1.0x, nothing gained, {share}"
    if stored_bytes > tensor_bytes:
        return f"{times(stored_bytes / tensor_bytes)} larger, {share}"
    return f"{times(tensor_bytes / stored_bytes)} smaller, {share}" if stored_bytes else share


def times(factor: float) -> str:
    """Write a ratio with three digits, or as a whole number where that has more."""
    return f"{factor:,.0f}x" if factor >= 1000 else f"{factor:.3g}x"


def cut(text: str, n: int = 100) -> str:
    """Write at most `n` characters of a text that comes from a file, and what does not print as escapes."""
    return printable(text) if len(text) <= n else f"{printable(text[:n])}... ({len(text)} characters)"


def percent(share: float | None) -> str:
    """Write a share as a percentage of three digits; a dash for None."""
    return "–" if share is None else f"{100 * share:.3g} %"


def smaller(tensor_bytes: int, stored_bytes: int) -> str:
    """Format the compression ratio; a dash if there are no bytes."""
    if not tensor_bytes or not stored_bytes:
        return "–"
    factor = tensor_bytes / stored_bytes
    return f"{times(factor)} smaller" if factor >= 1 else f"{times(1 / factor)} larger"


def heading(name: str) -> str:
    """Return the heading of a report's field."""
    known = {
        "tensor_bytes": "raw",
        "stored_bytes": "stored",
        "ratio": "times smaller",
        "drop": "of the budget",
    }
    return known.get(name) or name.removeprefix("n_").replace("_", " ")


def field_text(name: str, value: Any) -> str:
    """Write the value of a report's field, as its name asks for."""
    if value is None or isinstance(value, bool):
        return "–" if value is None else "yes" if value else "no"
    if isinstance(value, dict):
        part = "share" if name == "coders" else ""
        return ", ".join(f"{cut(key, 40)} {field_text(part, v)}" for key, v in value.items() if v) or "none"
    if isinstance(value, list | tuple):
        if not all(one is None or isinstance(one, str | int | float) for one in value):
            return f"{len(value)} of them"
        return (" × " if name == "shape" else ", ").join(field_text("", one) for one in value) or "–"
    if isinstance(value, str):
        return cut(value, 300)
    return _number_text(name, value)


def _number_text(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return size(value)
    if name.endswith(("share", "relative_change", "error", "drop")):
        return percent(value)
    if isinstance(value, int):
        return str(value) if name == "step" else f"{value:,}"
    return f"{value:.4g}"


# --- reports -------------------------------------------------------------------------------------


def fields_of(report: Any) -> dict[str, Any]:
    """Return the fields of a report."""
    return {field.name: getattr(report, field.name) for field in fields(report)}


def facts_of(report: Any) -> dict[str, str]:
    """Return the non-empty fields of a report as text; lists of records as their length."""
    facts: dict[str, str] = {}
    for name, value in fields_of(report).items():
        if value not in (None, ()):
            facts.setdefault(heading(name), field_text(name, value))
    return facts


class Report:
    """Reports, which are dataclasses, that notebooks show as a short table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Return the report as a table in HTML."""
        facts = facts_of(self).items()
        cells = (f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in facts)
        return f"<table>{''.join(cells)}</table>"
