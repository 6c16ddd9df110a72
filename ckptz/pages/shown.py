"""What makes notebooks show a report; loads the pages when one does."""

from __future__ import annotations


class Shown:
    """Reports that notebooks show as tables."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Give the report as HTML, without scripts."""
        from ckptz.pages.notebook import shown

        return shown(self)
