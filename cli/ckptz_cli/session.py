"""One run of the command line: its streams, messages and exit code.

Results go to stdout as text, or with --json as one JSON object at the end. Errors and notes go to stderr, one
line each; the first error determines the exit code and is part of the JSON object. The file name `-` means
standard input, which is copied to a temporary file first, or standard output, which is also the default
output for standard input; results then go to stderr. A progress bar is only shown on a terminal. No other
module of the library is imported unless an error occurs.

0 ok    1 internal    2 usage    3 damaged    4 unsupported    5 missing file or base
6 budget not met    7 I/O    10 checkpoints differ (diff --exit-code)    130 interrupted
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
from collections.abc import Iterable, Iterator, Sequence
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
    errno.ECONNREFUSED: "check the address, and that the server runs",
}


def failure_of(error: BaseException) -> tuple[int, str]:
    """Return the exit code and a one-line message for an error, which may contain control characters."""
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        message = " ".join(error.format_message().split()).rstrip(".")
        link = " See" if message.endswith("?") else "; see"
        return USAGE, message + (f"{link} {context.command_path} --help" if context is not None else "")
    if isinstance(error, KeyboardInterrupt | click.Abort):
        # click replaces a KeyboardInterrupt.
        interrupt = error.__cause__ if isinstance(error, click.Abort) else error
        return INTERRUPTED, f"interrupted {interrupt or ''}".strip()
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

    if isinstance(error, SafetensorError):  # includes CkptzError, which has its exit code
        return getattr(error, "exit_code", DAMAGED), str(error)
    return (
        INTERNAL,
        f"internal error, {type(error).__name__}: {error}; please report it with the traceback (-v)",
    )


def _explain_os_error(error: OSError) -> tuple[int, str]:
    where = "" if error.filename is None else f"{error.filename}: "
    if isinstance(error.filename, bytes):
        where = f"{os.fsdecode(error.filename)}: "
    if isinstance(error, FileNotFoundError):
        return MISSING, f"{where}no such file or folder; check the path" if where else str(error)
    # Messages of CkptzError include a remedy.
    remedy = None if hasattr(error, "exit_code") else _REMEDIES.get(error.errno or 0)
    return IO, f"{where}{error.strerror or error}" + (f"; {remedy}" if remedy else "")


MIN_WIDTH: Final = 80  # columns of a terminal that shows the bar and the speed
# Keys in `meta` of the click context, set by -q and -v.
QUIET: Final = "ckptz.quiet"
VERBOSE: Final = "ckptz.verbose"
STDIN, STDOUT = "standard input", "standard output"


def has_option(name: str) -> bool:
    """Return whether the running command has the option `QUIET` or `VERBOSE`."""
    context = click.get_current_context(silent=True)
    return context is not None and context.meta.get(name, False)


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal; Python sets streams that were closed at the start to None."""
    return stream is not None and stream.isatty()


class _Bar:
    """A `ckptz.parallel.Progress` drawn by rich."""

    def __init__(self, display: rich.progress.Progress, room: int) -> None:
        self._display, self._room = display, room
        self._task: rich.progress.TaskID | None = None

    def start(self, name: str, n_bytes: int) -> None:
        """Start a file with `n_bytes` bytes of tensors."""
        if self._task is not None:
            self._display.remove_task(self._task)
        text = printable(name)
        shown = text if len(text) <= self._room else f"...{text[3 - self._room :]}"  # names differ at the end
        self._task = self._display.add_task(shown, total=n_bytes)

    def advance(self, n_bytes: int) -> None:
        """Advance the bar by a number of bytes."""
        if self._task is not None:
            self._display.advance(self._task, n_bytes)


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show a progress bar on stderr if it is a terminal, unless -q is set."""
    from ckptz.parallel import SILENT

    if has_option(QUIET) or not is_terminal(sys.stderr):
        yield SILENT
        return
    from rich import progress as bars
    from rich.console import Console
    from rich.table import Column

    # The bar never wraps: rich would erase lines printed above it when its height changes.
    console, is_shown, column = Console(stderr=True), is_terminal(sys.stdout), Column(no_wrap=True)
    columns = [bars.TextColumn("{task.description}", markup=False), bars.DownloadColumn(table_column=column)]
    if console.width >= MIN_WIDTH:
        columns += [bars.BarColumn(), bars.TransferSpeedColumn(table_column=column)]
    columns.append(bars.TimeRemainingColumn(table_column=column))
    # Results on the same terminal are printed above the bar.
    with bars.Progress(*columns, console=console, transient=True, redirect_stdout=is_shown) as display:
        yield _Bar(display, console.width // 3)


def streamed(is_output: bool, context: click.Context) -> Path:
    """Create a temporary file in place of standard input or output; `Session.receive` fills an input.

    Raises:
        click.UsageError: the stream is used twice, or is a terminal.
        OSError: the stream is closed.
    """
    session, name = context.obj, STDOUT if is_output else STDIN
    if name in session.streams.values():
        raise click.BadParameter(f"{name} can be used only once")
    stream = sys.stdout if is_output else sys.stdin
    if stream is None:
        raise OSError(errno.EBADF, "is closed", name)
    if is_terminal(stream):
        how = "redirect it, or name a file with -o" if is_output else "redirect it, or name a file"
        raise click.UsageError(f"{name} is a terminal; {how}", context)
    made = tempfile.TemporaryDirectory(prefix="ckptz-", ignore_cleanup_errors=True)
    folder = Path(context.with_resource(made))
    suffix = "" if context.command.name == "restore" else ".ckptz"
    file = folder / (f"out{suffix}" if is_output else "in")
    file.touch()  # an existing file makes verbs that write a folder raise early
    session.streams[str(file)] = name
    return file


class Verb(click.Command):
    """A command that accepts `-` as a file; standard input is read after all options are validated."""

    def invoke(self, ctx: click.Context) -> Any:
        """Read standard input, run the command, and write standard output."""
        session: Session = ctx.obj
        self._choose_output(ctx, session)
        session.receive()
        result = super().invoke(ctx)
        session.deliver()
        return result

    def _choose_output(self, ctx: click.Context, session: Session) -> None:
        """Use standard output as output of standard input, unless an output is named."""
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
                raise click.UsageError(f"--resume cannot be used with {STDOUT} as output", ctx)
            if "force" in params:
                params["force"] = True  # the temporary file exists already


class Session:
    """Output and exit code of one command line; the object of the click context.

    Args:
        args: the command line, whose --json and --verbose also apply to usage errors.
    """

    def __init__(self, args: Sequence[str]) -> None:
        self.args = args
        self.as_json = "--json" in args
        self.is_verbose = "-v" in args or "--verbose" in args
        self.exit_code = 0
        self._document: dict[str, Any] = {}
        self._has_reader = True
        self.streams: dict[str, str] = {}  # temporary files of streams, and the names of the streams
        self._is_delivered = False

    def receive(self) -> None:
        """Copy standard input to its temporary file, if it is used.

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
        """Copy the temporary file of standard output to the stream, if it is used; once.

        Raises:
            OSError: the stream cannot be written.
        """
        for file in (Path(file) for file, stream in self.streams.items() if stream == STDOUT):
            if self._is_delivered or not file.stat().st_size:
                return
            self._is_delivered = True
            try:
                sys.stdout.flush()
                with file.open("rb") as output:
                    shutil.copyfileobj(output, sys.stdout.buffer)
                    sys.stdout.buffer.flush()
            except OSError as error:
                self._has_reader = False
                _silence_stdout()
                if isinstance(error, BrokenPipeError):  # click would ignore it
                    raise OSError(errno.EIO, "its reader ended before the data did", STDOUT) from None
                raise OSError(error.errno, error.strerror, STDOUT) from None

    def show(
        self, report: Any, text: str, notes: Iterable[str] = (), problems: Iterable[Exception] = ()
    ) -> None:
        """Show the report of a command with notes and errors, after its output is delivered."""
        import msgspec

        self.deliver()
        self.say(text)
        self._document.update(msgspec.to_builtins(report))
        for note in notes:
            self.note(note)
        for problem in problems:
            self.fail(problem)

    def add(self, report: Any, text: str) -> None:
        """Show the report on one of several files, after its output is delivered."""
        import msgspec

        self.deliver()
        self.say(text)
        self._document.setdefault("files", []).append(msgspec.to_builtins(report))

    def note(self, text: str) -> None:
        """Print a note on stderr."""
        if not has_option(QUIET):
            _print_error(f"ckptz: note: {printable(self._named(text))}")

    def fail(self, error: BaseException, file: str | None = None) -> None:
        """Print an error, for the report as that of one of several files; the first sets the exit code."""
        if self.is_verbose:
            for line in "".join(traceback.format_exception(error)).splitlines():
                _print_error(printable(line))
        exit_code, message = failure_of(error)
        message = self._named(printable(message))
        failure = {"kind": type(error).__name__, "message": message, "exit_code": exit_code}
        _print_error(f"ckptz: {message}")
        self.exit_code = self.exit_code or exit_code
        self._document.setdefault("error", failure)
        if file is not None:
            self._document.setdefault("files", []).append({"file": file, "error": failure})

    def finish(self) -> int:
        """Print the JSON report and return the exit code."""
        if self.as_json and self._document:
            text = self._named(json.dumps(self._document, indent=1))
            if STDOUT in self.streams.values():
                _print_error(text)
            else:
                self._print(f"{text}\n")
        self._print("")  # flushes what click printed itself
        return self.exit_code

    def say(self, text: str) -> None:
        """Print a result that is not part of the JSON report."""
        if STDOUT in self.streams.values() and not self.as_json:
            self.note(text)
        elif not (self.as_json or has_option(QUIET)):
            self._print(self._named(text) + "\n")

    def _named(self, text: str) -> str:
        """Replace the names of temporary files by the names of their streams."""
        for file, stream in self.streams.items():
            text = text.replace(file, stream)
        return text

    def _print(self, text: str) -> None:
        """Write to stdout; an error sets the exit code, and the verb continues."""
        if not self._has_reader:
            return
        try:
            if sys.stdout is None and text:
                raise OSError(errno.EBADF, "is closed", STDOUT)
            # The file is named, else click bypasses the redirection of a progress bar.
            click.echo(text, nl=False, file=sys.stdout)
        except OSError as error:
            self._has_reader = False
            if not isinstance(error, BrokenPipeError):  # the reader ended first, as `head` does
                self.fail(OSError(error.errno, error.strerror, STDOUT))
            _silence_stdout()


def _print_error(line: str) -> None:
    if sys.stderr is None:  # closed; click would write to stdout instead
        return
    with contextlib.suppress(OSError):  # stderr is full or its reader is gone
        click.echo(line, file=sys.stderr)


def _silence_stdout() -> None:
    """Redirect stdout to /dev/null, so that flushing its buffer at exit cannot fail."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or not a file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
