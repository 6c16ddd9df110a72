"""How a conversion tells what it has done so far."""

from __future__ import annotations

from typing import Final, Protocol


class Progress(Protocol):
    """Told in tensor bytes, from the caller's own thread."""

    def start(self, name: str, n_bytes: int) -> None:
        """Say that a file of this many bytes comes next."""
        ...

    def advance(self, n_bytes: int) -> None:
        """Say that so many more bytes are done."""
        ...


class _Silent:
    def start(self, name: str, n_bytes: int) -> None:
        """Say nothing."""

    def advance(self, n_bytes: int) -> None:
        """Say nothing."""


SILENT: Final[Progress] = _Silent()
