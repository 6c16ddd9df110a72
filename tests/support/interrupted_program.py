"""A training program that gets a signal while its main thread waits for a save: FOLDER WHERE KIND.

The writer of step 1 waits until the signal was handled. Prints the steps that were reported as saved.
"""

import os
import signal
import sys
import threading
import time
from typing import Any

import torch

from ckptz import Checkpointer, parallel
from ckptz.run.folder import StepStore

SIGNALS = {"ctrl-c": signal.SIGINT, "caught": signal.SIGINT, "saves": signal.SIGTERM, "flag": signal.SIGUSR1}
WRITE, PAUSE = StepStore.publishing, parallel.pause


class Program:
    """A training run whose weights equal the number of the step."""

    def __init__(self, folder: str, where: str, kind: str) -> None:
        self.where, self.kind = where, kind
        self.go, self.flags = threading.Event(), list[int]()
        self.model = torch.nn.Linear(300, 300)
        self.checkpointer = Checkpointer(
            folder, self.model, jobs=1, on_save=lambda r: print("saved", r.step, flush=True)
        )

    def write_when_allowed(self, *args: Any, **options: Any) -> Any:
        if not self.go.wait(60):
            raise RuntimeError("the writer was not released within 60 seconds")
        return WRITE(*args, **options)

    def interrupt(self, lock: Any) -> None:
        parallel.pause = PAUSE
        threading.Timer(0.3, self.go.set).start()
        os.kill(os.getpid(), SIGNALS[self.kind])
        PAUSE(lock)

    def handle(self, number: int, frame: object) -> None:
        if self.kind == "flag":
            self.flags.append(number)
            return
        self.checkpointer.save(99)
        self.checkpointer.wait()
        sys.exit(0)

    def save(self, step: int) -> None:
        torch.nn.init.constant_(self.model.weight, step)
        self.checkpointer.save(step)

    def signal_at_exit(self) -> None:
        """Send the signal after the main thread has ended, while the interpreter waits for the writer."""
        while threading.main_thread().is_alive():
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(os.getpid(), SIGNALS[self.kind])
        if self.kind == "flag":
            self.go.set()

    def call(self) -> None:
        calls = {"save": lambda: self.save(2), "wait": self.checkpointer.wait}
        calls |= {"close": self.checkpointer.close, "restore": self.checkpointer.restore_latest}
        try:
            calls[self.where]()
        except KeyboardInterrupt:
            if self.kind != "caught":
                raise

    def run(self) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.kind in ("saves", "flag"):
            signal.signal(SIGNALS[self.kind], self.handle)
        StepStore.publishing = lambda *args, **options: self.write_when_allowed(*args, **options)
        self.save(1)
        parallel.pause = self.interrupt
        if self.where == "exit":
            threading.Thread(target=self.signal_at_exit, daemon=True).start()
            return
        with self.checkpointer:
            self.call()
            if self.kind == "caught" or self.flags:
                self.save(3)


if __name__ == "__main__":
    Program(*sys.argv[1:]).run()
