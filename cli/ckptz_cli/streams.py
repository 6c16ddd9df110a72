"""`-` in the place of a file: standard input, which is read whole first, and standard output."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

import click

STDIN, STDOUT = "standard input", "standard output"
_SUFFIXES: Final = {"restore": ".safetensors", "apply": ".safetensors"}  # of outputs, else .ckptz


def streamed(is_output: bool, context: click.Context) -> Path:
    """Give a temporary file with what came in, or for what is to go out when the command ends well.

    Raises:
        click.BadParameter: the stream stands for two files, or for output in which something else stands.
    """
    session, stream = context.obj, STDOUT if is_output else STDIN
    if stream in session.streams.values():
        raise click.BadParameter(f"{stream} can stand for one file only")
    made = tempfile.TemporaryDirectory(prefix="ckptz-", ignore_cleanup_errors=True)
    folder = Path(context.with_resource(made))
    file = folder / (f"out{_SUFFIXES.get(context.command.name or '', '.ckptz')}" if is_output else "in")
    session.streams[str(file)] = stream
    if is_output:
        if session.as_json:
            raise click.BadParameter("with --json, standard output has no place for a file; name one")
        context.call_on_close(lambda: _send(file))  # before the folder goes
    else:
        with file.open("wb") as copy:
            shutil.copyfileobj(sys.stdin.buffer, copy)
    return file


def _send(file: Path) -> None:
    if file.is_file():
        sys.stdout.flush()
        with file.open("rb") as made, contextlib.suppress(BrokenPipeError):
            shutil.copyfileobj(made, sys.stdout.buffer)
            sys.stdout.buffer.flush()
