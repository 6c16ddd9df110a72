"""Ctrl-C where Python swallows it: in `__del__`, and before and after a fork."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable


def interrupt_later() -> None:
    """Raise KeyboardInterrupt in the main thread once the calling function has returned.

    The signal is sent from another thread: an exception raised here would be swallowed with the caller's.
    """
    _thread.start_new_thread(_interrupt_main, ())


def _interrupt_main() -> None:
    main = threading.main_thread().ident
    if hasattr(signal, "pthread_kill") and main is not None:
        signal.pthread_kill(main, signal.SIGINT)  # also ends a sleep or a read
    else:
        _thread.interrupt_main()


def finalize(call: Callable[[], object]) -> None:
    """Call a function from `__del__`; on Ctrl-C call it again, and raise KeyboardInterrupt later.

    Args:
        call: may be interrupted at any point and called again.
    """
    is_interrupted = False
    while True:
        try:
            call()
            break
        except KeyboardInterrupt:
            is_interrupted = True
    if is_interrupted:
        interrupt_later()
