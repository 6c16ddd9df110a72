"""One run of the command line: what it prints, where, and what it exits with.

Results go to stdout, as text or, with --json, as one object at the end. Errors and notes go to
stderr, a line each; with --json the object says the first error too, which decides the exit code.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from ckptz_cli.errors import Failure, failure_of, printable


class Session:
    """Handed to every command as the context's object.

    Args:
        args: the whole command line, so that even its own errors are shown as it asks.
    """

    def __init__(self, args: Sequence[str]) -> None:
        self.as_json = "--json" in args
        self.is_debug = "--debug" in args
        self.exit_code = 0
        self._document: dict[str, Any] = {}

    def show(self, report: Any, text: str) -> None:
        """The report of a command that has one."""
        self.say(text)
        self._document.update(_builtins(report))

    def add(self, report: Any, text: str) -> None:
        """The report on one of several files."""
        self.say(text)
        self._document.setdefault("files", []).append(_builtins(report))

    def note(self, text: str) -> None:
        """Something the user should know, on stderr."""
        click.echo(f"ckptz: note: {printable(text)}", err=True)

    def fail(self, error: BaseException) -> None:
        """End with this error."""
        self._say(error)

    def add_failure(self, file: str, error: BaseException) -> None:
        """One of several files failed; the others are still done."""
        failure = self._say(error)
        self._document.setdefault("files", []).append({"file": file, "error": _fields(failure)})

    def finish(self) -> int:
        """Print what is left; the exit code."""
        if self.as_json and self._document:
            click.echo(json.dumps(self._document, indent=1))
        return self.exit_code

    def say(self, text: str) -> None:
        """A result that is text only."""
        if not self.as_json:
            click.echo(text)

    def _say(self, error: BaseException) -> Failure:
        if self.is_debug:
            traceback.print_exception(error, file=sys.stderr)
        failure = failure_of(error)
        click.echo(f"ckptz: {failure.message}", err=True)
        self.exit_code = self.exit_code or failure.exit_code
        self._document.setdefault("error", _fields(failure))
        return failure


def _fields(failure: Failure) -> dict[str, Any]:
    return {"kind": failure.kind, "message": failure.message, "exit_code": failure.exit_code}


def _builtins(report: Any) -> Any:
    import msgspec

    return msgspec.to_builtins(report)
