"""The command `ckptz`. Each verb parses, makes one library call and renders what it returns.

Nothing heavy loads here: a verb imports the library inside itself, so that `--help` stays quick.
"""

from __future__ import annotations

import contextlib
import gc
import io
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Final, NoReturn

import click

from ckptz._version import __version__
from ckptz_cli.options import session_options
from ckptz_cli.session import USAGE, Session
from ckptz_cli.verbs import compress, diff, inspect, log, prune, rebase, report, restore, verify, warm_up

# From a scheduler, and from a terminal that is closed; Windows has no such signal.
STOPS: Final = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
SIGNALLED: Final = 128  # the exit code is this and the signal's number, as shells report it

EPILOG: Final = """\b
Examples:
  ckptz compress model.safetensors
  ckptz compress step-2.safetensors --base step-1.ckptz
  ckptz restore model.ckptz -o restored.safetensors
  ckptz verify model.ckptz --against model.safetensors

\b
Exit codes:
    0  done
    1  an error in ckptz
    2  wrong usage
    3  damaged file
    4  unsupported
    5  file or base missing
    6  budget not kept (written without loss)
    7  disk
   10  differ (diff --exit-code)
  130  interrupted
"""


class Program(click.Group):
    """A group whose errors are one line on stderr and an exit code by cause."""

    def main(self, args: Sequence[str] | None = None, *_: Any, **__: Any) -> NoReturn:
        """Run a command line, by default the process's own, and exit."""
        words = sys.argv[1:] if args is None else list(args)
        session = Session(words)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a terminal may lack characters that names have
                stream.reconfigure(errors="backslashreplace")
        with _unwinding_when_terminated():
            try:
                super().main(words or ["--help"], "ckptz", standalone_mode=False, obj=session)
            except Exception as error:
                session.fail(error)
            sys.exit(session.finish() or (0 if words else USAGE))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find a verb; for `decompress` name `restore`, where click would propose `compress`."""
        if args[0] == "decompress":
            ctx.fail("No such command 'decompress'. Did you mean 'restore'?")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the verbs in the order in which they were added, which is that of their use."""
        del ctx
        return list(self.commands)


@contextlib.contextmanager
def _unwinding_when_terminated() -> Iterator[None]:
    """Handle termination signals like Ctrl-C, so that temporary files are removed."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(SIGNALLED + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.getsignal(number) for number in STOPS}
    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:  # under nohup it shall go on
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _show_version(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        from ckptz.format.index import FORMAT_VERSION

        click.echo(f"ckptz {__version__} (format {FORMAT_VERSION})")
        context.exit()


@click.group(cls=Program, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Print the version of ckptz and of its format.",
)
@session_options
def main() -> None:
    """Make training checkpoints smaller, and get them back.

    By default every bit comes back. Stored against an earlier checkpoint, a file is smaller still; with a
    method or a budget it is lossy and many times smaller. `ckptz VERB --help` says more.
    """
    # Looking for cycles among a million entries of indices takes a fifth of the time.
    gc.set_threshold(100_000)


for _verb in (compress, restore, inspect, verify, log, report, diff, rebase, prune, warm_up):
    main.add_command(_verb)
