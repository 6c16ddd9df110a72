"""One run of the command line: what it reads and prints, where, and what it exits with.

Results go to stdout, as text or, with --json, as one object at the end. Errors and notes go to stderr, a
line each; with --json the object says the first error too, which decides the exit code. `-` in the place of
a file is standard input, which is read whole first, or standard output, which is that of a file from standard
input by default; results go to stderr then. Progress (bytes, speed, time left)
is shown on a terminal, and nowhere else. No library module loads before something failed.

0 ok    1 internal    2 usage    3 damaged    4 unsupported    5 missing file or base
6 budget not met    7 I/O    10 checkpoints differ, if asked for    130 interrupted
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

import click

from ckptz.words import printable

if TYPE_CHECKING:
    import rich.progress

    from ckptz.parallel import Progress

INTERNAL, USAGE, DAMAGED, MISSING, IO, INTERRUPTED = 1, 2, 3, 5, 7, 130

_REMEDIES: Final = {
    errno.ENOSPC: "free some space, or write elsewhere with -o",
    errno.EDQUOT: "free some of your quota, or write elsewhere with -o",
    errno.EFBIG: "the file size limit is reached; raise it, or write elsewhere with -o",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "write elsewhere with -o",
    errno.EISDIR: "name a file in it",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """The line that the command line prints for an error, and its exit code."""

    kind: str
    message: str
    exit_code: int


def failure_of(error: BaseException) -> Failure:
    """Return the exit code and a one-line message for an error."""
    code, message = _explain(error)
    return Failure(type(error).__name__, printable(message), code)


def _explain(error: BaseException) -> tuple[int, str]:
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        where = f"; see {context.command_path} --help" if context is not None else ""
        return USAGE, " ".join(error.format_message().split()).rstrip(".") + where
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return INTERRUPTED, f"interrupted after {error}" if str(error) else "interrupted"
    if isinstance(error, OSError):
        return _explain_os_error(error)
    if isinstance(error, UnicodeEncodeError):
        what = f"{error.object!r:.200} cannot be encoded in this locale ({error.encoding})"
        return USAGE, f"{what}; set PYTHONUTF8=1, or LC_ALL=C.UTF-8"
    if isinstance(error, MemoryError):
        return INTERNAL, "out of memory; try --jobs 1"
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return USAGE, "this needs torch; install it with: pip install 'ckptz[torch]'"
    from safetensors import SafetensorError

    if isinstance(error, SafetensorError):  # CkptzError is one, and knows its code
        return getattr(error, "exit_code", DAMAGED), str(error)
    return INTERNAL, f"internal error, {type(error).__name__}: {error}; -v shows where, please report it"


def _explain_os_error(error: OSError) -> tuple[int, str]:
    where = "" if error.filename is None else f"{error.filename}: "
    if isinstance(error.filename, bytes):
        where = f"{os.fsdecode(error.filename)}: "
    if isinstance(error, FileNotFoundError):
        return MISSING, f"{where}no such file or folder; check the path" if where else str(error)
    remedy = None if hasattr(error, "exit_code") else _REMEDIES.get(error.errno or 0)  # ours have one
    return IO, f"{where}{error.strerror or error}" + (f"; {remedy}" if remedy else "")


ROOM_FOR_ALL: Final = 80  # columns, for a bar of them all beside a name
# Set in the context's `meta` by -q and -v.
QUIET: Final = "ckptz.quiet"
VERBOSE: Final = "ckptz.verbose"
STDIN, STDOUT = "standard input", "standard output"


def is_quiet() -> bool:
    """Return whether -q was given to the command that runs."""
    context = click.get_current_context(silent=True)
    return context is not None and context.meta.get(QUIET, False)


def is_verbose() -> bool:
    """Return whether -v was given to the command that runs."""
    context = click.get_current_context(silent=True)
    return context is not None and context.meta.get(VERBOSE, False)


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal; a stream that is closed at the start is None."""
    return stream is not None and stream.isatty()


class _Bar:
    """A `ckptz.parallel.Progress` that rich draws."""

    def __init__(self, display: rich.progress.Progress, room: int) -> None:
        self._display, self._room = display, room
        self._task: rich.progress.TaskID | None = None

    def start(self, name: str, n_bytes: int) -> None:
        """Begin a file of this many tensor bytes."""
        if self._task is not None:
            self._display.remove_task(self._task)
        text = printable(name)
        shown = text if len(text) <= self._room else f"...{text[3 - self._room :]}"  # names differ at the end
        self._task = self._display.add_task(shown, total=n_bytes)

    def advance(self, n_bytes: int) -> None:
        """Add bytes that are done."""
        if self._task is not None:
            self._display.advance(self._task, n_bytes)


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress]:
    """Draw a bar on stderr if that is a terminal, and unless -q was given."""
    from ckptz.parallel import SILENT

    if is_quiet() or not is_terminal(sys.stderr):
        yield SILENT
        return
    from rich import progress as bars
    from rich.console import Console
    from rich.table import Column

    # One line at any width: a bar that folds and unfolds takes results printed above it for its own.
    console, is_shown, one = Console(stderr=True), is_terminal(sys.stdout), Column(no_wrap=True)
    columns = [bars.TextColumn("{task.description}", markup=False), bars.DownloadColumn(table_column=one)]
    if console.width >= ROOM_FOR_ALL:
        columns += [bars.BarColumn(), bars.TransferSpeedColumn(table_column=one)]
    columns.append(bars.TimeRemainingColumn(table_column=one))
    # Results printed meanwhile go above the bar, unless they go somewhere else altogether.
    with bars.Progress(*columns, console=console, transient=True, redirect_stdout=is_shown) as display:
        yield _Bar(display, console.width // 3)


def streamed(is_output: bool, context: click.Context) -> Path:
    """Make a temporary file that stands for standard input or output; `Session.receive` fills it.

    Raises:
        click.UsageError: the stream stands for two files, or data would go to a terminal.
        OSError: the stream is closed.
    """
    session, name = context.obj, STDOUT if is_output else STDIN
    if name in session.streams.values():
        raise click.BadParameter(f"{name} can stand for one file only")
    stream = sys.stdout if is_output else sys.stdin
    if stream is None:
        raise OSError(errno.EBADF, "is closed", name)
    if is_terminal(stream):
        how = "redirect it, or name a file with -o" if is_output else "redirect it, or name a file"
        raise click.UsageError(f"{name} is a terminal, and carries no file; {how}", context)
    made = tempfile.TemporaryDirectory(prefix="ckptz-", ignore_cleanup_errors=True)
    folder = Path(context.with_resource(made))
    suffix = "" if context.command.name == "restore" else ".ckptz"
    file = folder / (f"out{suffix}" if is_output else "in")
    file.touch()  # so that what makes a folder refuses it before it begins
    session.streams[str(file)] = name
    return file


class Verb(click.Command):
    """A command that takes `-` for a file: standard input is read once all options are known to be right."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command between the two streams."""
        session: Session = ctx.obj
        self._choose_output(ctx, session)
        session.receive()
        result = super().invoke(ctx)
        session.deliver()
        return result

    def _choose_output(self, ctx: click.Context, session: Session) -> None:
        """Send what becomes of standard input to standard output, where no output is named."""
        params = ctx.params
        named = next(
            (params[one.name] for one in self.params if isinstance(one, click.Argument) and one.name), ()
        )
        sources = named if isinstance(named, tuple) else (named,)
        is_read = any(session.streams.get(str(source)) == STDIN for source in sources)
        if is_read and params.get("output", self) is None and not params.get("dry_run"):
            if len(sources) > 1:
                raise click.UsageError(
                    f"{STDIN} and other inputs need an output folder; name it with -o", ctx
                )
            params["output"] = streamed(True, ctx)
        if session.streams.get(str(params.get("output"))) == STDOUT:
            if params.get("resume"):
                raise click.UsageError(f"--resume goes on with files, and the output is {STDOUT}", ctx)
            if "force" in params:
                params["force"] = True  # the file that stands for the stream is there


class Session:
    """Handed to every command as the context's object.

    `args` are the whole command line, so that even its own errors are shown as it asks.
    """

    def __init__(self, args: Sequence[str]) -> None:
        self.args = args
        self.as_json = "--json" in args
        self.is_verbose = "-v" in args or "--verbose" in args
        self.exit_code = 0
        self._document: dict[str, Any] = {}
        self._has_reader = True
        self.streams: dict[str, str] = {}  # files that stand for streams, and what messages call them
        self._is_delivered = False

    def receive(self) -> None:
        """Copy all of standard input to the file that stands for it, if there is one.

        Raises:
            OSError: the stream cannot be read, or the disk of temporary files is full.
        """
        for file in (Path(file) for file, stream in self.streams.items() if stream == STDIN):
            try:
                with file.open("wb") as copy:
                    shutil.copyfileobj(sys.stdin.buffer, copy)
            except OSError as error:
                where = f"{STDIN}, copied to {file.parent.parent} (TMPDIR)"
                raise OSError(error.errno, error.strerror, where) from None

    def deliver(self) -> None:
        """Send the file that stands for standard output, if there is one and it is not sent yet.

        Raises:
            OSError: the stream takes no more.
        """
        for file in (Path(file) for file, stream in self.streams.items() if stream == STDOUT):
            if self._is_delivered or not file.stat().st_size:
                return
            self._is_delivered = True
            try:
                sys.stdout.flush()
                with file.open("rb") as made:
                    shutil.copyfileobj(made, sys.stdout.buffer)
                    sys.stdout.buffer.flush()
            except OSError as error:
                self._has_reader = False
                _silence_stdout()
                if isinstance(error, BrokenPipeError):  # which click takes for the end of a pager
                    raise OSError(errno.EIO, "its reader ended before the data did", STDOUT) from None
                raise OSError(error.errno, error.strerror, STDOUT) from None

    def show(self, report: Any, text: str) -> None:
        """Show the report of a command that has one, once its output is where it belongs."""
        self.deliver()
        self.say(text)
        self._document.update(_builtins(report))

    def add(self, report: Any, text: str) -> None:
        """Show the report on one of several files, once its output is where it belongs."""
        self.deliver()
        self.say(text)
        self._document.setdefault("files", []).append(_builtins(report))

    def note(self, text: str) -> None:
        """Print a note for the user, on stderr."""
        if not is_quiet():
            _tell(f"ckptz: note: {printable(self._named(text))}")

    def fail(self, error: BaseException) -> Failure:
        """Print an error; the first one decides the exit code."""
        if self.is_verbose:
            for line in "".join(traceback.format_exception(error)).splitlines():
                _tell(printable(line))
        failure = failure_of(error)
        failure = replace(failure, message=self._named(failure.message))
        _tell(f"ckptz: {failure.message}")
        self.exit_code = self.exit_code or failure.exit_code
        self._document.setdefault("error", asdict(failure))
        return failure

    def add_failure(self, file: str, error: BaseException) -> None:
        """Print the error of one of several files, and go on with the others."""
        failure = self.fail(error)
        self._document.setdefault("files", []).append({"file": file, "error": asdict(failure)})

    def finish(self) -> int:
        """Print what is left, and give the exit code."""
        if self.as_json and self._document:
            text = self._named(json.dumps(self._document, indent=1))
            if STDOUT in self.streams.values():
                _tell(text)
            else:
                self._print(f"{text}\n")
        self._print("")  # flushes what click printed itself
        return self.exit_code

    def say(self, text: str) -> None:
        """Print a result that is text only."""
        if STDOUT in self.streams.values() and not self.as_json:
            self.note(text)
        elif not (self.as_json or is_quiet()):
            self._print(self._named(text) + "\n")

    def _named(self, text: str) -> str:
        """Replace the names of temporary files by those of the streams that they stand for."""
        for file, stream in self.streams.items():
            text = text.replace(file, stream)
        return text

    def _print(self, text: str) -> None:
        """Write to stdout; if that fails, the verb goes on, and the exit code tells."""
        if not self._has_reader:
            return
        try:
            if sys.stdout is None and text:
                raise OSError(errno.EBADF, "is closed", STDOUT)
            click.echo(text, nl=False, file=sys.stdout)  # named, or click writes past a bar that is drawn
        except OSError as error:
            self._has_reader = False
            if not isinstance(error, BrokenPipeError):  # then the reader has gone, as `head` does
                self.fail(OSError(error.errno, error.strerror, STDOUT))
            _silence_stdout()


def _tell(line: str) -> None:
    if sys.stderr is None:  # closed: click would write to stdout, among data
        return
    with contextlib.suppress(OSError):  # nowhere is left to say it
        click.echo(line, file=sys.stderr)


def _silence_stdout() -> None:
    """Point stdout at /dev/null, so that the rest of its buffer cannot fail when the interpreter ends."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or not one of the system
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _builtins(report: Any) -> Any:
    import msgspec

    return msgspec.to_builtins(report)
