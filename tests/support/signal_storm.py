"""A program that Ctrl-C meets at random times: FOLDER N_SIGNALS SEED DOOR... Prints its counts as JSON.

Each round makes one call of a door under a timer whose signal is handled as Ctrl-C is, and then one without,
whose values are compared. Ends with tracebacks and code 1 where a call takes ten seconds.
"""

import faulthandler
import json
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ckptz import Checkpointer
from ckptz.format.publish import TEMPORARY_SUFFIX
from ckptz.sync import Follower, Publisher
from ckptz.torch import load_file, save_file

PATIENCE = 10.0
ARMED = list[bool]()  # whether a signal is an interrupt
N, WIDTH = 6, 1 << 14  # tensors, and elements of each


def state(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"t{i}": torch.randn(WIDTH, generator=generator) for i in range(N)}
    return {name: tensor + step for name, tensor in tensors.items()}


def is_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Load:
    def __init__(self, folder: Path) -> None:
        self.path, self.expected = folder / "model.ckptz", state(0)
        save_file(self.expected, self.path)

    def call(self, round_: int) -> None:
        assert is_same(load_file(self.path, jobs=2), self.expected)

    check = call


class Save:
    def __init__(self, folder: Path) -> None:
        self.path, self.states = folder / "saved.ckptz", [state(0), state(1)]

    def call(self, round_: int) -> None:
        save_file(self.states[round_ % 2], self.path, jobs=2)

    def check(self, round_: int) -> None:
        if self.path.exists():  # whole, whichever of both it is
            read = load_file(self.path, jobs=2)
            assert any(is_same(read, one) for one in self.states)


class Restore:
    def __init__(self, folder: Path) -> None:
        self.model, self.n_saved = torch.nn.Linear(512, 512), 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), momentum=0.9)
        self.checkpointer = Checkpointer(folder, self.model, self.optimizer, jobs=2)

    def call(self, round_: int) -> None:
        step = round_ + 1
        with torch.no_grad():
            self.model.weight.fill_(step)
        self.checkpointer.save(step)
        self.checkpointer.restore_latest()

    def check(self, round_: int) -> None:
        self.checkpointer.wait()
        step = self.checkpointer.restore_latest()
        assert step is None or (self.model.weight == step).all(), step


class Follow:
    def __init__(self, folder: Path) -> None:
        self.publisher, self.follower = Publisher(folder, jobs=2), Follower(folder, jobs=2)
        self.live, self.states = {name: torch.zeros(WIDTH) for name in state(0)}, dict[int, float]()
        self.trained, self.step = state(0), 0

    def call(self, round_: int) -> None:
        self.step += 1
        self.trained["t0"][round_ % WIDTH] = round_ + 1
        self.publisher.publish(self.trained, step=self.step)
        self.follower.apply_to(self.live)

    def check(self, round_: int) -> None:
        self.call(round_)
        assert is_same(self.live, self.trained)


DOORS = {"load": Load, "save": Save, "restore": Restore, "follow": Follow}


def interrupted(call: Callable[[int], None], round_: int, delay: float) -> bool:
    """Make a call that a signal meets after a delay, and return whether it did."""
    try:
        ARMED.append(True)
        signal.setitimer(signal.ITIMER_REAL, delay)
        call(round_)
        ARMED.clear()
    except KeyboardInterrupt:
        return True
    finally:
        ARMED.clear()
        signal.setitimer(signal.ITIMER_REAL, 0)
    return False


def interrupt(number: int, frame: object) -> None:
    if ARMED:  # another thread may get the signal of a timer that is over
        ARMED.clear()
        raise KeyboardInterrupt


def storm(door: str, folder: Path, n_signals: int, rng: random.Random) -> dict[str, int | float]:
    folder.mkdir(parents=True)
    made, n, round_, slowest = DOORS[door](folder), 0, 1, 0.0
    for _ in range(2):
        begin = time.monotonic()
        made.call(0)
        longest = 1.1 * (time.monotonic() - begin)
    while n < n_signals:
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        begin = time.monotonic()
        n += interrupted(made.call, round_, max(rng.uniform(0, longest), 1e-6))
        slowest = max(slowest, time.monotonic() - begin)
        made.check(round_)
        round_ += 1
    faulthandler.cancel_dump_traceback_later()
    left = [path for path in folder.rglob("*") if path.name.endswith(TEMPORARY_SUFFIX)]
    return {"signals": n, "rounds": round_, "slowest": round(slowest, 3), "temporary": len(left)}


if __name__ == "__main__":
    where, n_signals, seed, *doors = sys.argv[1:]
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, interrupt)
    print(json.dumps({d: storm(d, Path(where, d), int(n_signals), random.Random(seed)) for d in doors}))
