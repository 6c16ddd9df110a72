"""The base class of reports that notebooks show; it loads the pages when a notebook asks for one."""

from __future__ import annotations


class Shown:
    """Reports that notebooks show as tables."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Give the report as HTML, without scripts."""
        from ckptz.pages.notebook import shown

        return shown(self)
