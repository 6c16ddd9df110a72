"""The base class of reports that notebooks show."""

from __future__ import annotations

from dataclasses import fields
from html import escape
from typing import Any

from ckptz.pages.words import field_text, heading


def fields_of(report: Any) -> dict[str, Any]:
    """Give the fields of a report."""
    return {field.name: getattr(report, field.name) for field in fields(report)}


def facts_of(report: Any) -> dict[str, str]:
    """Say what the fields of a report are that have a value; of lists of records how many there are."""
    facts: dict[str, str] = {}
    for name, value in fields_of(report).items():
        if value not in (None, ()):
            facts.setdefault(heading(name), field_text(name, value))
    return facts


class Shown:
    """Reports, which are dataclasses, that notebooks show as a short table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Give the report as a table in HTML."""
        facts = facts_of(self).items()
        cells = (f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in facts)
        return f"<table>{''.join(cells)}</table>"
