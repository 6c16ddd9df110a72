"""Run command lines on pseudo-terminals, and return what the screen shows in the end.

The program of this module runs command lines one after another, each in a forked process with a new
pseudo-terminal, so that the library loads once. It reads cases as JSON from stdin and writes results as JSON.
"""

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import pyte

LINES = 200  # of the screen, so many that nothing scrolls away
TIMEOUT = 100.0
WAITING = "\x1b]2;waiting\x07"  # sets the title of the window, which does not change the screen
CTRL_C = b"\x03"
FEW = 5  # cases, for which warming up takes longer than it saves


@dataclass(frozen=True)
class Case:
    """A command line and the terminal that it runs on."""

    args: list[str]
    cwd: str
    columns: int = 100
    is_interrupted: bool = False  # by Ctrl-C when it opens its first file


@dataclass(frozen=True)
class Shown:
    """The output and the exit code of a command line."""

    raw: str
    exit_code: int
    columns: int

    @cached_property
    def _screen(self) -> pyte.Screen:
        screen = pyte.Screen(self.columns, LINES)
        pyte.Stream(screen).feed(self.raw)
        return screen

    @property
    def lines(self) -> list[str]:
        """The lines on the screen when the command has ended."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip("\n").split("\n")

    @property
    def is_tidy(self) -> bool:
        """True if the visible cursor is at the start of the line after the output, as a prompt expects."""
        cursor = self._screen.cursor
        return not cursor.hidden and (cursor.x, cursor.y) == (0, len(self.lines))


def shown(cases: Iterable[Case]) -> list[Shown]:
    """Run command lines on terminals, all forked from one child process."""
    all_cases = list(cases)
    process = subprocess.run(
        [sys.executable, "-m", "tests.support.terminal"],
        input=json.dumps([asdict(case) for case in all_cases]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={
            **{k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")},
            "TERM": "xterm-256color",
        },
    )
    results = json.loads(process.stdout)
    return [Shown(raw, code, case.columns) for (raw, code), case in zip(results, all_cases, strict=True)]


# --- program --------------------------------------------------------------------------------------


def _run(case: Case) -> tuple[str, int]:
    process, terminal = pty.fork()
    if process == 0:
        _be_command(case)
    raw, is_typed, end = b"", not case.is_interrupted, time.monotonic() + TIMEOUT
    with contextlib.suppress(OSError):  # raised when all other ends of the terminal are closed
        while select.select([terminal], [], [], max(0, end - time.monotonic()))[0]:
            raw += os.read(terminal, 1 << 16)
            if not is_typed and WAITING.encode() in raw:
                os.write(terminal, CTRL_C)
                is_typed = True
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL if time.monotonic() > end else 0)
    _, status = os.waitpid(process, 0)
    os.close(terminal)
    return raw.decode(errors="replace"), os.waitstatus_to_exitcode(status)


def _be_command(case: Case) -> NoReturn:
    """Run the command line in this process, whose standard streams are the terminal."""
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, case.columns, 0, 0))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(case.cwd)
    sys.stdin, sys.stdout, sys.stderr = (
        open(fd, mode, closefd=False, buffering=1)  # noqa: SIM115
        for fd, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    if case.is_interrupted:
        _wait_for_ctrl_c()
    try:
        ckptz_cli.main.main(case.args)
    except SystemExit as error:
        sys.stdout.flush()
        os._exit(error.code if isinstance(error.code, int) else 1)
    finally:
        os._exit(70)  # a command must end by SystemExit


def _wait_for_ctrl_c() -> None:
    """Make the first open of a file write a signal for the test to the terminal, and wait."""
    from ckptz.format.byte_source import FileBytes

    def open_and_wait(self: FileBytes, path: Any) -> None:
        os.write(1, WAITING.encode())
        time.sleep(TIMEOUT)

    FileBytes.__init__ = open_and_wait


if __name__ == "__main__":
    import ckptz_cli.main  # loaded once for all forked processes
    from tests.support.cli_support import a_state, ckptz, write_plain

    all_cases = [Case(**case) for case in json.load(sys.stdin)]
    if len(all_cases) > FEW:
        with tempfile.TemporaryDirectory() as warm:  # loads the kernels once for all forked processes
            ckptz("compress", *(write_plain(Path(warm) / name, a_state()) for name in "ab"), "--chain")
            ckptz("restore", Path(warm) / "b.ckptz")
    print(json.dumps([_run(case) for case in all_cases]))
